"""Layers and losses with MindSpore's names, arguments and defaults, most a torch layer that is also a Cell.

At level auto, and in any region under the op table "mindspore", a recurrent cell is matrix products in 16
bits and the rest in the widest dtype, as MindSpore builds it: its bias additions promote to fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore import ops
from halfstep.compat.mindspore.common.initializer import initialize
from halfstep.compat.mindspore.dtype import float32
from halfstep.compat.mindspore.nn._cell import Cell, Renamed, check_reduction, in_dtype_of, promotes
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


def same_padding(sizes: Sequence[int], kernel: Any, stride: Any, dilation: Any) -> list[int]:
    """Zeros for `F.pad` so that the output has ceil(size / stride) places; the odd one goes behind."""
    pads: list[int] = []
    for size, k, s, d in zip(sizes, kernel, stride, dilation):
        total = max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
        pads = [total // 2, total - total // 2, *pads]
    return pads


def _row(layer: Any, says: str, *shared: Any, name: str = "", last: type[Cell] = Cell, **takes: Any) -> Any:
    """The class of cells that are a layer of torch's, by its name or another, with what a family shares."""
    first = shared or ((Renamed,) if takes else ())
    body = {"__doc__": says, "__module__": __name__}
    return type(name or layer.__name__, (*first, layer, last), body, **takes)


def _by_dims(layer: str, says: str, *shared: Any, name: str = "", **takes: Any) -> list[Any]:
    """Three such classes, over series, images and volumes."""
    shapes = enumerate(("[N, C, L]", "[N, C, H, W]", "[N, C, D, H, W]"), 1)
    layers = ((n, getattr(torch.nn, f"{layer}{n}d"), shape) for n, shape in shapes)
    return [_row(kind, says.format(at), *shared, name=name.format(n), **takes) for n, kind, at in layers]


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


class GELU(torch.nn.GELU, Cell):
    """x times the normal distribution's function at x; by tanh unless `approximate` is False."""

    def __init__(self, approximate: bool = True) -> None:
        super().__init__("tanh" if approximate else "none")


LeakyReLU = _row(torch.nn.LeakyReLU, "x where positive, else alpha * x.", alpha=0.2)
Sigmoid = _row(torch.nn.Sigmoid, "1 / (1 + exp(-x)).")
Tanh = _row(torch.nn.Tanh, "The hyperbolic tangent.")
SiLU = _row(torch.nn.SiLU, "x * sigmoid(x).")
Flatten = _row(torch.nn.Flatten, "Joins all dimensions after the first.")
Dropout = _row(
    torch.nn.Dropout, "Zeroes a share p of the elements in training; does nothing before `set_train()`."
)
Softmax = _row(torch.nn.Softmax, "exp(x) / sum exp(x) along an axis.", axis=-1)
LogSoftmax = _row(torch.nn.LogSoftmax, "The logarithm of softmax along an axis.", axis=-1)


class _Padded(Renamed):
    """What convolutions and pooling share: only "pad" leaves the padding to torch's layer."""

    def _for_torch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        mode = arguments["pad_mode"] = arguments["pad_mode"].lower()
        if mode not in ("same", "valid", "pad"):
            raise ConfigError(
                f"For '{type(self).__name__}', the 'pad_mode' must be one of ['same', 'valid', 'pad'], "
                f"but got {mode}."
            )
        return {**super()._for_torch(arguments), "padding": arguments["padding"] if mode == "pad" else 0}


class MaxPool2d(
    _Padded,
    torch.nn.MaxPool2d,
    Cell,
    kernel_size=1,
    stride=1,
    pad_mode="valid",
    padding=0,
    dilation=1,
    return_indices=False,
    ceil_mode=False,
):
    """Largest value of each window; `pad_mode` "valid", "same" or "pad"."""

    def forward(self, x: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[N, C, H, W]."""
        if self.pad_mode == "same":
            sizes = ((n,) * 2 for n in (self.kernel_size, self.stride, self.dilation))
            x = F.pad(x, same_padding(x.shape[2:], *sizes), value=float("-inf"))
        return super().forward(x)


class AvgPool2d(
    _Padded,
    torch.nn.AvgPool2d,
    Cell,
    kernel_size=1,
    stride=1,
    pad_mode="valid",
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
):
    """Mean of each window; with `pad_mode` "same" over the places inside the image, with "pad" as torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[N, C, H, W]."""
        if self.pad_mode != "same":
            return super().forward(x)
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


class _Multiplying(Renamed):
    """Layers that multiply by a weight; where bias additions promote, the bias is added to the product."""

    def _product(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Without the bias."""
        raise NotImplementedError

    def _compute(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None and promotes(x):
            return self._product(x) + self.bias.view(-1, *(1,) * (self.weight.dim() - 2))
        with in_dtype_of(x, self.weight):
            return super().forward(x)  # type: ignore[misc]


class Dense(
    _Multiplying,
    torch.nn.Linear,
    Cell,
    in_channels=...,
    out_channels=...,
    weight_init=None,
    bias_init=None,
    has_bias=True,
    activation=None,
    dtype=float32,
):
    """x W^T + b, fp32 weights; on an input cast by hand it computes in the input's dtype."""

    activation: Any

    def _for_torch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        named = arguments["activation"]
        if isinstance(named, str) and named not in ACTIVATIONS:
            raise UnknownName(f"unknown activation {named!r}: expected one of {', '.join(ACTIVATIONS)}")
        arguments["activation"] = ACTIVATIONS[named]() if isinstance(named, str) else named
        torch_arguments = super()._for_torch(arguments)
        return {
            "in_features": torch_arguments.pop("in_channels"),
            "out_features": torch_arguments.pop("out_channels"),
            **torch_arguments,
        }

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[..., in_channels] to [..., out_channels]."""
        y = self._compute(x)
        return y if self.activation is None else self.activation(y)


class _Convolving(
    _Padded,
    _Multiplying,
    in_channels=...,
    out_channels=...,
    kernel_size=...,
    stride=1,
    pad_mode="same",
    padding=0,
    dilation=1,
    group=1,
    has_bias=False,
    weight_init=None,
    bias_init=None,
    dtype=float32,
):
    """The arguments of all convolutions."""


class _Conv(_Convolving):
    """What the convolutions share: for "same" the input is padded before torch's layer sees it."""

    def _product(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.weight, None)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] to [N, out_channels, ...]."""
        if self.pad_mode == "same":
            x = F.pad(x, same_padding(x.shape[2:], self.kernel_size, self.stride, self.dilation))
        return self._compute(x)


Conv1d, Conv2d, Conv3d = _by_dims(
    "Conv", 'Convolution over {}; `pad_mode` "same" (the default), "valid" or "pad".', _Conv
)


class _ConvTranspose(_Convolving):
    """What the transposed convolutions share: with "same" the output is stride times as long as the input."""

    def _product(self: Any, x: torch.Tensor) -> torch.Tensor:
        convolve = getattr(F, f"conv_transpose{self.weight.dim() - 2}d")
        edges = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return convolve(x, self.weight, None, *edges)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] to [N, out_channels, ...]."""
        y = self._compute(x)
        if self.pad_mode != "same":
            return y
        for axis, (size, stride) in enumerate(zip(x.shape[2:], self.stride), start=2):
            excess = y.shape[axis] - size * stride
            y = y.narrow(axis, max(excess, 0) // 2, min(size * stride, y.shape[axis]))
            if excess < 0:
                y = F.pad(y, [0, 0] * (y.dim() - 1 - axis) + [0, -excess])
        return y


Conv1dTranspose, Conv2dTranspose, Conv3dTranspose = _by_dims(
    "ConvTranspose", "Transposed convolution over {}.", _ConvTranspose, name="Conv{}dTranspose"
)


class _BatchNorm(
    Renamed, num_features=..., eps=1e-5, momentum=0.9, affine=True, gamma_init=None, beta_init=None
):
    """MindSpore's momentum is the share of the old statistics, torch's that of the new."""

    def _for_torch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        momentum = arguments["momentum"]
        if not 0.0 <= momentum <= 1.0:
            raise ConfigError(
                f"For '{type(self).__name__}', the 'momentum' must be in range [0, 1], but got {momentum}."
            )
        return {**super()._for_torch(arguments), "momentum": 1.0 - momentum}


BatchNorm1d, BatchNorm2d, BatchNorm3d = _by_dims("BatchNorm", "Batch normalisation of {}.", _BatchNorm)


LayerNorm = _row(
    torch.nn.LayerNorm,
    "Normalisation over the last dimensions, which have `normalized_shape`.",
    by_name=("gamma_init", "beta_init", "epsilon"),
    normalized_shape=...,
    gamma_init=None,
    beta_init=None,
    epsilon=1e-7,
)
GroupNorm = _row(
    torch.nn.GroupNorm,
    "Normalisation of [N, C, ...] over groups of channels.",
    num_groups=...,
    num_channels=...,
    eps=1e-5,
    affine=True,
    gamma_init=None,
    beta_init=None,
)

# As in MindSpore affine by default, and by the statistics of the batch at hand in evaluation too.
InstanceNorm1d, InstanceNorm2d, InstanceNorm3d = _by_dims(
    "InstanceNorm",
    "Normalisation of each channel of each sample of {}.",
    num_features=...,
    eps=1e-5,
    momentum=0.1,
    affine=True,
    gamma_init=None,
    beta_init=None,
)


class Embedding(
    Renamed,
    torch.nn.Embedding,
    Cell,
    vocab_size=...,
    embedding_size=...,
    use_one_hot=False,
    embedding_table="normal",
    padding_idx=None,
):
    """Rows of a table by index; `use_one_hot` multiplies by one-hot rows instead, so that lists reach it."""

    vocab_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.padding_idx is not None:  # pyright: ignore[reportUnnecessaryComparison]
            with torch.no_grad():
                self.weight[self.padding_idx] = 0.0

    @property
    def embedding_table(self) -> torch.nn.Parameter:
        """The table, [vocab_size, embedding_size]."""
        return self.weight  # pyright: ignore[reportReturnType]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Integers of any shape to [*shape, embedding_size]."""
        if not self.use_one_hot:
            return super().forward(ids)
        return F.one_hot(ids.long(), self.vocab_size).to(self.weight.dtype) @ self.weight


class MultiheadAttention(
    Renamed,
    torch.nn.MultiheadAttention,
    Cell,
    embed_dim=...,
    num_heads=...,
    dropout=0.0,
    has_bias=True,
    add_bias_kv=False,
    add_zero_attn=False,
    kdim=None,
    vdim=None,
    batch_first=False,
):
    """Attention in several heads: (query, key, value) to (output, weights)."""

    def _for_torch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["embed_dim"] % arguments["num_heads"]:
            raise ConfigError(
                "The init argument 'embed_dim' must be divisible by 'num_heads', "
                f"but got {arguments['embed_dim']} and {arguments['num_heads']}."
            )
        return super()._for_torch(arguments)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As torch's; where bias additions promote, the output is as wide as the bias."""
        output, weights = super().forward(*args, **kwargs)
        bias = self.out_proj.bias
        if bias is None or not promotes(output):  # pyright: ignore[reportUnnecessaryComparison]
            return output, weights
        return output.to(torch.promote_types(output.dtype, bias.dtype)), weights


States = tuple[torch.Tensor, torch.Tensor]


class _OneStep(Renamed, input_size=..., hidden_size=..., has_bias=True):
    """What the cells share: gates whose bias is added after the product."""

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


class _Sequence(
    Renamed,
    input_size=...,
    hidden_size=...,
    num_layers=1,
    has_bias=True,
    batch_first=False,
    dropout=0.0,
    bidirectional=False,
):
    """What the layers over sequences share: results in the dtype of the input."""

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
        check_reduction(type(self).__name__, reduction)
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


class _OfClasses(Renamed):
    """A loss whose labels are classes of any integer dtype, or probabilities."""

    def forward(self: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] and [N, ...], or of one shape."""
        return super().forward(logits, labels if labels.is_floating_point() else labels.long())  # type: ignore[misc]


_loss = functools.partial(_row, last=LossBase)
MSELoss = _loss(torch.nn.MSELoss, "Squared differences.", reduction="mean")
L1Loss = _loss(torch.nn.L1Loss, "Absolute differences.", reduction="mean")
BCEWithLogitsLoss = _loss(torch.nn.BCEWithLogitsLoss, "Sigmoid and binary cross entropy.", reduction="mean")
CrossEntropyLoss = _loss(
    torch.nn.CrossEntropyLoss,
    "Softmax and negative log likelihood of classes, or of class probabilities.",
    _OfClasses,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
)
NLLLoss = _loss(
    torch.nn.NLLLoss,
    "Negative log likelihood of classes, from log-probabilities.",
    _OfClasses,
    weight=None,
    ignore_index=-100,
    reduction="mean",
)
BCELoss = _loss(torch.nn.BCELoss, "Binary cross entropy of probabilities.", weight=None, reduction="mean")
SmoothL1Loss = _loss(
    torch.nn.SmoothL1Loss, "Squared below `beta`, absolute above.", beta=1.0, reduction="none"
)
