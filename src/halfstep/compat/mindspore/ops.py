"""Primitives and functions of mindspore.ops that precision lists name, over torch.

A Primitive is a torch.nn.Module without parameters, so that `amp` finds it inside a Cell.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore._functions import grad, value_and_grad
from halfstep.compat.mindspore._tensor import as_tensor

__all__ = [
    "BatchMatMul",
    "Ger",
    "MatMul",
    "PReLU",
    "Primitive",
    "ReLU",
    "cast",
    "concat",
    "exp",
    "grad",
    "isfinite",
    "log",
    "matmul",
    "relu",
    "softmax",
    "stop_gradient",
    "value_and_grad",
]


class Primitive(torch.nn.Module):
    """An operator as an object: made once in `__init__` of a Cell, called in `construct`."""


class MatMul(Primitive):
    """Product of two matrices, either of them transposed first."""

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        super().__init__()
        self.transpose_a, self.transpose_b = transpose_a, transpose_b

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[..., M, K] and [..., K, N] to [..., M, N]."""
        return torch.matmul(a.mT if self.transpose_a else a, b.mT if self.transpose_b else b)


class BatchMatMul(MatMul):
    """Products of batches of matrices."""


class ReLU(Primitive):
    """max(x, 0)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return torch.relu(x)


class PReLU(Primitive):
    """x where positive, else weight * x, by channel."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] and [C] or [1]."""
        return F.prelu(x, weight)


class Ger(Primitive):
    """Outer product of two vectors."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[M] and [N] to [M, N]."""
        return torch.outer(a, b)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in another dtype."""
    return as_tensor(x.to(dtype))


def concat(tensors: Any, axis: int = 0) -> torch.Tensor:
    """Join tensors along an axis."""
    return torch.cat(tuple(tensors), axis)


def softmax(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """exp(x) / sum exp(x) along an axis."""
    return torch.softmax(x, axis)


def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """`x`, through which no gradient flows."""
    return x.detach()


matmul, relu, exp, log, isfinite = torch.matmul, torch.relu, torch.exp, torch.log, torch.isfinite
