"""Primitives and functions of mindspore.ops that precision lists name, over torch.

A Primitive is a torch.nn.Module without parameters, so that `amp` finds it inside a Cell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_input

from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore._function_ops import (
    GradOperation,
    HyperMap,
    MultitypeFuncGraph,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    depend,
    partial,
    tuple_to_array,
)
from halfstep.compat.mindspore._functions import grad, value_and_grad
from halfstep.compat.mindspore._tensor import as_tensor
from halfstep.compat.mindspore._value_ops import fill, identity, scalar_to_tensor, select
from halfstep.errors import ConfigError

__all__ = [
    "Add",
    "BatchMatMul",
    "Cast",
    "Conv2D",
    "Conv2DBackpropInput",
    "Conv2DTranspose",
    "Conv3D",
    "Conv3DTranspose",
    "Depend",
    "Div",
    "Fill",
    "Ger",
    "GradOperation",
    "HyperMap",
    "Identity",
    "Map",
    "MatMul",
    "Mul",
    "MultitypeFuncGraph",
    "OnesLike",
    "PReLU",
    "Primitive",
    "ReLU",
    "Reciprocal",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "ScalarToTensor",
    "Select",
    "Softmax",
    "Sqrt",
    "Sub",
    "Transpose",
    "ZerosLike",
    "argmax",
    "assign",
    "assign_add",
    "cast",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "composite",
    "concat",
    "cross_entropy",
    "depend",
    "dtype",
    "equal",
    "exp",
    "expand_dims",
    "fill",
    "functional",
    "gelu",
    "grad",
    "identity",
    "isfinite",
    "log",
    "log_softmax",
    "matmul",
    "mean",
    "ones_like",
    "operations",
    "partial",
    "reciprocal",
    "reduce_mean",
    "reduce_sum",
    "relu",
    "reshape",
    "scalar_to_tensor",
    "select",
    "shape",
    "sigmoid",
    "softmax",
    "sqrt",
    "square",
    "stack",
    "stop_gradient",
    "sum",
    "tanh",
    "transpose",
    "tuple_to_array",
    "value_and_grad",
    "zeros_like",
]


class Primitive(torch.nn.Module):
    """An operator as an object: made once in `__init__` of a Cell, called in `construct`."""

    def _options(self) -> tuple[Any, ...]:
        """What follows the arguments of the call."""
        return ()


def _row(name: str, function: Callable[..., Any], says: str, base: type[Primitive] = Primitive) -> Any:
    """The class of objects that call a function with what they are given and their options."""

    def forward(self: Primitive, *args: Any) -> Any:
        return function(*args, *self._options())

    return type(name, (base,), {"forward": forward, "__doc__": says, "__module__": __name__})


class MatMul(Primitive):
    """Product of two matrices, [..., M, K] and [..., K, N], either of them transposed first."""

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        super().__init__()
        self.transpose_a, self.transpose_b = transpose_a, transpose_b

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[..., M, N]."""
        return torch.matmul(a.mT if self.transpose_a else a, b.mT if self.transpose_b else b)


class BatchMatMul(MatMul):
    """Products of batches of matrices."""


class _Convolution(Primitive):
    """Made of what a convolution is, but its weight, which comes with the call."""

    def __init__(
        self,
        out_channel: int,
        kernel_size: Any,
        mode: int = 1,
        pad_mode: str = "valid",
        pad: Any = 0,
        stride: Any = 1,
        dilation: Any = 1,
        group: int = 1,
    ) -> None:
        super().__init__()
        if pad_mode.lower() not in ("valid", "pad"):
            raise ConfigError(
                f"For '{type(self).__name__}', the 'pad_mode' must be 'valid' or 'pad' here, "
                f"got {pad_mode!r}: nn.Conv2d knows 'same' too"
            )
        self.out_channel, self.kernel_size, self.stride = out_channel, kernel_size, stride
        self.pad = pad if pad_mode.lower() == "pad" else 0
        self.dilation, self.group = dilation, group

    def _options(self) -> tuple[Any, ...]:
        return None, self.stride, self.pad, self.dilation, self.group


class ReduceSum(Primitive):
    """The sum over some dimensions, or over all."""

    def __init__(self, keep_dims: bool = False) -> None:
        super().__init__()
        self.keep_dims = keep_dims

    def forward(self, x: torch.Tensor, axis: Any = ()) -> torch.Tensor:
        """`axis`: a number, several, or () for all."""
        return torch.sum(x, _dims(x, axis), self.keep_dims)


class ReduceMean(ReduceSum):
    """The mean over some dimensions, or over all."""

    def forward(self, x: torch.Tensor, axis: Any = ()) -> torch.Tensor:
        """`axis`: a number, several, or () for all."""
        return torch.mean(x, _dims(x, axis), self.keep_dims)


class Softmax(Primitive):
    """`softmax` as an object."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return softmax(logits, self.axis)


def cast(x: Any, dtype: torch.dtype) -> torch.Tensor:
    """`x`, a tensor or a number, in another dtype."""
    return as_tensor(torch.as_tensor(x).to(dtype))


def _dims(x: torch.Tensor, axis: Any) -> Any:
    return tuple(range(x.dim())) if axis is None or axis == () or axis == [] else axis


def mean(x: torch.Tensor, axis: Any = None, keep_dims: bool = False) -> torch.Tensor:
    """The mean over some dimensions, or over all."""
    return torch.mean(x, _dims(x, axis), keep_dims)


def reciprocal(x: Any) -> torch.Tensor:
    """1 / x, of a tensor or a number."""
    return torch.reciprocal(torch.as_tensor(x))


def transpose(x: torch.Tensor, dims: Any) -> torch.Tensor:
    """The dimensions in another order, all of them named."""
    return x.permute(tuple(dims))


def dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of a tensor."""
    return x.dtype


def shape(x: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor."""
    return tuple(x.shape)


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Softmax and negative log likelihood of classes of any integer dtype, or of probabilities."""
    target = target if target.is_floating_point() else target.long()
    return F.cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def log_softmax(logits: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """log(softmax(x)) along an axis."""
    return torch.log_softmax(logits, axis)


@torch.no_grad()
def assign(variable: torch.Tensor, value: Any) -> torch.Tensor:
    """Write `value` into `variable`, and give it back."""
    return variable.copy_(torch.as_tensor(value))


@torch.no_grad()
def assign_add(variable: torch.Tensor, value: Any) -> torch.Tensor:
    """Add `value` to `variable` in place, and give it back."""
    return variable.add_(value)


def concat(tensors: Any, axis: int = 0) -> torch.Tensor:
    """Join tensors along an axis."""
    return torch.cat(tuple(tensors), axis)


def softmax(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """exp(x) / sum exp(x) along an axis."""
    return torch.softmax(x, axis)


def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """`x`, through which no gradient flows."""
    return x.detach()


Add = _row("Add", torch.add, "x + y.")
Sub = _row("Sub", torch.sub, "x - y.")
Mul = _row("Mul", torch.mul, "x * y.")
Div = _row("Div", torch.div, "x / y.")
Sqrt = _row("Sqrt", torch.sqrt, "The square root.")
Reciprocal = _row("Reciprocal", reciprocal, "1 / x, of a tensor or a number.")
ReLU = _row("ReLU", torch.relu, "max(x, 0).")
PReLU = _row("PReLU", F.prelu, "x where positive, else weight * x, by channel: [N, C, ...] and [C] or [1].")
Ger = _row("Ger", torch.outer, "Outer product of two vectors.")
Reshape = _row("Reshape", torch.reshape, "x in another shape.")
Transpose = _row("Transpose", torch.permute, "x with its dimensions in another order, all of them named.")
OnesLike = _row("OnesLike", torch.ones_like, "Ones in the shape and dtype of x.")
ZerosLike = _row("ZerosLike", torch.zeros_like, "Zeros in the shape and dtype of x.")
Cast = _row("Cast", cast, "`cast` as an object.")
Depend = _row("Depend", depend, "`depend` as an object.")
Fill = _row("Fill", fill, "`fill` as an object.")
Identity = _row("Identity", identity, "`identity` as an object.")
ScalarToTensor = _row("ScalarToTensor", scalar_to_tensor, "`scalar_to_tensor` as an object.")
Select = _row("Select", select, "`select` as an object.")
Conv2D = _row("Conv2D", F.conv2d, "Convolution of [N, C, H, W] with the weight given.", _Convolution)
Conv3D = _row("Conv3D", F.conv3d, "Convolution of [N, C, D, H, W] with the weight given.", _Convolution)


class Conv2DTranspose(_Convolution):
    """The gradient of Conv2D by its input: (gradient of the output, weight, shape of the input)."""

    def forward(self, dout: torch.Tensor, weight: torch.Tensor, input_size: Any) -> torch.Tensor:
        """[N, out, H, W] and [out, C / group, h, w] to `input_size`."""
        return conv2d_input(tuple(input_size), weight, dout, *self._options()[1:])


class Conv3DTranspose(_Convolution):
    """The gradient of Conv3D by its input: (gradient of the output, weight)."""

    def forward(self, dout: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[N, out, D, H, W] and [out, C / group, d, h, w] to [N, C, ...]."""
        return F.conv_transpose3d(dout, weight, None, self.stride, self.pad, 0, self.group, self.dilation)


class Conv2DBackpropInput(Conv2DTranspose):
    """The older name of Conv2DTranspose."""


matmul, relu, exp, log, isfinite = torch.matmul, torch.relu, torch.exp, torch.log, torch.isfinite
sum, ones_like, zeros_like, expand_dims = torch.sum, torch.ones_like, torch.zeros_like, torch.unsqueeze
sigmoid, tanh, gelu, square, sqrt = torch.sigmoid, torch.tanh, F.gelu, torch.square, torch.sqrt
argmax, equal, reshape, stack = torch.argmax, torch.eq, torch.reshape, torch.stack
reduce_mean, reduce_sum, Map = mean, ReduceSum(), HyperMap
composite: ModuleType = sys.modules[__name__]
functional = operations = composite
__getattr__ = absent("ops")
