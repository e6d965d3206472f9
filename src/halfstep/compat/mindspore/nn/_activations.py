"""Activations, dropout and pooling with MindSpore's names, arguments and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore import ops
from halfstep.compat.mindspore.nn._cell import Cell
from halfstep.compat.mindspore.nn._initializer import initialize
from halfstep.errors import ConfigError


def check_pad_mode(layer: Any, pad_mode: str, allowed: Sequence[str] = ("same", "valid", "pad")) -> None:
    if pad_mode not in allowed:
        raise ConfigError(
            f"For '{type(layer).__name__}', the 'pad_mode' must be one of {list(allowed)}, "
            f"but got {pad_mode}."
        )


def same_padding(sizes: Sequence[int], kernel: Any, stride: Any, dilation: Any) -> list[int]:
    """Zeros for `F.pad` so that the output has ceil(size / stride) places; the odd one goes behind."""
    pads: list[int] = []
    for size, k, s, d in zip(sizes, kernel, stride, dilation):
        total = max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
        pads = [total // 2, total - total // 2, *pads]
    return pads


class ReLU(Cell):
    """max(x, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = ops.ReLU()

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return self.relu(x)


class PReLU(Cell):
    """x where positive, else w * x, with one learned w for all channels or one for each."""

    def __init__(self, channel: int = 1, w: float | torch.Tensor = 0.25) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((channel,), 0.0))
        initialize(self.w, w)
        self.prelu = ops.PReLU()

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, ...]."""
        return self.prelu(x, self.w.to(x.dtype))


class GELU(Cell):
    """x times the normal distribution's function at x; by tanh unless `approximate` is False."""

    def __init__(self, approximate: bool = True) -> None:
        super().__init__()
        self.approximate = approximate

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return F.gelu(x, approximate="tanh" if self.approximate else "none")


class LeakyReLU(torch.nn.LeakyReLU, Cell):
    """x where positive, else alpha * x."""

    def __init__(self, alpha: float = 0.2) -> None:
        super().__init__(alpha)


def _row(layer: Any, says: str) -> Any:
    """The class of cells that are a layer of torch's, with its arguments."""
    return type(layer.__name__, (layer, Cell), {"__doc__": says, "__module__": __name__})


Sigmoid = _row(torch.nn.Sigmoid, "1 / (1 + exp(-x)).")
Tanh = _row(torch.nn.Tanh, "The hyperbolic tangent.")
SiLU = _row(torch.nn.SiLU, "x * sigmoid(x).")
Flatten = _row(torch.nn.Flatten, "Joins all dimensions after the first.")
Dropout = _row(
    torch.nn.Dropout, "Zeroes a share p of the elements in training; does nothing before `set_train()`."
)


class Softmax(torch.nn.Softmax, Cell):
    """exp(x) / sum exp(x) along an axis."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(dim=axis)


class LogSoftmax(torch.nn.LogSoftmax, Cell):
    """The logarithm of softmax along an axis."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(dim=axis)


class MaxPool2d(Cell):
    """Largest value of each window; `pad_mode` "valid" or "same"."""

    def __init__(self, kernel_size: int = 1, stride: int = 1, pad_mode: str = "valid") -> None:
        super().__init__()
        check_pad_mode(self, pad_mode, ("valid", "same"))
        self.kernel_size, self.stride, self.pad_mode = kernel_size, stride, pad_mode.lower()

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W]."""
        if self.pad_mode == "same":
            pads = same_padding(x.shape[2:], *((n,) * 2 for n in (self.kernel_size, self.stride, 1)))
            x = F.pad(x, pads, value=float("-inf"))
        return F.max_pool2d(x, self.kernel_size, self.stride)


class AvgPool2d(Cell):
    """Mean of each window; with `pad_mode` "same" over the places inside the image, with "pad" as torch's."""

    def __init__(
        self,
        kernel_size: int = 1,
        stride: int = 1,
        pad_mode: str = "valid",
        padding: int = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__()
        check_pad_mode(self, pad_mode.lower(), ("valid", "same", "pad"))
        self.kernel_size, self.stride, self.pad_mode = kernel_size, stride, pad_mode.lower()
        self.padding, self.ceil_mode, self.count_include_pad = padding, ceil_mode, count_include_pad

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W]."""
        if self.pad_mode != "same":
            return F.avg_pool2d(
                x, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad
            )
        pads = same_padding(x.shape[2:], *((n,) * 2 for n in (self.kernel_size, self.stride, 1)))
        inside = F.avg_pool2d(F.pad(torch.ones_like(x[:1, :1]), pads), self.kernel_size, self.stride)
        return F.avg_pool2d(F.pad(x, pads), self.kernel_size, self.stride) / inside


ACTIVATIONS: Mapping[str, type[Cell]] = {
    "relu": ReLU,
    "sigmoid": Sigmoid,
    "tanh": Tanh,
    "softmax": Softmax,
    "logsoftmax": LogSoftmax,
    "gelu": GELU,
    "leakyrelu": LeakyReLU,
    "silu": SiLU,
}
"""What `Dense(activation=...)` knows by name."""
