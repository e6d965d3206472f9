"""`apex.normalization.fused_layer_norm`: layer and RMS norms with fp32 statistics, by torch's own kernels.

The `Mixed` ones return the dtype of their weight, the others that of their input.
"""

from __future__ import annotations

import numbers
import warnings
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import HalfstepWarning, UnsupportedError

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


def _shape(normalized_shape: Any) -> tuple[int, ...]:
    return (
        (int(normalized_shape),)
        if isinstance(normalized_shape, numbers.Integral)
        else tuple(normalized_shape)
    )


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors of one dtype as they are, of several in fp32: torch's kernels take one."""
    kinds = {t.dtype for t in tensors if t is not None}
    return [t if t is None or len(kinds) == 1 else t.float() for t in tensors]


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, in the input's dtype.

    `memory_efficient` is taken and has no effect: torch keeps the input and two numbers a row.
    """
    x, w, b = _wide(input, weight, bias)
    assert x is not None
    return F.layer_norm(x, _shape(normalized_shape), w, b, eps).to(input.dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_layer_norm_affine` without weight and bias."""
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_layer_norm_affine` in the dtype of the weight."""
    x, w, b = _wide(input, weight, bias)
    assert x is not None
    return F.layer_norm(x, _shape(normalized_shape), w, b, eps).to(weight.dtype)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions, in the input's dtype."""
    x, w = _wide(input, weight)
    assert x is not None
    return F.rms_norm(x, list(_shape(normalized_shape)), w, eps).to(input.dtype)


def fused_rms_norm(
    input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_rms_norm_affine` without a weight."""
    return fused_rms_norm_affine(input, None, normalized_shape, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_rms_norm_affine` in the dtype of the weight."""
    x, w = _wide(input, weight)
    assert x is not None
    return F.rms_norm(x, list(_shape(normalized_shape)), w, eps).to(weight.dtype)


class _Normalizes:
    """Apex's arguments of a normalization; `memory_efficient` is kept and changes nothing here."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        base: Any = super()
        base.__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_Normalizes, nn.LayerNorm):
    """torch's LayerNorm, which takes a weight of another dtype than its input's as well."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., *normalized_shape]."""
        return fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(_Normalizes, nn.RMSNorm):
    """torch's RMSNorm, which takes a weight of another dtype than its input's as well."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., *normalized_shape]."""
        return fused_rms_norm_affine(x, self.weight, self.normalized_shape, self.eps or 1e-5)


def _always_affine(name: str, options: dict[str, Any]) -> None:
    unknown = options.keys() - {"elementwise_affine"}
    if unknown:
        raise TypeError(f"{name} got an unexpected argument {sorted(unknown)[0]!r}")
    if "elementwise_affine" in options:
        warnings.warn(f"{name} has no elementwise_affine: it is always affine", HalfstepWarning, stacklevel=3)
    if not options.get("elementwise_affine", True):
        raise UnsupportedError(f"{name} does not support elementwise_affine=False, as in Apex")


class MixedFusedLayerNorm(FusedLayerNorm):
    """FusedLayerNorm whose output has the dtype of its weight."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False, **options: Any
    ) -> None:
        _always_affine("MixedFusedLayerNorm", options)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """[..., *normalized_shape]."""
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """FusedRMSNorm whose output has the dtype of its weight."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False, **options: Any
    ) -> None:
        _always_affine("MixedFusedRMSNorm", options)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, x: Tensor) -> Tensor:
        """[..., *normalized_shape]."""
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, self.eps or 1e-5)
