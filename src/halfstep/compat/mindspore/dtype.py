"""mindspore.dtype, imported as `mstype`: torch's dtypes under MindSpore's names."""

import torch

float16, float32, float64, bfloat16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
int8, int16, int32, int64 = torch.int8, torch.int16, torch.int32, torch.int64
uint8, bool_ = torch.uint8, torch.bool
half, single, double = float16, float32, float64

__all__ = [
    "bfloat16",
    "bool_",
    "double",
    "float16",
    "float32",
    "float64",
    "half",
    "int8",
    "int16",
    "int32",
    "int64",
    "single",
    "uint8",
]
