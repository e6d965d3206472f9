"""Layers with MindSpore's names, arguments and defaults, each a torch layer that is also a Cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore import ops
from halfstep.compat.mindspore._tensor import float32
from halfstep.compat.mindspore.nn._cell import Cell, in_dtype_of
from halfstep.errors import ConfigError

Init = str | float | torch.Tensor | None

_INITIALIZERS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "zeros": torch.nn.init.zeros_,
    "ones": torch.nn.init.ones_,
    "normal": lambda t: torch.nn.init.normal_(t, std=0.01),
    "uniform": lambda t: torch.nn.init.uniform_(t, -0.07, 0.07),
    "xavieruniform": torch.nn.init.xavier_uniform_,
    "heuniform": torch.nn.init.kaiming_uniform_,
    "henormal": torch.nn.init.kaiming_normal_,
    "truncatednormal": lambda t: torch.nn.init.trunc_normal_(t, std=0.01, a=-0.02, b=0.02),
}
"""MindSpore's initializer names, lower case without underscores, with MindSpore's default ranges."""


def _initialize(parameter: torch.Tensor | None, init: Init) -> None:
    if parameter is None or init is None:
        return
    with torch.no_grad():
        if isinstance(init, str):
            name = init.lower().replace("_", "")
            if name not in _INITIALIZERS:
                raise ConfigError(f"unknown initializer {init!r}: expected one of {', '.join(_INITIALIZERS)}")
            _INITIALIZERS[name](parameter)
        elif isinstance(init, torch.Tensor):
            parameter.copy_(init)
        else:
            parameter.fill_(init)


class SequentialCell(torch.nn.Sequential, Cell):
    """Cells run one after the other; given one by one, as a list, or by name."""

    def __init__(self, *args: Any) -> None:
        listed = len(args) == 1 and isinstance(args[0], list | tuple)
        super().__init__(*(args[0] if listed else args))


class CellList(torch.nn.ModuleList, Cell):
    """A list of cells."""


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
        _initialize(self.w, w)
        self.prelu = ops.PReLU()

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, ...]."""
        return self.prelu(x, self.w.to(x.dtype))


class Sigmoid(torch.nn.Sigmoid, Cell):
    """1 / (1 + exp(-x))."""


class Tanh(torch.nn.Tanh, Cell):
    """The hyperbolic tangent."""


class Softmax(torch.nn.Softmax, Cell):
    """exp(x) / sum exp(x) along an axis."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(dim=axis)


class Flatten(torch.nn.Flatten, Cell):
    """Joins all dimensions after the first."""


class Dropout(torch.nn.Dropout, Cell):
    """Zeroes a share p of the elements in training; does nothing before `set_train()`."""


class MaxPool2d(Cell):
    """Largest value of each window; `pad_mode` "valid" or "same"."""

    def __init__(self, kernel_size: int = 1, stride: int = 1, pad_mode: str = "valid") -> None:
        super().__init__()
        _check_pad_mode(self, pad_mode, ("valid", "same"))
        self.kernel_size, self.stride, self.pad_mode = kernel_size, stride, pad_mode.lower()

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W]."""
        if self.pad_mode == "same":
            pads = _same_padding(x.shape[2:], *((n,) * 2 for n in (self.kernel_size, self.stride, 1)))
            x = F.pad(x, pads, value=float("-inf"))
        return F.max_pool2d(x, self.kernel_size, self.stride)


_ACTIVATIONS: Mapping[str, type[Cell]] = {"relu": ReLU, "sigmoid": Sigmoid, "tanh": Tanh, "softmax": Softmax}


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
        super().__init__(in_channels, out_channels, has_bias, dtype=dtype)
        self.in_channels, self.out_channels = in_channels, out_channels
        _initialize(self.weight, weight_init)
        _initialize(self.bias, bias_init)
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise ConfigError(f"unknown activation {activation!r}: expected one of {', '.join(_ACTIVATIONS)}")
        self.activation = _ACTIVATIONS[activation]() if isinstance(activation, str) else activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_channels] to [..., out_channels]."""
        with in_dtype_of(x, self.weight):
            y = super().forward(x)
        return y if self.activation is None else self.activation(y)


def _check_pad_mode(layer: Any, pad_mode: str, allowed: Sequence[str] = ("same", "valid", "pad")) -> None:
    if pad_mode not in allowed:
        raise ConfigError(
            f"For '{type(layer).__name__}', the 'pad_mode' must be one of {list(allowed)}, "
            f"but got {pad_mode}."
        )


def _same_padding(sizes: Sequence[int], kernel: Any, stride: Any, dilation: Any) -> list[int]:
    """Zeros for `F.pad` so that the output has ceil(size / stride) places; the odd one goes behind."""
    pads: list[int] = []
    for size, k, s, d in zip(sizes, kernel, stride, dilation):
        total = max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
        pads = [total // 2, total - total // 2, *pads]
    return pads


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
        _check_pad_mode(self, pad_mode)
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
        _initialize(self.weight, weight_init)  # type: ignore[attr-defined]
        _initialize(self.bias, bias_init)  # type: ignore[attr-defined]


class _Conv(_Padded):
    """What the convolutions share: for "same" the input is padded before torch's layer sees it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] to [N, out_channels, ...]."""
        if self.pad_mode == "same":
            x = F.pad(x, _same_padding(x.shape[2:], self.kernel_size, self.stride, self.dilation))
        with in_dtype_of(x, self.weight):
            return super().forward(x)  # type: ignore[misc]


class Conv1d(_Conv, torch.nn.Conv1d, Cell):
    """Convolution over [N, C, L]; `pad_mode` "same" (the default), "valid" or "pad"."""


class Conv2d(_Conv, torch.nn.Conv2d, Cell):
    """Convolution over [N, C, H, W]; `pad_mode` "same" (the default), "valid" or "pad"."""


class Conv3d(_Conv, torch.nn.Conv3d, Cell):
    """Convolution over [N, C, D, H, W]; `pad_mode` "same" (the default), "valid" or "pad"."""


class _ConvTranspose(_Padded):
    """What the transposed convolutions share: with "same" the output is stride times as long as the input."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] to [N, out_channels, ...]."""
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


class Conv1dTranspose(_ConvTranspose, torch.nn.ConvTranspose1d, Cell):
    """Transposed convolution over [N, C, L]."""


class Conv2dTranspose(_ConvTranspose, torch.nn.ConvTranspose2d, Cell):
    """Transposed convolution over [N, C, H, W]."""


class Conv3dTranspose(_ConvTranspose, torch.nn.ConvTranspose3d, Cell):
    """Transposed convolution over [N, C, D, H, W]."""


class _BatchNorm:
    """MindSpore's momentum is the share of the old statistics, torch's that of the new."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        gamma_init: Init = None,
        beta_init: Init = None,
    ) -> None:
        base: Any = super()
        base.__init__(num_features, eps, 1.0 - momentum, affine)
        _initialize(self.weight, gamma_init)  # type: ignore[attr-defined]
        _initialize(self.bias, beta_init)  # type: ignore[attr-defined]


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d, Cell):
    """Batch normalisation of [N, C] or [N, C, L]."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d, Cell):
    """Batch normalisation of [N, C, H, W]."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d, Cell):
    """Batch normalisation of [N, C, D, H, W]."""


class LayerNorm(torch.nn.LayerNorm, Cell):
    """Normalisation over the last dimensions, which have `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        gamma_init: Init = None,
        beta_init: Init = None,
        epsilon: float = 1e-7,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, epsilon)
        _initialize(self.weight, gamma_init)
        _initialize(self.bias, beta_init)


class _Recurrent:
    def __init__(self, input_size: int, hidden_size: int, has_bias: bool = True, **kwargs: Any) -> None:
        base: Any = super()
        base.__init__(input_size, hidden_size, has_bias, **kwargs)


class LSTMCell(_Recurrent, torch.nn.LSTMCell, Cell):
    """One step of an LSTM: (x, (h, c)) to (h, c)."""


class RNNCell(_Recurrent, torch.nn.RNNCell, Cell):
    """One step of a plain recurrent cell: (x, h) to h; `nonlinearity` "tanh" or "relu"."""


class GRUCell(_Recurrent, torch.nn.GRUCell, Cell):
    """One step of a GRU: (x, h) to h."""
