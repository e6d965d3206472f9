"""NVIDIA Apex's mixed precision under its own names: `from halfstep.compat.apex import amp`.

Also `optimizers` (six Fused ones), `fp16_utils` (FP16_Optimizer ...) and `parallel`. They
translate to halfstep; unlike Apex they rebind no method of a model or optimizer, and `amp.shutdown()`
undoes everything.
"""

from halfstep.compat.apex import amp, fp16_utils, optimizers, parallel

__all__ = ["amp", "fp16_utils", "optimizers", "parallel"]
