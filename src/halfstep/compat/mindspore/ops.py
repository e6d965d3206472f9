"""Primitives and functions of mindspore.ops that precision lists and training cells name, over torch.

A Primitive is a torch.nn.Module without parameters, so that `amp` finds it inside a Cell.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_input
from torch.nn.utils import get_total_norm

from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore._functions import grad as grad
from halfstep.compat.mindspore._functions import gradients_of, signature_of
from halfstep.compat.mindspore._functions import value_and_grad as value_and_grad
from halfstep.compat.mindspore._tensor import Tensor, as_tensor, check_kind, plain_tensor
from halfstep.errors import ConfigError, UnsupportedError


class Primitive(torch.nn.Module):
    """An operator as an object: made once in `__init__` of a Cell, called in `construct`."""


def _row(name: str, function: Callable[..., Any], says: str, **options: Any) -> Any:
    """The class of objects that call a function, made with these options of it in this order."""
    signature = signature_of(options)

    def __init__(self: Primitive, *args: Any, **kwargs: Any) -> None:
        Primitive.__init__(self)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        vars(self).update(bound.arguments)

    def forward(self: Primitive, *args: Any) -> Any:
        return function(*args, **{option: getattr(self, option) for option in options})

    body = {"__init__": __init__, "forward": forward, "__doc__": says, "__module__": __name__}
    return type(name, (Primitive,), body)


def _product(a: torch.Tensor, b: torch.Tensor, transpose_a: bool, transpose_b: bool) -> torch.Tensor:
    return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)


def _convolve(function: Callable[..., torch.Tensor], *inputs: Any, pad_mode: str, **made_of: Any) -> Any:
    """A convolution by torch's function; its weight comes with the call."""
    if pad_mode.lower() not in ("valid", "pad"):
        raise ConfigError(
            f"a convolution's 'pad_mode' must be 'valid' or 'pad' here, got {pad_mode!r}: nn.Conv2d knows "
            "'same' too"
        )
    pad = made_of["pad"] if pad_mode.lower() == "pad" else 0
    stride, dilation, groups = made_of["stride"], made_of["dilation"], made_of["group"]
    return function(*inputs, stride=stride, padding=pad, dilation=dilation, groups=groups)


def _convolution(name: str, function: Callable[..., torch.Tensor], says: str) -> Any:
    return _row(
        name,
        functools.partial(_convolve, function),
        says,
        out_channel=...,
        kernel_size=...,
        mode=1,
        pad_mode="valid",
        pad=0,
        stride=1,
        dilation=1,
        group=1,
    )


def _by_input(dout: torch.Tensor, weight: torch.Tensor, input_size: Any, **edges: Any) -> torch.Tensor:
    return conv2d_input(tuple(input_size), weight, dout, **edges)


Conv2D = _convolution("Conv2D", F.conv2d, "Convolution of [N, C, H, W] with [out, C / group, h, w].")
Conv3D = _convolution("Conv3D", F.conv3d, "Convolution of [N, C, D, H, W] with [out, C / group, d, h, w].")
Conv2DTranspose = _convolution(
    "Conv2DTranspose", _by_input, "The gradient of Conv2D by its input, of its output, weight, input's shape."
)
Conv3DTranspose = _convolution(
    "Conv3DTranspose", F.conv_transpose3d, "The gradient of Conv3D by its input, of its output and weight."
)


class Conv2DBackpropInput(Conv2DTranspose):
    """The older name of Conv2DTranspose."""


def cast(x: Any, dtype: torch.dtype) -> torch.Tensor:
    """`x`, a tensor or a number, in another dtype."""
    return as_tensor(torch.as_tensor(x).to(dtype))


def _sum(x: torch.Tensor, axis: Any = (), keep_dims: bool = False) -> torch.Tensor:
    return torch.sum(x, axis, keep_dims)


def mean(x: torch.Tensor, axis: Any = None, keep_dims: bool = False) -> torch.Tensor:
    """The mean over some dimensions, or over all."""
    return torch.mean(x, axis, keep_dims)


def reciprocal(x: Any) -> torch.Tensor:
    """1 / x, of a tensor or a number."""
    return torch.reciprocal(torch.as_tensor(x))


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
    return variable.copy_(torch.as_tensor(value, dtype=variable.dtype))


@torch.no_grad()
def assign_add(variable: torch.Tensor, value: Any) -> torch.Tensor:
    """Add `value` to `variable` in place, and give it back."""
    return variable.add_(value)


def softmax(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """exp(x) / sum exp(x) along an axis."""
    return torch.softmax(x, axis)


def fill(type: torch.dtype | None, shape: Any, value: Any) -> Tensor:
    """A tensor of one value, rounded to `type` (too large a value is inf); None keeps the value's dtype.

    Raises:
        TypeError: a shape that is no tuple, list or tensor of integers.
    """
    check_kind("fill", "shape", shape, tuple, list, torch.Tensor)
    sizes = [int(size) for size in shape]
    exact = torch.tensor(value, dtype=torch.float64) if isinstance(value, float) and type else value
    filled = torch.as_tensor(exact).to(type).expand(sizes)
    return as_tensor(filled.clone(memory_format=torch.contiguous_format))


def _full(size: Any, value: Any, dtype: torch.dtype | None) -> Tensor:
    sizes = size.tolist() if isinstance(size, torch.Tensor) else size
    return fill(dtype, [sizes] if isinstance(sizes, int) else sizes, value)


def ones(shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Ones, in fp32 unless told otherwise; the shape is an int, a tuple or a tensor."""
    return _full(shape, 1, dtype or torch.float32)


def zeros(size: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros, in fp32 unless told otherwise; the shape is an int, a tuple or a tensor."""
    return _full(size, 0, dtype or torch.float32)


def full(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of one value, in the value's own dtype unless told otherwise."""
    return _full(size, fill_value, dtype)


def arange(start: Any = 0, end: Any = None, step: Any = 1, *, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers from `start` (0, where one bound is given) up to but not including `end`."""
    bounds = (0, start) if end is None else (start, end)
    return as_tensor(torch.arange(*bounds, step, dtype=dtype))


def _of_two(name: str, function: Callable[..., torch.Tensor], says: str) -> Any:
    """A function of two tensors, or of a tensor and a number on either side."""

    def of_two(input: Any, other: Any) -> Tensor:
        return as_tensor(function(torch.as_tensor(input), torch.as_tensor(other)))

    of_two.__name__, of_two.__doc__ = name, says
    return of_two


add = _of_two("add", torch.add, "x + y.")
sub = _of_two("sub", torch.sub, "x - y.")
mul = _of_two("mul", torch.mul, "x * y.")
div = _of_two("div", torch.div, "x / y.")
pow = _of_two("pow", torch.pow, "x to the power of y.")
maximum = _of_two("maximum", torch.maximum, "The larger of x and y.")
minimum = _of_two("minimum", torch.minimum, "The smaller of x and y.")


def binary_cross_entropy_with_logits(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Sigmoid and binary cross entropy."""
    options: Any = {"reduction": reduction, "pos_weight": pos_weight}
    return F.binary_cross_entropy_with_logits(input, target, weight, **options)


def select(condition: torch.Tensor, input: Any, other: Any) -> Tensor:
    """`input` where the condition holds, else `other`: tensors that broadcast, or numbers.

    Raises:
        TypeError: a condition that is no bool tensor.
    """
    check_kind("select", "condition", condition, torch.Tensor)
    if condition.dtype != torch.bool:
        raise TypeError(f"For 'select', the condition must be a Tensor of bool, but got {condition.dtype}")
    return as_tensor(torch.where(condition, input, other))


def identity(x: Any) -> Any:
    """`x` itself."""
    return x


def scalar_to_tensor(input_x: bool | int | float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A 0-d tensor of a number, in fp32 unless told otherwise.

    Raises:
        TypeError: what is no number.
    """
    check_kind("ScalarToTensor", "input_x", input_x, bool, int, float)
    return fill(dtype, (), input_x)


partial = functools.partial


def depend(value: Any, expr: Any) -> Any:
    """`value`; `expr` was computed before it, since everything runs in the order written."""
    return value


def clip_by_value(x: Any, clip_value_min: Any = None, clip_value_max: Any = None) -> Any:
    """Every tensor of `x` held between the bounds."""
    if isinstance(x, tuple | list):
        return type(x)(clip_by_value(t, clip_value_min, clip_value_max) for t in x)
    return as_tensor(torch.clamp(x, clip_value_min, clip_value_max))


def clip_by_global_norm(x: Any, clip_norm: float = 1.0, use_norm: Any = None) -> tuple[Any, ...]:
    """The tensors times clip_norm / max(clip_norm, their norm together), which is taken in fp32."""
    if use_norm is not None:
        raise ConfigError("For 'clip_by_global_norm', 'use_norm' must be None, as in MindSpore")
    factor = clip_norm / get_total_norm([t.float() for t in x]).clamp(min=clip_norm)
    return tuple(as_tensor((t.float() * factor).to(t.dtype)) for t in x)


def clip_by_norm(x: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
    """A tensor, or tensors side by side, times min(1, max_norm / their norm together), taken in fp32.

    Raises:
        RuntimeError: with `error_if_nonfinite`, a norm that is inf or NaN.
    """
    listed = [x] if isinstance(x, torch.Tensor) else list(x)
    total = get_total_norm([t.float() for t in listed], norm_type, error_if_nonfinite)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    clipped = tuple(as_tensor((t.float() * factor).to(t.dtype)) for t in listed)
    return clipped[0] if isinstance(x, torch.Tensor) else clipped


def tuple_to_array(input_x: tuple[Any, ...]) -> Any:
    """A tensor of the numbers of a tuple."""
    return as_tensor(torch.tensor(input_x))


Add = _row("Add", add, "x + y.")
Sub = _row("Sub", sub, "x - y.")
Mul = _row("Mul", mul, "x * y.")
Div = _row("Div", div, "x / y.")
RealDiv = _row("RealDiv", div, "x / y.")
Pow = _row("Pow", pow, "x to the power of y.")
Maximum = _row("Maximum", maximum, "The larger of x and y.")
Minimum = _row("Minimum", minimum, "The smaller of x and y.")
Abs = _row("Abs", torch.abs, "The absolute value.")
Neg = _row("Neg", torch.neg, "-x.")
Exp = _row("Exp", torch.exp, "e to the power of x.")
Log = _row("Log", torch.log, "The natural logarithm.")
Square = _row("Square", torch.square, "x * x.")
Sigmoid = _row("Sigmoid", torch.sigmoid, "1 / (1 + exp(-x)).")
Tanh = _row("Tanh", torch.tanh, "The hyperbolic tangent.")
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
MatMul = _row(
    "MatMul",
    _product,
    "Product of two matrices, [..., M, K] and [..., K, N], or of their transposes.",
    transpose_a=False,
    transpose_b=False,
)
BatchMatMul = _row(
    "BatchMatMul", _product, "Products of batches of matrices.", transpose_a=False, transpose_b=False
)
ReduceSum = _row("ReduceSum", _sum, "The sum over some dimensions, or over all.", keep_dims=False)
ReduceMean = _row("ReduceMean", mean, "The mean over some dimensions, or over all.", keep_dims=False)
Softmax = _row("Softmax", softmax, "`softmax` as an object.", axis=-1)


# --- ops that take functions ---

_KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "Number": (int, float),
    "Int64": (int,),
    "Float32": (float,),
    "Bool": (bool,),
    "Tuple": (tuple,),
    "List": (list,),
    "String": (str,),
    "None": (type(None),),
}


class GradOperation:
    """Makes gradient functions: `GradOperation(get_by_list=True)(network, weights)(*inputs)`.

    Args:
        get_all: gradients by all inputs, not by the first alone.
        get_by_list: gradients by the weights given (a Cell's trainable parameters if none are).
        sens_param: the last argument of the call is the gradient of the output, ones otherwise.
    """

    def __init__(self, get_all: bool = False, get_by_list: bool = False, sens_param: bool = False) -> None:
        for name, value in {"get_all": get_all, "get_by_list": get_by_list, "sens_param": sens_param}.items():
            check_kind("GradOperation", name, value, bool)
        self.get_all, self.get_by_list, self.sens_param = get_all, get_by_list, sens_param

    def __call__(self, fn: Callable[..., Any], weights: Any = None) -> Callable[..., Any]:
        """A function of the inputs of `fn` (and `sens`) that gives gradients."""
        if self.get_by_list and weights is None:
            weights = getattr(fn, "trainable_params", list)()
        single = isinstance(weights, torch.Tensor)
        by_weight = [weights] if single else list(weights or ())

        def gradients(*inputs: Any) -> Any:
            inputs, sens = (inputs[:-1], inputs[-1]) if self.sens_param else (inputs, None)
            by_input = [
                as_tensor(x.detach()).requires_grad_()
                if isinstance(x, torch.Tensor) and x.is_floating_point()
                else x
                for x in inputs
            ]
            leaves = [x for x in by_input if isinstance(x, torch.Tensor) and x.requires_grad]
            if not (self.get_all or self.get_by_list):
                leaves = leaves[:1]
            targets = leaves if self.get_all or not self.get_by_list else []
            with torch.enable_grad():
                outputs = fn(*by_input)
            grads = _backward(outputs, sens, [*targets, *by_weight])
            of_inputs, of_weights = grads[: len(targets)], grads[len(targets) :]
            of_weights = of_weights[0] if single else of_weights
            if self.get_all and self.get_by_list:
                return of_inputs, of_weights
            if self.get_by_list:
                return of_weights
            return of_inputs if self.get_all else of_inputs[0]

        return gradients


def _backward(outputs: Any, sens: Any, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    tensors = [plain_tensor(t) for t in (outputs if isinstance(outputs, tuple | list) else [outputs])]
    factors = sens if isinstance(sens, tuple | list) else [sens] * len(tensors)
    pairs = [(t, f) for t, f in zip(tensors, factors) if t.requires_grad]
    ones = [
        torch.ones_like(t) if f is None else torch.as_tensor(f, dtype=t.dtype).expand(t.shape)
        for t, f in pairs
    ]
    return gradients_of([t for t, _ in pairs], inputs, ones)


class MultitypeFuncGraph:
    """A function with one body for each combination of kinds: `@graph.register("Tensor", "Number")`."""

    def __init__(self, name: str, read_value: bool = False) -> None:
        self.name = name
        self._bodies: list[tuple[tuple[str, ...], Callable[..., Any]]] = []

    def register(self, *type_names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate the body for these kinds of arguments ("Tensor", "Number", "Bool", "Tuple" ...)."""
        if unknown := [name for name in type_names if name not in _KINDS]:
            raise UnsupportedError(
                f"{self.name}.register({unknown[0]!r}): expected one of {', '.join(_KINDS)}"
            )

        def keep(body: Callable[..., Any]) -> Callable[..., Any]:
            self._bodies.append((type_names, body))
            return body

        return keep

    def __call__(self, *args: Any) -> Any:
        """Run the body that fits; TypeError where none does."""
        for names, body in self._bodies:
            if len(names) == len(args) and all(isinstance(a, _KINDS[n]) for a, n in zip(args, names)):
                return body(*args)
        kinds = ", ".join(type(a).__name__ for a in args)
        raise TypeError(f"For '{self.name}', no body is registered for ({kinds})")


class HyperMap:
    """Applies a function to the leaves of tuples and lists side by side, as in `HyperMap()(f, gradients)`."""

    def __init__(self, ops: Callable[..., Any] | None = None, reverse: bool = False) -> None:
        self._function = ops

    def __call__(self, *args: Any) -> Any:
        """`function` (unless given before) and one or more nests of the same form."""
        function, nests = (args[0], args[1:]) if self._function is None else (self._function, args)
        return _map(function, *nests)


def _map(function: Callable[..., Any], *nests: Any) -> Any:
    if isinstance(nests[0], tuple | list):
        return tuple(_map(function, *parts) for parts in zip(*nests, strict=True))
    return function(*nests)


matmul, relu, exp, log, isfinite = torch.matmul, torch.relu, torch.exp, torch.log, torch.isfinite
sum, ones_like, zeros_like, expand_dims = torch.sum, torch.ones_like, torch.zeros_like, torch.unsqueeze
sigmoid, tanh, gelu, square, sqrt = torch.sigmoid, torch.tanh, F.gelu, torch.square, torch.sqrt
argmax, equal, reshape, stack = torch.argmax, torch.eq, torch.reshape, torch.stack
abs, neg, sin, cos, cat = torch.abs, torch.neg, torch.sin, torch.cos, torch.cat
transpose = torch.permute
concat, stop_gradient = torch.concat, torch.detach
reduce_mean, reduce_sum, Map = mean, ReduceSum(), HyperMap
composite: ModuleType = sys.modules[__name__]
functional = operations = composite
__getattr__ = absent("ops")
