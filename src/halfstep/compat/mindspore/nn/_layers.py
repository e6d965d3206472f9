"""Layers with MindSpore's names, arguments and defaults, each a torch layer that is also a Cell."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore._tensor import float32
from halfstep.compat.mindspore.nn._activations import ACTIVATIONS, check_pad_mode, same_padding
from halfstep.compat.mindspore.nn._cell import (
    Cell,
    check_flag,
    check_positive,
    check_sizes,
    in_dtype_of,
    promotes,
)
from halfstep.compat.mindspore.nn._initializer import Init, initialize
from halfstep.errors import ConfigError


class UnknownName(ConfigError, KeyError):
    """A name that no table has; a KeyError as in MindSpore."""

    __str__ = Exception.__str__


class Identity(torch.nn.Identity, Cell):
    """Its input."""


class ClipByNorm(Cell):
    """A tensor times clip_norm / max(clip_norm, its norm along `axis`, or over all), in fp32."""

    def __init__(self, axis: int | tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.axis = axis

    def construct(self, x: torch.Tensor, clip_norm: torch.Tensor) -> torch.Tensor:
        """Any shape; `clip_norm` is a number of it, or broadcasts."""
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=self.axis, keepdim=self.axis is not None)
        bound = torch.as_tensor(clip_norm, dtype=torch.float32, device=x.device)
        return wide * (bound / torch.maximum(bound, norm))


class SequentialCell(torch.nn.Sequential, Cell):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Cells run one after the other; given one by one, as a list, or by name."""

    def __init__(self, *args: Any) -> None:
        listed = len(args) == 1 and isinstance(args[0], list | tuple)
        super().__init__(*(args[0] if listed else args))


class CellList(torch.nn.ModuleList, Cell):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A list of cells."""


class Dense(torch.nn.Linear, Cell):
    """x W^T + b, fp32 weights; on an input cast by hand it computes in the input's dtype."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        weight_init: Init = None,
        bias_init: Init = None,
        has_bias: bool = True,
        activation: str | Cell | None = None,
        dtype: torch.dtype = float32,
    ) -> None:
        check_positive(self, in_channels=in_channels, out_channels=out_channels)
        check_flag(self, has_bias=has_bias)
        super().__init__(in_channels, out_channels, has_bias, dtype=dtype)
        self.in_channels, self.out_channels = in_channels, out_channels
        initialize(self.weight, weight_init)
        initialize(self.bias, bias_init)
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise UnknownName(f"unknown activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
        self.activation = ACTIVATIONS[activation]() if isinstance(activation, str) else activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[..., in_channels] to [..., out_channels]."""
        if self.bias is not None and promotes(x):  # pyright: ignore[reportUnnecessaryComparison]
            y = F.linear(x, self.weight) + self.bias
        else:
            with in_dtype_of(x, self.weight):
                y = super().forward(x)
        return y if self.activation is None else self.activation(y)


class _Padded:
    """What all convolutions share: MindSpore's arguments; only "pad" leaves the padding to torch's layer."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        pad_mode: str = "same",
        padding: Any = 0,
        dilation: Any = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Init = None,
        bias_init: Init = None,
        dtype: torch.dtype = float32,
    ) -> None:
        check_positive(self, in_channels=in_channels, out_channels=out_channels, group=group)
        check_sizes(self, kernel_size=kernel_size, stride=stride, dilation=dilation)
        check_flag(self, has_bias=has_bias)
        check_pad_mode(self, pad_mode)
        inside = padding if pad_mode == "pad" else 0
        base: Any = super()
        base.__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            inside,
            dilation=dilation,
            groups=group,
            bias=has_bias,
            dtype=dtype,
        )
        self.pad_mode = pad_mode
        initialize(self.weight, weight_init)  # type: ignore[attr-defined]
        initialize(self.bias, bias_init)  # type: ignore[attr-defined]


class _Conv(_Padded):
    """What the convolutions share: for "same" the input is padded before torch's layer sees it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] to [N, out_channels, ...]."""
        if self.pad_mode == "same":
            x = F.pad(x, same_padding(x.shape[2:], self.kernel_size, self.stride, self.dilation))
        if self.bias is not None and promotes(x):
            channels = (-1, *(1,) * (self.weight.dim() - 2))
            return self._conv_forward(x, self.weight, None) + self.bias.view(channels)
        with in_dtype_of(x, self.weight):
            return super().forward(x)  # type: ignore[misc]


class Conv1d(_Conv, torch.nn.Conv1d, Cell):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Convolution over [N, C, L]; `pad_mode` "same" (the default), "valid" or "pad"."""


class Conv2d(_Conv, torch.nn.Conv2d, Cell):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Convolution over [N, C, H, W]; `pad_mode` "same" (the default), "valid" or "pad"."""


class Conv3d(_Conv, torch.nn.Conv3d, Cell):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Convolution over [N, C, D, H, W]; `pad_mode` "same" (the default), "valid" or "pad"."""


class _ConvTranspose(_Padded):
    """What the transposed convolutions share: with "same" the output is stride times as long as the input."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] to [N, out_channels, ...]."""
        if self.bias is not None and promotes(x):
            y = self._without_bias(x) + self.bias.view(-1, *(1,) * (self.weight.dim() - 2))
        else:
            with in_dtype_of(x, self.weight):
                y = super().forward(x)  # type: ignore[misc]
        if self.pad_mode != "same":
            return y
        for axis, (size, stride) in enumerate(zip(x.shape[2:], self.stride), start=2):
            excess = y.shape[axis] - size * stride
            y = y.narrow(axis, max(excess, 0) // 2, min(size * stride, y.shape[axis]))
            if excess < 0:
                y = F.pad(y, [0, 0] * (y.dim() - 1 - axis) + [0, -excess])
        return y

    def _without_bias(self: Any, x: torch.Tensor) -> torch.Tensor:
        convolve = getattr(F, f"conv_transpose{self.weight.dim() - 2}d")
        edges = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return convolve(x, self.weight, None, *edges)


class Conv1dTranspose(_ConvTranspose, torch.nn.ConvTranspose1d, Cell):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Transposed convolution over [N, C, L]."""


class Conv2dTranspose(_ConvTranspose, torch.nn.ConvTranspose2d, Cell):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Transposed convolution over [N, C, H, W]."""


class Conv3dTranspose(_ConvTranspose, torch.nn.ConvTranspose3d, Cell):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Transposed convolution over [N, C, D, H, W]."""
