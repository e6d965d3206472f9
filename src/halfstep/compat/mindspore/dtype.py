"""mindspore.dtype, imported as `mstype`: torch's dtypes under MindSpore's names."""

from halfstep.compat.mindspore._tensor import (
    bfloat16,
    bool_,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
)

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
