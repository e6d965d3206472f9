"""From the arguments of a LOW op on a CPU to its class, its choice and the call: the runner of such an op.

A call costs one look-up by shapes; where the choice is native throughout, torch's own kernels run as if
nothing stood here. Tracers' tensors, function transforms, forward-mode derivatives, sparse tensors and
whatever does not fit go by `rest`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.casting import kernel_functions as functions
from halfstep.casting.kernel_choice import Choice, KernelTable, OpClass, geometries, sizes
from halfstep.casting.kernel_functions import Geometry
from halfstep.casting.kernel_probes import ONE_BACKWARD
from halfstep.formats import dtype_name
from halfstep.torch_private import functorch_level, in_forward_ad, is_jit_tracing

Args = Sequence[Any]
Call = Callable[[Args, Mapping[str, Any]], Any]
Runner = Callable[[Any, Args, Mapping[str, Any]], Any]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# What rules may change. fp64 is asked for on purpose, fp8 carries its scale elsewhere, complex has no 16-bit
# twin.
CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
_threads = torch.get_num_threads
_grad = torch.is_grad_enabled
_KEPT = 4096


class OpCall(NamedTuple):
    """One op met with certain arguments: its class, what needs a gradient, and how a choice runs it."""

    op: str
    geometry: str
    work: float
    needs: str
    run: Callable[[Choice], Call]


# --- classes -----------------------------------------------------------------------------------------------

# Multiplications at which a size class ends, between those of the probes (`kernel_probes.py`).
_LIMITS = {
    "convolution": (5e5, 1e7, 6e7),
    "attention": (3e4, 4e5, 4e6),
    "linear": (4e5, 6e6, 5e7),
    "lstm": (4e5, 3e6, 2.4e7),
}


def class_of(op: str, geometry: str, work: float, dtype: torch.dtype) -> OpClass:
    """The class of so much work by an op in a compute dtype, with torch's threads as they are now."""
    limits = _LIMITS.get(op, _LIMITS["lstm" if op in ONE_BACKWARD else "linear"])
    known = sizes(geometry)
    size = known[min(sum(work >= limit for limit in limits), len(known) - 1)]
    return OpClass(op, dtype_name(dtype), geometry, size, _threads())


def _needs(first: Tensor, second: Tensor) -> str:
    if not _grad():
        return ""
    return ("i" if first.requires_grad else "") + ("w" if second.requires_grad else "")


def _argument(args: Args, place: int, default: Any) -> Any:
    return args[place] if len(args) > place else default


# --- linear layers and products of matrices ----------------------------------------------------------------


def _linear(args: Args, kwargs: Mapping[str, Any]) -> OpCall | None:
    x, weight, bias = args[0], args[1], _argument(args, 2, None)
    fits = weight.dim() == 2 and x.dim() > 1 and x.shape[-1] == weight.shape[1]
    if not fits or not (bias is None or bias.shape == weight.shape[:1]):
        return None
    rows = x.numel() // x.shape[-1]

    def run(choice: Choice) -> Call:
        def call(low: Args, _: Mapping[str, Any]) -> Any:
            bias = low[2] if len(low) > 2 else None
            if not _grad():
                return functions.linear(choice.forward, low[0], low[1], bias)
            return functions.Linear.apply(low[0], low[1], bias, choice)

        return call

    return OpCall("linear", _thin(rows), rows * weight.numel(), _needs(x, weight), run)


def _thin(rows: int) -> str:
    return "thin" if rows < 8 else "plain"


def _product(choice: Choice, a: Tensor, b: Tensor) -> Tensor:
    if not _grad():
        return functions.product(choice.forward, a, b, a.dtype)
    return functions.Product.apply(a, b, choice)


def _matmul(args: Args, kwargs: Mapping[str, Any]) -> OpCall | None:
    """Of matrices or batches of them; a batch by one matrix is one product of all its rows."""
    a, b = args[0], args[1]
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2] or (a.dim() == 2 and b.dim() > 2):
        return None
    n, k, m = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.dim() == 2:
        rows = a.numel() // k

        def run_rows(choice: Choice) -> Call:
            def call(low: Args, _: Mapping[str, Any]) -> Any:
                if low[0].dim() == 2:
                    return _product(choice, low[0], low[1])
                out = _product(choice, low[0].reshape(-1, k), low[1])
                return out.reshape(*low[0].shape[:-1], m)

            return call

        return OpCall("linear", _thin(rows), rows * k * m, _needs(a, b), run_rows)
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        return None

    def run_batch(choice: Choice) -> Call:
        def call(low: Args, _: Mapping[str, Any]) -> Any:
            if low[0].dim() == low[1].dim() == 3 and low[0].shape[0] == low[1].shape[0]:
                return _product(choice, low[0], low[1])
            left = low[0].expand(*batch, n, k).reshape(-1, n, k)
            right = low[1].expand(*batch, k, m).reshape(-1, k, m)
            return _product(choice, left, right).reshape(*batch, n, m)

        return call

    geometry = "matrices up to 64" if n * k * m <= 64**3 else "matrices over 64"
    return OpCall("bmm", geometry, math.prod(batch) * n * k * m, _needs(a, b), run_batch)


# --- convolutions ------------------------------------------------------------------------------------------


def _each(value: Any, dims: int) -> tuple[int, ...]:
    given = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return given * dims if len(given) == 1 else given


def _forward_geometry(args: Args, dims: int) -> Geometry | None:
    """conv1d, conv2d, conv3d: stride, padding (words too), dilation, groups."""
    stride, padding, dilation = (_argument(args, i, d) for i, d in ((3, 1), (4, 0), (5, 1)))
    dilation = _each(dilation, dims)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        spans = [d * (k - 1) for d, k in zip(dilation, args[1].shape[2:], strict=True)]
        if any(span % 2 for span in spans):
            return None
        padding = tuple(span // 2 for span in spans)
    given = _each(stride, dims), _each(padding, dims), dilation
    return Geometry(*given, False, (0,) * dims, _argument(args, 6, 1))


def _transposed_geometry(args: Args, dims: int) -> Geometry:
    """conv_transpose1d to 3d: stride, padding, output padding, groups, dilation."""
    stride, padding, extra, dilation = (_argument(args, i, d) for i, d in ((3, 1), (4, 0), (5, 0), (7, 1)))
    given = _each(stride, dims), _each(padding, dims), _each(dilation, dims)
    return Geometry(*given, True, _each(extra, dims), _argument(args, 6, 1))


def _full_geometry(args: Args, dims: int) -> Geometry:
    """convolution and _convolution, which name everything."""
    stride, padding, dilation, extra = (_each(args[i], dims) for i in (3, 4, 5, 7))
    return Geometry(stride, padding, dilation, args[6], extra, args[8])


def _convolution(
    read: Callable[[Args, int], Geometry | None],
) -> Callable[[Args, Mapping[str, Any]], OpCall | None]:
    def site(args: Args, kwargs: Mapping[str, Any]) -> OpCall | None:
        x, weight = args[0], args[1]
        dims = weight.dim() - 2
        single = x.dim() == dims + 1
        if dims not in (1, 2, 3) or not (single or x.dim() == dims + 2):
            return None
        geometry = read(args, dims)
        if geometry is None or x.shape[0 if single else 1] != weight.shape[
            0 if geometry.transposed else 1
        ] * (1 if geometry.transposed else geometry.groups):
            return None

        def run(choice: Choice) -> Call:
            def call(low: Args, _: Mapping[str, Any]) -> Any:
                given = low[0].unsqueeze(0) if single else low[0]
                bias = low[2] if len(low) > 2 else None
                if _grad():
                    out = functions.Convolution.apply(given, low[1], bias, geometry, choice)
                else:
                    out = functions.convolve(choice.forward, given, low[1], bias, geometry)
                return out.squeeze(0) if single else out

            return call

        positions = x.numel() / x.shape[0 if single else 1]
        work = positions * weight.numel() / (1 if geometry.transposed else math.prod(geometry.stride))
        shape = _shape_of(weight, geometry)
        if f"{dims}d {shape}" not in geometries("convolution"):
            shape = "pointwise" if shape == "narrow-pointwise" else "dense"
        if shape.endswith("depthwise"):
            work *= 16  # bound by memory, not by products
        return OpCall("convolution", f"{dims}d {shape}{_layout(x)}", work, _needs(x, weight), run)

    return site


#: Products for each value read or written below which a pointwise convolution is bound by memory.
_NARROW = 32


def _shape_of(weight: Tensor, geometry: Geometry) -> str:
    if geometry.transposed:
        return "transposed"
    if geometry.groups > 1:
        if weight.shape[1] > 1:
            return "grouped"
        return "strided-depthwise" if max(geometry.stride) > 1 else "depthwise"
    if weight.shape[1] <= 4:
        return "stem"
    if any(k > 1 for k in weight.shape[2:]):
        return "dense"
    out, into = weight.shape[:2]
    return "narrow-pointwise" if out * into < _NARROW * (out + into) else "pointwise"


def _layout(x: Tensor) -> str:
    last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return " channels_last" if last else ""


# --- attention ---------------------------------------------------------------------------------------------


def _attention(
    args: Args,
    kwargs: Mapping[str, Any],
) -> OpCall | None:
    q, k, v = args[:3]
    dropout, causal = _argument(args, 4, 0.0), _argument(args, 5, False)
    scale = kwargs.get("scale")
    if kwargs.get("enable_gqa") or any(t.dim() != 4 for t in (q, k, v)) or q.shape[:2] != k.shape[:2]:
        return None

    def run(choice: Choice) -> Call:
        def call(low: Args, _: Mapping[str, Any]) -> Any:
            q, k, v, mask = low[0], low[1], low[2], _argument(low, 3, None)
            if not functions.uses_flash(q, k, v, mask, dropout, causal, scale):
                return NotImplemented
            if not _grad():
                return functions.attend(choice.forward, q, k, v, mask, causal, scale)[0]
            return functions.Attention.apply(q, k, v, mask, causal, scale, choice)

        return call

    trained = _grad() and any(t.requires_grad for t in (q, k, v))
    work = float(q.shape[2] * k.shape[2] * q.shape[3])
    return OpCall("attention", "causal" if causal else "full", work, "i" if trained else "", run)


# --- ops that are rounded whole or not at all --------------------------------------------------------------

# Ops without a Function here, by the kind that stands for them.
_WHOLE = {
    "addmm": "linear",
    "_addmm_activation": "linear",
    "chain_matmul": "linear",
    "linalg_multi_dot": "linear",
    "mv": "linear",
    "addmv": "linear",
    "addr": "linear",
    "baddbmm": "bmm",
    "addbmm": "bmm",
    "einsum": "bmm",
    "lstm_cell": "linear",
    "gru_cell": "linear",
    "rnn_tanh_cell": "linear",
    "rnn_relu_cell": "linear",
    "lstm": "lstm",
    "gru": "gru",
    "rnn_tanh": "rnn_tanh",
    "rnn_relu": "rnn_tanh",
    "mkldnn_rnn_layer": "lstm",
}


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, one level of lists deep (no op takes more)."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, Tensor)]  # pyright: ignore
    return found


def _whole_class(name: str, args: Args, dtype: torch.dtype, known: bool) -> OpClass | None:
    """The class that stands for an op as a whole; of tracers' tensors (not `known`) no shape is looked at."""
    threads, low = _threads(), dtype_name(dtype)
    if name in _READERS:
        kind = _KINDS[name]
        geometry = f"{args[1].dim() - 2}d dense" if kind == "convolution" else geometries(kind)[0]
        return OpClass(kind, low, geometry, "medium", threads) if geometry in geometries(kind) else None
    kind = _WHOLE.get(name.removeprefix("aten::").partition(".")[0])
    if kind is None:
        return None
    geometry = geometries(kind)[0]
    if not known:
        return OpClass(kind, low, geometry, "medium", threads)
    tensors = tensors_of(args)
    if kind in ONE_BACKWARD:  # the weights of the input and of the state, at every step
        weight = max(t.numel() for t in tensors[1:] if t.dim() == 2)
        work = 2.0 * weight * tensors[0].numel() / tensors[0].shape[-1]
    else:
        work = math.prod(sorted(t.numel() for t in tensors)[-2:]) ** 0.75
    return class_of(kind, geometry, work, dtype)


def rounds_whole(table: KernelTable, name: str, args: Args, dtype: torch.dtype) -> bool:
    """Whether an op (by its overload's name) is rounded around fp32, forward and backward alike."""
    tensors = tensors_of(args)
    known = all(type(t) in _PLAIN for t in tensors)
    cls = _whole_class(name, args, dtype, known)
    if cls is None:
        return table.choose(OpClass(name, dtype_name(dtype), "", "", 0), "*").forward != "native"
    needs = "iw" if _grad() and any(t.requires_grad for t in tensors) else ""
    return table.choose(cls, needs + "*").forward != "native"


# --- the runner --------------------------------------------------------------------------------------------

_READERS: dict[str, Callable[[Args, Mapping[str, Any]], OpCall | None]] = {
    "aten::linear": _linear,
    "aten::matmul": _matmul,
    "aten::mm": _matmul,
    "aten::bmm": _matmul,
    "aten::scaled_dot_product_attention": _attention,
    "aten::convolution": _convolution(_full_geometry),
    "aten::_convolution": _convolution(_full_geometry),
    "aten::_convolution.deprecated": _convolution(_full_geometry),
}
for _dims in (1, 2, 3):
    for _name in (f"aten::conv{_dims}d", f"aten::conv{_dims}d.padding"):
        _READERS[_name] = _convolution(_forward_geometry)
    for _name in (f"aten::conv_transpose{_dims}d", f"aten::conv_transpose{_dims}d.input"):
        _READERS[_name] = _convolution(_transposed_geometry)
_KINDS = dict.fromkeys(_READERS, "convolution") | {
    "aten::linear": "linear",
    "aten::matmul": "bmm",
    "aten::mm": "linear",
    "aten::bmm": "bmm",
    "aten::scaled_dot_product_attention": "attention",
}
_SIMPLE = frozenset({int, float, bool, str, type(None)})


def _key(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All that a choice hangs on; None where an argument is no ordinary tensor."""
    parts: list[Any] = [_grad(), _threads()]
    for a in args:
        kind = type(a)
        if kind in _PLAIN:
            parts += (a.shape, a.dtype, a.requires_grad, a.layout, a.is_contiguous() or a.stride())
        elif kind in _SIMPLE:
            parts.append(a)
        elif kind is list or kind is tuple:
            inner = tuple(a)
            if inner and isinstance(inner[0], Tensor):
                inner = _key(inner, {})
                if inner is None:
                    return None
            parts.append(inner)
        else:
            return None
    if kwargs:
        parts += (*kwargs, _key(kwargs.values(), {}))
    return tuple(parts)


def chosen(
    name: str,
    compute: torch.dtype,
    table: KernelTable,
    under: Callable[..., Any],
    native: Runner,
    rounded: Runner,
    straight: Callable[..., Any] | None,
) -> Runner:
    """The runner of a LOW op on a CPU.

    `name`: of the overload; `under(call, ...)` makes a call with autocast out of the way; `native` and
    `rounded` run the op whole, whatever its arguments; `straight` is `native` where all of them can be cast.
    """
    memo: dict[Any, Runner] = {}
    read = _READERS.get(name)
    torchs: Runner = native
    if straight is not None:
        torchs = lambda keyset, args, kwargs: straight(keyset, *args, **kwargs)  # noqa: E731

    def whole(args: Args, plain: Runner = native) -> Runner:
        return rounded if rounds_whole(table, name, args, compute) else plain

    def implemented(call: Call) -> Runner:
        def run(keyset: Any, args: Args, kwargs: Mapping[str, Any]) -> Any:
            low = [a.to(compute) if isinstance(a, Tensor) and a.dtype in CASTABLE else a for a in args]
            out = under(call, low, kwargs)
            return whole(args)(keyset, args, kwargs) if out is NotImplemented else out

        return run

    def decide(args: Args, kwargs: Mapping[str, Any]) -> Runner:
        tensors = tensors_of((*args, *kwargs.values()))
        if any(t.dtype not in CASTABLE and t.dtype is not torch.bool for t in tensors):
            return native
        if any(t.layout is not torch.strided or not t.numel() for t in tensors):
            return native
        made = None if read is None else read(args, kwargs)
        if made is None:
            return whole(args, torchs)
        choice = table.choose(class_of(made.op, made.geometry, made.work, compute), made.needs)
        return torchs if choice.is_native else implemented(made.run(choice))

    def run(keyset: Any, args: Args, kwargs: Mapping[str, Any]) -> Any:
        if functorch_level() is not None or in_forward_ad() or is_jit_tracing():
            return native(keyset, args, kwargs)
        key = _key(args, kwargs)
        if key is None:
            return whole(args)(keyset, args, kwargs)
        try:
            runner = memo[key]
        except KeyError:
            if len(memo) >= _KEPT:
                memo.clear()
            runner = memo[key] = decide(args, kwargs)
        return runner(keyset, args, kwargs)

    return run
