"""Layers and losses with MindSpore's names, arguments and defaults, most a torch layer that is also a Cell.

At level auto, and in any region under the op table "mindspore", a recurrent cell is matrix products in 16
bits and the rest in the widest dtype, as MindSpore builds it: its bias additions promote to fp32.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore import ops
from halfstep.compat.mindspore.common.initializer import Init, initialize
from halfstep.compat.mindspore.dtype import float32
from halfstep.compat.mindspore.nn._cell import (
    Cell,
    check_flag,
    check_positive,
    check_sizes,
    in_dtype_of,
    promotes,
)
from halfstep.errors import ConfigError

__all__ = [
    "GELU",
    "GRU",
    "LSTM",
    "RNN",
    "AvgPool2d",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CellList",
    "ClipByNorm",
    "Conv1d",
    "Conv1dTranspose",
    "Conv2d",
    "Conv2dTranspose",
    "Conv3d",
    "Conv3dTranspose",
    "CrossEntropyLoss",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GRUCell",
    "GroupNorm",
    "Identity",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "L1Loss",
    "LSTMCell",
    "LayerNorm",
    "LeakyReLU",
    "LogSoftmax",
    "LossBase",
    "MSELoss",
    "MaxPool2d",
    "MultiheadAttention",
    "NLLLoss",
    "PReLU",
    "RNNCell",
    "ReLU",
    "SequentialCell",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "SoftmaxCrossEntropyWithLogits",
    "Tanh",
]


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


def _row(layer: Any, says: str, shared: Any = None, name: str = "") -> Any:
    """The class of cells that are a layer of torch's, by its name or another, with what a family shares."""
    bases = (layer, Cell) if shared is None else (shared, layer, Cell)
    return type(name or layer.__name__, bases, {"__doc__": says, "__module__": __name__})


def _by_dims(shared: Any, layer: str, says: str, name: str = "") -> list[Any]:
    """Three such classes, over series, images and volumes."""
    shapes = enumerate(("[N, C, L]", "[N, C, H, W]", "[N, C, D, H, W]"), 1)
    layers = ((n, getattr(torch.nn, f"{layer}{n}d"), shape) for n, shape in shapes)
    return [_row(found, says.format(shape), shared, name.format(n)) for n, found, shape in layers]


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


class UnknownName(ConfigError, KeyError):
    """A name that no table has; a KeyError as in MindSpore."""

    __str__ = Exception.__str__


Identity = _row(torch.nn.Identity, "Its input.")


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


CellList = _row(torch.nn.ModuleList, "A list of cells.", name="CellList")


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


Conv1d, Conv2d, Conv3d = _by_dims(
    _Conv, "Conv", 'Convolution over {}; `pad_mode` "same" (the default), "valid" or "pad".'
)


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


Conv1dTranspose, Conv2dTranspose, Conv3dTranspose = _by_dims(
    _ConvTranspose, "ConvTranspose", "Transposed convolution over {}.", "Conv{}dTranspose"
)


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
        check_positive(self, num_features=num_features)
        if not 0.0 <= momentum <= 1.0:
            raise ConfigError(
                f"For '{type(self).__name__}', the 'momentum' must be in range [0, 1], but got {momentum}."
            )
        base: Any = super()
        base.__init__(num_features, eps, 1.0 - momentum, affine)
        initialize(self.weight, gamma_init)  # type: ignore[attr-defined]
        initialize(self.bias, beta_init)  # type: ignore[attr-defined]


BatchNorm1d, BatchNorm2d, BatchNorm3d = _by_dims(_BatchNorm, "BatchNorm", "Batch normalisation of {}.")


class LayerNorm(torch.nn.LayerNorm, Cell):
    """Normalisation over the last dimensions, which have `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: Sequence[int],
        *,
        gamma_init: Init = None,
        beta_init: Init = None,
        epsilon: float = 1e-7,
    ) -> None:
        if not isinstance(normalized_shape, tuple | list):
            raise TypeError(
                "For 'LayerNorm', the type of 'normalized_shape' must be tuple[int] or list[int], but got "
                f"{normalized_shape!r} and the type is '{type(normalized_shape).__name__}'."
            )
        super().__init__(list(normalized_shape), epsilon)
        initialize(self.weight, gamma_init)
        initialize(self.bias, beta_init)


class GroupNorm(torch.nn.GroupNorm, Cell):
    """Normalisation of [N, C, ...] over groups of channels."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        gamma_init: Init = None,
        beta_init: Init = None,
    ) -> None:
        check_positive(self, num_groups=num_groups, num_channels=num_channels)
        super().__init__(num_groups, num_channels, eps, affine)
        initialize(self.weight if affine else None, gamma_init)
        initialize(self.bias if affine else None, beta_init)


class _InstanceNorm:
    """As in MindSpore affine by default, and by the statistics of the batch at hand in evaluation too."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        gamma_init: Init = None,
        beta_init: Init = None,
    ) -> None:
        base: Any = super()
        base.__init__(num_features, eps, momentum, affine)
        initialize(self.weight, gamma_init)  # type: ignore[attr-defined]
        initialize(self.bias, beta_init)  # type: ignore[attr-defined]


InstanceNorm1d, InstanceNorm2d, InstanceNorm3d = _by_dims(
    _InstanceNorm, "InstanceNorm", "Normalisation of each channel of each sample of {}."
)


class Embedding(torch.nn.Embedding, Cell):
    """Rows of a table by index; `use_one_hot` multiplies by one-hot rows instead, so that lists reach it."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        use_one_hot: bool = False,
        embedding_table: Init = "normal",
        padding_idx: int | None = None,
    ) -> None:
        check_positive(self, vocab_size=vocab_size, embedding_size=embedding_size)
        super().__init__(vocab_size, embedding_size, padding_idx)
        self.vocab_size, self.embedding_size, self.use_one_hot = vocab_size, embedding_size, use_one_hot
        initialize(self.weight, embedding_table)
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx] = 0.0

    @property
    def embedding_table(self) -> torch.nn.Parameter:
        """The table, [vocab_size, embedding_size]."""
        return self.weight  # pyright: ignore[reportReturnType]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Integers of any shape to [*shape, embedding_size]."""
        if not self.use_one_hot:
            return super().forward(ids)
        return F.one_hot(ids.long(), self.vocab_size).to(self.weight.dtype) @ self.weight


class MultiheadAttention(torch.nn.MultiheadAttention, Cell):
    """Attention in several heads: (query, key, value) to (output, weights)."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        has_bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        **kwargs: Any,
    ) -> None:
        check_positive(self, embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ConfigError(
                "The init argument 'embed_dim' must be divisible by 'num_heads', "
                f"but got {embed_dim} and {num_heads}."
            )
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            has_bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            **kwargs,
        )

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As torch's; where bias additions promote, the output is as wide as the bias."""
        output, weights = super().forward(*args, **kwargs)
        bias = self.out_proj.bias
        if bias is None or not promotes(output):  # pyright: ignore[reportUnnecessaryComparison]
            return output, weights
        return output.to(torch.promote_types(output.dtype, bias.dtype)), weights


States = tuple[torch.Tensor, torch.Tensor]


class _OneStep:
    """What the cells share: MindSpore's arguments, and gates whose bias is added after the product."""

    def __init__(self, input_size: int, hidden_size: int, has_bias: bool = True, **kwargs: Any) -> None:
        check_positive(self, input_size=input_size, hidden_size=hidden_size)
        base: Any = super()
        base.__init__(input_size, hidden_size, has_bias, **kwargs)

    def _gates(self: Any, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Products of input and of state with their weights, each with its bias."""
        i, s = F.linear(x, self.weight_ih), F.linear(h, self.weight_hh)
        return (i + self.bias_ih, s + self.bias_hh) if self.bias else (i, s)


class LSTMCell(_OneStep, torch.nn.LSTMCell, Cell):
    """One step of an LSTM: (x, (h, c)) to (h, c)."""

    def forward(self, x: torch.Tensor, hx: States | None = None) -> States:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[N, input_size] and twice [N, hidden_size] to twice [N, hidden_size]."""
        if hx is None or not promotes(x):
            return super().forward(x, hx)
        h, c = hx
        of_input, of_state = self._gates(x, h)
        keep_in, forget, new, out = (of_input + of_state).chunk(4, -1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(keep_in) * torch.tanh(new)
        return torch.sigmoid(out) * torch.tanh(c), c


class RNNCell(_OneStep, torch.nn.RNNCell, Cell):
    """One step of a plain recurrent cell: (x, h) to h; `nonlinearity` "tanh" or "relu"."""

    def forward(self, x: torch.Tensor, hx: torch.Tensor | None = None) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[N, input_size] and [N, hidden_size] to [N, hidden_size]."""
        if hx is None or not promotes(x):
            return super().forward(x, hx)
        of_input, of_state = self._gates(x, hx)
        return getattr(torch, self.nonlinearity)(of_input + of_state)


class GRUCell(_OneStep, torch.nn.GRUCell, Cell):
    """One step of a GRU: (x, h) to h."""

    def forward(self, x: torch.Tensor, hx: torch.Tensor | None = None) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[N, input_size] and [N, hidden_size] to [N, hidden_size]."""
        if hx is None or not promotes(x):
            return super().forward(x, hx)
        of_input, of_state = self._gates(x, hx)
        (i_r, i_z, i_n), (h_r, h_z, h_n) = of_input.chunk(3, -1), of_state.chunk(3, -1)
        new = torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)
        return new + torch.sigmoid(i_z + h_z) * (hx - new)


class _Sequence:
    """What the layers over sequences share: MindSpore's arguments; results in the dtype of the input."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        has_bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        **kwargs: Any,
    ) -> None:
        check_positive(self, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        base: Any = super()
        base.__init__(
            input_size,
            hidden_size,
            num_layers,
            bias=has_bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            **kwargs,
        )

    def forward(
        self: Any, x: torch.Tensor, hx: Any = None, seq_length: torch.Tensor | Sequence[int] | None = None
    ) -> Any:
        """[L, N, input_size], states and lengths; gives the outputs of all steps and the last state."""
        base: Any = super()
        if seq_length is None:
            output, last = base.forward(x, hx)
        else:
            lengths = torch.as_tensor(seq_length, dtype=torch.int64).cpu()
            packed = torch.nn.utils.rnn.pack_padded_sequence(
                x, lengths, self.batch_first, enforce_sorted=False
            )
            output, last = base.forward(packed, hx)
            output, _ = torch.nn.utils.rnn.pad_packed_sequence(
                output, self.batch_first, total_length=x.shape[1 if self.batch_first else 0]
            )
        if not promotes(x):
            return output, last
        states = tuple(s.to(x.dtype) for s in last) if isinstance(last, tuple) else last.to(x.dtype)
        return output.to(x.dtype), states


RNN = _row(torch.nn.RNN, "A plain recurrent network over sequences.", _Sequence)
LSTM = _row(torch.nn.LSTM, "An LSTM over sequences: (x, (h, c)) to (outputs, (h, c)).", _Sequence)
GRU = _row(torch.nn.GRU, "A GRU over sequences: (x, h) to (outputs, h).", _Sequence)


class LossBase(Cell):
    """Base of the losses; one of your own ends with `return self.get_loss(values)`."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("none", "mean", "sum"):
            raise ConfigError(
                f"For '{type(self).__name__}', the 'reduction' must be in ['none', 'mean', 'sum'], "
                f"but got {reduction}."
            )
        self.reduction = reduction

    def get_loss(self, x: torch.Tensor, weights: float | torch.Tensor = 1.0) -> torch.Tensor:
        """`x` times `weights` in fp32, as one number or as it is by `reduction`; in the dtype of `x`."""
        weighted = x.float() * weights
        reduced = {"mean": weighted.mean, "sum": weighted.sum}.get(self.reduction)
        return (weighted if reduced is None else reduced()).to(x.dtype)


class SoftmaxCrossEntropyWithLogits(LossBase):
    """Softmax and cross entropy; `sparse=True` takes classes, otherwise probabilities (one-hot)."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, C] and [N], or [N, C] where not sparse."""
        target = labels.long() if self.sparse else labels.to(logits.dtype)
        return F.cross_entropy(logits, target, reduction=self.reduction)


def _loss(name: str, says: str, function: Any, *, classes: bool = False, **defaults: Any) -> Any:
    """The class of losses that call a function with logits, labels and these arguments, in this order.

    Labels that are `classes` may have any integer dtype.
    """
    taken = inspect.Signature(
        [
            inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=v)
            for key, v in defaults.items()
        ]
    )

    def made(self: LossBase, *args: Any, **kwargs: Any) -> None:
        given = taken.bind(*args, **kwargs)
        given.apply_defaults()
        LossBase.__init__(self, given.arguments["reduction"])
        vars(self).update(given.arguments)

    def construct(self: LossBase, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = labels.long() if classes and not labels.is_floating_point() else labels
        return function(logits, labels, **{key: getattr(self, key) for key in defaults})

    body = {"__init__": made, "construct": construct, "__signature__": taken}
    return type(name, (LossBase,), {**body, "__doc__": says, "__module__": __name__})


MSELoss = _loss("MSELoss", "Squared differences.", F.mse_loss, reduction="mean")
L1Loss = _loss("L1Loss", "Absolute differences.", F.l1_loss, reduction="mean")
BCEWithLogitsLoss = _loss(
    "BCEWithLogitsLoss", "Sigmoid and binary cross entropy.", F.binary_cross_entropy_with_logits,
    reduction="mean",
)  # fmt: skip
CrossEntropyLoss = _loss(
    "CrossEntropyLoss", "Softmax and negative log likelihood of classes, or of class probabilities.",
    F.cross_entropy, classes=True, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0,
)  # fmt: skip
NLLLoss = _loss(
    "NLLLoss", "Negative log likelihood of classes, from log-probabilities.",
    F.nll_loss, classes=True, weight=None, ignore_index=-100, reduction="mean",
)  # fmt: skip
BCELoss = _loss(
    "BCELoss", "Binary cross entropy of probabilities.", F.binary_cross_entropy, weight=None, reduction="mean"
)
SmoothL1Loss = _loss(
    "SmoothL1Loss", "Squared below `beta`, absolute above.", F.smooth_l1_loss, beta=1.0, reduction="none"
)
