"""mindspore.common.initializer: ways for weights to begin, as objects, with MindSpore's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.compat.mindspore._tensor import Tensor, as_tensor
from halfstep.compat.mindspore.nn._initializer import Initializer, initialize

__all__ = [
    "Constant",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "Normal",
    "One",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "Zero",
    "initializer",
]


@dataclass
class Normal(Initializer):
    """A normal distribution."""

    sigma: float = 0.01
    mean: float = 0.0

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        torch.nn.init.normal_(t, self.mean, self.sigma)


@dataclass
class TruncatedNormal(Initializer):
    """A normal distribution cut off `a` deviations below and `b` above its mean."""

    sigma: float = 0.01
    mean: float = 0.0
    a: float = -2.0
    b: float = 2.0

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        low, high = self.mean + self.a * self.sigma, self.mean + self.b * self.sigma
        torch.nn.init.trunc_normal_(t, self.mean, self.sigma, low, high)


@dataclass
class Uniform(Initializer):
    """Uniform within plus and minus `scale`."""

    scale: float = 0.07

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        torch.nn.init.uniform_(t, -self.scale, self.scale)


@dataclass
class XavierUniform(Initializer):
    """Glorot and Bengio 2010, uniform."""

    gain: float = 1

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        torch.nn.init.xavier_uniform_(t, self.gain)


@dataclass
class XavierNormal(XavierUniform):
    """Glorot and Bengio 2010, normal."""

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        torch.nn.init.xavier_normal_(t, self.gain)


@dataclass
class HeUniform(Initializer):
    """He et al. 2015, uniform."""

    negative_slope: float = 0
    mode: Any = "fan_in"
    nonlinearity: Any = "leaky_relu"

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        torch.nn.init.kaiming_uniform_(t, self.negative_slope, self.mode, self.nonlinearity)


@dataclass
class HeNormal(HeUniform):
    """He et al. 2015, normal."""

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        torch.nn.init.kaiming_normal_(t, self.negative_slope, self.mode, self.nonlinearity)


@dataclass
class Constant(Initializer):
    """One number everywhere."""

    value: float

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        torch.nn.init.constant_(t, self.value)


@dataclass
class Zero(Initializer):
    """0 everywhere."""

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        torch.nn.init.zeros_(t)


@dataclass
class One(Initializer):
    """1 everywhere."""

    def fill(self, t: torch.Tensor) -> None:
        """In place."""
        torch.nn.init.ones_(t)


def initializer(
    init: Initializer | str | float | torch.Tensor,
    shape: Sequence[int] | int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A new tensor of this shape, filled at once.

    Raises:
        ValueError: a name that no initializer has.
    """
    sizes = init.shape if shape is None and isinstance(init, torch.Tensor) else shape
    made = torch.empty((sizes,) if isinstance(sizes, int) else tuple(sizes or ()))
    initialize(made, init)
    return as_tensor(made.to(dtype))
