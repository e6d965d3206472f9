"""NVIDIA Apex's mixed precision under its own names: `from halfstep.compat.apex import amp`.

Also `optimizers` (six Fused ones), `normalization`, `fp16_utils` (FP16_Optimizer ...) and `parallel`. They
translate to halfstep; unlike Apex they rebind no method of a model or optimizer, and `amp.shutdown()`
undoes everything. What Apex has beside precision is refused by name, with what to use.
"""

from typing import Any

from halfstep.compat.apex import amp, fp16_utils, normalization, optimizers, parallel

__all__ = ["amp", "fp16_utils", "normalization", "optimizers", "parallel"]

_ELSEWHERE = {
    "RNN": "torch.nn.LSTM and GRU, which run low at O1",
    "contrib": "torch's own ops: scaled_dot_product_attention, cross_entropy, Conv2d and BatchNorm2d",
    "fused_dense": "torch.nn.Linear and GELU, fused by torch.compile",
    "mlp": "torch.nn.Sequential of Linear and ReLU, fused by torch.compile",
    "multi_tensor_apply": "halfstep.optim, whose steps are one pass, and halfstep.all_finite",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "transformer": "torch.distributed.tensor.parallel, with halfstep.prepare",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        raise AttributeError(
            f"halfstep.compat.apex has no {name!r}, which is not about precision: use {_ELSEWHERE[name]}"
        )
    raise AttributeError(f"module 'halfstep.compat.apex' has no attribute {name!r}")
