"""`apex.normalization.fused_layer_norm`: layer and RMS norms with fp32 statistics, by torch's own kernels.

The `Mixed` ones return the dtype of their weight, the others that of their input.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def _normalize(norm: Any, shape: Any, eps: float, dtype: torch.dtype, *tensors: Tensor | None) -> Tensor:
    """torch's kernel, which takes one dtype: of several all go to fp32; the result in `dtype`."""
    kinds = {t.dtype for t in tensors if t is not None}
    x, *parameters = [t if t is None or len(kinds) == 1 else t.float() for t in tensors]
    sizes = (int(shape),) if isinstance(shape, numbers.Integral) else tuple(shape)
    return norm(x, sizes, *parameters, eps).to(dtype)


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
    return _normalize(F.layer_norm, normalized_shape, eps, input.dtype, input, weight, bias)


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
    return _normalize(F.layer_norm, normalized_shape, eps, weight.dtype, input, weight, bias)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions, in the input's dtype."""
    return _normalize(F.rms_norm, normalized_shape, eps, input.dtype, input, weight)


def fused_rms_norm(
    input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_rms_norm_affine` without a weight."""
    return fused_rms_norm_affine(input, None, normalized_shape, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_rms_norm_affine` in the dtype of the weight."""
    return _normalize(F.rms_norm, normalized_shape, eps, weight.dtype, input, weight)


class _Normalizes:
    """Apex's arguments of a normalization; `memory_efficient` is kept and changes nothing here."""

    _as_its_weight = False

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

    def _compute(self: Any, norm: Any, input: Tensor, *parameters: Tensor | None) -> Tensor:
        dtype_source = self.weight if self._as_its_weight and self.weight is not None else input
        return _normalize(norm, self.normalized_shape, self.eps, dtype_source.dtype, input, *parameters)


class FusedLayerNorm(_Normalizes, nn.LayerNorm):
    """torch's LayerNorm, which takes a weight of another dtype than its input's as well."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., *normalized_shape]."""
        return self._compute(F.layer_norm, input, self.weight, self.bias)


class FusedRMSNorm(_Normalizes, nn.RMSNorm):
    """torch's RMSNorm, which takes a weight of another dtype than its input's as well."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., *normalized_shape]."""
        return self._compute(F.rms_norm, x, self.weight)


class MixedFusedLayerNorm(FusedLayerNorm):
    """FusedLayerNorm whose output has the dtype of its weight, where it has one."""

    _as_its_weight = True


class MixedFusedRMSNorm(FusedRMSNorm):
    """FusedRMSNorm whose output has the dtype of its weight, where it has one."""

    _as_its_weight = True
