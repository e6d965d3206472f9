"""Ops whose own 16-bit kernels add in 16 bits, run so that every sum is fp32 and rounded once (law 18).

An accumulator of 8 or 11 bits stops growing after some hundreds or thousands of terms of one sign. Which ops
have such a kernel is data (`policy/op_tables.py`, `SUMS_IN_16_BITS`). What an op gives keeps the dtype that
its rule says; only how it adds changes. Normalisations and look-ups in tables have an implementation here,
which sums in blocks or by rows; other ops run on fp32 copies of their 16-bit tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.casting.kernel_runners import PLAIN, tensors_of
from halfstep.casting.kinds.convolution import sums_in_fp32
from halfstep.casting.kinds.kind import Grads
from halfstep.casting.saved_low import SavedLow
from halfstep.policy.op_tables import CONVOLUTIONS, RECURRENT, WINDOWS, sums_in_16_bits
from halfstep.torch_private import functorch_level, in_forward_ad, is_jit_tracing, not_compiled

Call = Callable[..., Any]
F32 = torch.float32
LOW = frozenset({torch.float16, torch.bfloat16})
_PLAIN_OR_NONE = PLAIN | {type(None)}
#: Elements of a block of rows that backward widens at a time: 1 MiB in fp32, which stays in a core's cache.
#: Measured from 2^16 to 2^20; a whole copy of 32 MiB or more costs up to seven times the kernel it serves.
_BLOCK = 2**18
#: Elements of a table and of what is taken from it up to which fp32 copies on a CPU are faster than a
#: Function, which Python runs: 94 us a look-up with its backward in place of 157; measured from 2^10 to 2^17.
_SMALL = 2**15
#: So many terms lose little in 16 bits: pools of usual windows stay in their own kernels.
_FEW = 16
_aten = torch.ops.aten


def with_fp32_sums(name: str, device_type: str, call: Call) -> Call:
    """Return what runs an op (by its name in op tables) with fp32 sums; `call` itself where that adds so."""
    if name in RECURRENT.split():  # no sums of torch's own policy, which casts the ops that these are made of
        return functools.partial(_run_recurrent, name == "lstm", call) if device_type != "cuda" else call
    if name not in sums_in_16_bits(device_type):
        return call
    return functools.partial(_SUMS.get(name, _run_in_place if name.endswith("_") else run_widened), call)


def _is_low(t: Any) -> bool:
    return isinstance(t, Tensor) and t.dtype in LOW


def _trains(t: Any) -> bool:
    """Whether this is 16-bit and gets a gradient."""
    return _is_low(t) and t.requires_grad and torch.is_grad_enabled()


def _has_function(*tensors: Tensor | None) -> bool:
    """Whether a Function of ours can stand for the op: function transforms and tracers take plain casts."""
    strange = functorch_level() is not None or in_forward_ad() or is_jit_tracing()
    return not strange and _PLAIN_OR_NONE.issuperset(map(type, tensors))


# --- any op ------------------------------------------------------------------------------------------------


def run_widened(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Run an op on fp32 copies of its 16-bit tensors and round what it gives, forward and backward."""
    low = {t.dtype for t in tensors_of((*args, *kwargs.values())) if t.dtype in LOW}
    dtypes = {t.dtype for t in tensors_of((*args, *kwargs.values())) if t.is_floating_point()}
    if not low or dtypes - LOW:  # an op of mixed dtypes, which torch refuses or promotes
        return call(*args, **kwargs)
    saved = SavedLow()

    def widen(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [widen(v) for v in cast("list[Any]", value)]
        return saved.remember(value.to(F32), value) if _is_low(value) else value

    with saved:
        out = call(*map(widen, args), **{key: widen(value) for key, value in kwargs.items()})
    target = low.pop() if len(low) == 1 else F32

    def narrow(value: Any) -> Any:
        return value.to(target) if isinstance(value, Tensor) and value.dtype is F32 else value

    return tuple(map(narrow, out)) if isinstance(out, (tuple, list)) else narrow(out)


def _run_accumulating(run: Callable[..., Any], call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run index_put and its like as `run` does where they add, and as they are where they replace."""
    adds = kwargs.get("accumulate", args[2] if len(args) > 2 else False)
    return run(call, x, *args, **kwargs) if adds else call(x, *args, **kwargs)


def _run_index_add(run: Callable[..., Any], call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run index_add as `run` does where torch's own kernel does not add in fp32."""
    index = args[1]
    is_right = x.dim() > 1 and index.dtype is torch.int64 and _adds_rows_in_fp32(x.device.type)
    return call(x, *args, **kwargs) if is_right else run(call, x, *args, **kwargs)


def _run_scatter(run: Callable[..., Any], call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a scatter or gather as `run` does, but on eager CPU tensors, whose kernels add in fp32."""
    is_right = x.device.type == "cpu" and type(x) in PLAIN
    return call(x, *args, **kwargs) if is_right else run(call, x, *args, **kwargs)


def _sum_repeats(call: Call, x: Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """Run coalesce or to_dense on an fp32 copy where a 16-bit sparse tensor holds an element twice."""
    x = x if dtype is None else x.to(dtype)
    adds = _is_low(x) and x.layout is torch.sparse_coo and not x.is_coalesced()
    return run_widened(call, x, **kwargs) if adds else call(x, **kwargs)


# --- windows -----------------------------------------------------------------------------------------------


def _overlap(sizes: Sequence[int], steps: Sequence[int] = ()) -> int:
    """Return how many windows of these sizes, so many steps apart, hold the same element."""
    return math.prod(-(-size // step) for size, step in zip(sizes, steps or sizes, strict=True))


def _uses_of_a_pool(x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), *rest: Any) -> int:
    return _overlap(kernel, stride)


def _uses_of_an_adaptive_pool(x: Tensor, size: Sequence[int]) -> int:
    return _overlap(size, x.shape[-len(size) :])


def _uses_of_a_fractional_pool(x: Tensor, kernel: Sequence[int], size: Sequence[int], *rest: Any) -> int:
    return _overlap([k * s for k, s in zip(kernel, size, strict=True)], x.shape[-len(size) :])


def _uses_of_slices(x: Tensor, dim: int, size: int, step: int) -> int:
    return _overlap([size], [step])


def _uses_of_blocks(x: Tensor, *sizes: Sequence[int]) -> int:
    """Of F.unfold and F.fold: sizes are those of the kernel, dilation, padding and stride, last."""
    return _overlap(sizes[-4], sizes[-1])


def _copies_of_an_edge(x: Tensor, padding: Sequence[int]) -> int:
    return math.prod(1 + max(pair) for pair in zip(padding[::2], padding[1::2], strict=True))


_USES: Mapping[str, Callable[..., int]] = {
    "unfold": _uses_of_slices,
    "im2col": _uses_of_blocks,
    "col2im": _uses_of_blocks,
    **{f"{kind}_pool{n}d": _uses_of_a_pool for kind in ("avg", "max") for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": _uses_of_a_pool for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": _uses_of_an_adaptive_pool for kind in ("avg", "max") for n in (1, 2, 3)},
    **{f"fractional_max_pool{n}d": _uses_of_a_fractional_pool for n in (2, 3)},
    **{f"replication_pad{n}d": _copies_of_an_edge for n in (1, 2, 3)},
}
"""By op: how often it takes the same element, or adds to it."""


def _run_windows(uses: Callable[..., int], adds_forward: bool, call: Call, x: Tensor, *args: Any) -> Any:
    """Run an op on fp32 copies where windows overlap so far that a sum of 16 bits would be long."""
    adds = _is_low(x) if adds_forward else _trains(x)
    return run_widened(call, x, *args) if adds and uses(x, *args) > _FEW else call(x, *args)


# --- convolutions and ops in place -------------------------------------------------------------------------


def _run_convolution(call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a convolution on fp32 copies where torch has no kernel of its dtype that sums a batch in fp32.

    Function transforms cast at each of their levels: theirs are torch's own.
    """
    is_right = not _is_low(x) or functorch_level() is not None or sums_in_fp32(x.dtype)
    return call(x, *args, **kwargs) if is_right else run_widened(call, x, *args, **kwargs)


#: A state of bf16 that grows by equal steps stops at 256 of them.
_STEPS = 128


def _run_recurrent(has_cell: bool, call: Call, x: Tensor, second: Any, *args: Any) -> Any:
    """Run a recurrent layer on fp32 copies where its sums over steps are long.

    Those are the gradients of its weights, but for oneDNN's LSTM of bf16, and the state of an LSTM's cell.
    """
    if not _is_low(x):
        return call(x, second, *args)
    is_packed = isinstance(second, Tensor) and not second.is_floating_point()
    steps = len(second) if is_packed else x.shape[int(args[-1])]  # the last argument: batches first
    weights = args[1] if is_packed else args[0]
    is_right = has_cell and x.dtype is torch.bfloat16 and x.device.type == "cpu" and sums_in_fp32(x.dtype)
    adds = not is_right and steps > _FEW and any(map(_trains, (x, *weights)))
    is_long = adds or (has_cell and steps > _STEPS)
    return run_widened(call, x, second, *args) if is_long else call(x, second, *args)


def _run_loss(call: Call, x: Tensor, target: Tensor, *args: Any) -> Any:
    """Run a loss on fp32 copies where it divides by a number of rows that fp16 does not hold."""
    is_many = _is_low(x) and target.numel() > torch.finfo(torch.float16).max
    return run_widened(call, x, target, *args) if is_many else call(x, target, *args)


def _run_in_place(call: Call, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run an op in place: out of place on fp32 copies, the rounded result copied into the tensor."""
    if not _is_low(target):
        return call(target, *args, **kwargs)
    copy = target.to(F32)
    values = [a.to(F32) if _is_low(a) else a for a in args]
    return target.copy_(call(copy, *values, **{k: v.to(F32) if _is_low(v) else v for k, v in kwargs.items()}))


# --- layer_norm --------------------------------------------------------------------------------------------


class LayerNorm(torch.autograd.Function):
    """Torch's layer_norm of a 16-bit input, whose gradients are computed in fp32, block by block of rows."""

    @staticmethod
    @not_compiled
    def forward(
        ctx: Any,
        x: Tensor,
        shape: list[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        gives_all: bool,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """x: (..., *shape), 16-bit; weight, bias: `shape`, 16-bit or fp32.

        The output; with `gives_all` mean and 1/std too.
        """
        out, mean, rstd = _aten.native_layer_norm(x, shape, _wide(weight), _wide(bias), eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape = shape
        if not gives_all:
            return out
        statistics = [t.to(_statistics_dtype(x, weight, bias)) for t in (mean, rstd)]
        ctx.mark_non_differentiable(*statistics)
        return out, *statistics

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """Gradients of x, weight and bias, each rounded once to the dtype of its tensor."""
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        shape, affine = ctx.shape, (_wide(weight), _wide(bias))

        def gradients(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Sequence[Tensor | None]:
            wide = grad.to(F32), x.to(F32)
            return _aten.native_layer_norm_backward(*wide, shape, mean, rstd, *affine, needs)

        if torch.is_grad_enabled() or x.numel() <= _BLOCK:  # a derivative of this is taken, or it is small
            to_x, *sums = gradients(grad_outputs[0], x, mean, rstd)
        else:
            sums = [
                None if t is None or not need else torch.zeros_like(t) for t, need in zip(affine, needs[1:])
            ]
            flat = [t.reshape(-1, *shape) for t in (grad_outputs[0], x)]
            flat += [t.reshape(-1, *[1] * len(shape)) for t in (mean, rstd)]
            to_x = torch.empty_like(flat[1])
            rows = max(1, _BLOCK // math.prod(shape))
            for into, *block in zip(*(t.split(rows) for t in (to_x, *flat)), strict=True):
                to_block, *block_sums = gradients(*block)
                if to_block is not None:
                    into.copy_(to_block)
                for total, part in zip(sums, block_sums, strict=True):
                    if total is not None and part is not None:
                        total += part
            to_x = to_x.reshape(x.shape) if needs[0] else None
        return _like(to_x, x), None, _like(sums[0], weight), _like(sums[1], bias), None, None


def _statistics_dtype(x: Tensor, *affine: Tensor | None) -> torch.dtype:
    """Return the dtype in which torch's own kernel gives mean and 1/std."""
    return x.dtype if all(t is None or _is_low(t) for t in affine) else F32


def _wide(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.dtype is F32 else t.to(F32)


def _like(gradient: Tensor | None, t: Tensor) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype is t.dtype else gradient.to(t.dtype)


def _sums_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether a gradient of a layer_norm's weight or bias is a sum over rows of 16 bits."""
    trained = (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    return trained and _is_low(x) and torch.is_grad_enabled()


def _native_layer_norm(
    call: Call, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    if not _sums_rows(x, weight, bias):
        return call(x, shape, weight, bias, eps)
    if _has_function(x, weight, bias):
        return LayerNorm.apply(x, list(shape), weight, bias, eps, True)
    out, *statistics = call(x.to(F32), shape, _wide(weight), _wide(bias), eps)
    return out.to(x.dtype), *(t.to(_statistics_dtype(x, weight, bias)) for t in statistics)


def _layer_norm(
    call: Call,
    x: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *cudnn: bool,
    **kwargs: bool,
) -> Tensor:
    if not _sums_rows(x, weight, bias):
        return call(x, shape, weight, bias, eps, *cudnn, **kwargs)
    if _has_function(x, weight, bias):
        return LayerNorm.apply(x, list(shape), weight, bias, eps, False)
    return call(x.to(F32), shape, _wide(weight), _wide(bias), eps, *cudnn, **kwargs).to(x.dtype)


def _affine_in_fp32(
    places: tuple[int, int], statistics: int | None, call: Call, *args: Any, **kw: Any
) -> Any:
    """Run a normalisation beside fp32 parameters, whose gradients its CPU kernel sums in fp32 then."""
    running_mean = None if statistics is None else args[statistics]
    if not _is_low(args[0]) or _is_low(running_mean):
        return call(*args, **kw)
    return call(*(_wide(a) if i in places and _is_low(a) else a for i, a in enumerate(args)), **kw)


#: Torch's 16-bit kernel adds image by image in fp32, its fp32 kernel in blocks: so many lose a unit of fp16.
_IMAGES = 2**13


def _batch_norm(call: Call, x: Tensor, *args: Any) -> Tensor:
    """Run it beside fp32 parameters; on an fp32 copy where a sum over images is too long for that kernel."""
    if not _is_low(x) or x.dim() < 3 or len(x) <= _IMAGES:
        return _affine_in_fp32((1, 2), 3, call, x, *args)
    saved = SavedLow()
    with saved:
        wide = [_wide(a) if isinstance(a, Tensor) else a for a in args]
        out = call(saved.remember(x.to(F32), x), *wide)
    for kept, new in zip(args[2:4], wide[2:4], strict=True):
        if _is_low(kept):
            kept.copy_(new)
    return out.to(x.dtype)


# --- look-ups in tables ------------------------------------------------------------------------------------


@functools.cache
def _adds_rows_in_fp32(device_type: str) -> bool:
    """Whether torch's index_add of 16-bit rows sums in fp32: seen on a sum that 16 bits cannot hold."""
    if device_type != "cpu":
        return False
    low, index = torch.bfloat16, torch.zeros(1024, dtype=torch.int64, device="cpu")
    ones = torch.ones(1024, 2, dtype=low, device="cpu")
    return torch.zeros(1, 2, dtype=low, device="cpu").index_add_(0, index, ones).eq(1024).all().item() is True


def sum_rows(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum 16-bit rows (n, width) by index (n,) into (count, width), in fp32, each sum rounded once.

    Where torch's own index_add sums so, without memory of its own; else in a buffer of 4 bytes an element.
    """
    shape = count, rows.shape[1]
    if _adds_rows_in_fp32(rows.device.type):
        return rows.new_zeros(shape).index_add_(0, index, rows)
    return rows.new_zeros(shape, dtype=F32).index_add_(0, index, rows.to(F32)).to(rows.dtype)


def _has_rows(table: Tensor, index: Tensor, sparse: bool = False) -> bool:
    """Whether `Rows` looks up in this table; fp32 copies do in a small one with a dense gradient."""
    elements = table.numel() + index.numel() * math.prod(table.shape[1:])
    is_small = table.is_cpu and not sparse and elements <= _SMALL
    return not is_small and _has_function(table, index)


class Rows(torch.autograd.Function):
    """Rows of a 16-bit table (count, ...) by index, each row's gradients summed in fp32 and rounded once.

    padding: a row without a gradient, or -1. by_frequency: each gradient is divided by its row's uses.
    """

    @staticmethod
    @not_compiled
    def forward(
        ctx: Any, table: Tensor, index: Tensor, padding: int, by_frequency: bool, call: Call
    ) -> Tensor:
        """index: any shape of int64 or int32; `call()` looks up, the result is (*index.shape, ...)."""
        ctx.save_for_backward(index)
        ctx.shape, ctx.padding, ctx.by_frequency = table.shape, padding, by_frequency
        return call()

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """Return the table's gradient, of its shape."""
        (index,) = ctx.saved_tensors
        args = grad_outputs[0], index, ctx.shape, ctx.padding, ctx.by_frequency
        sums = RowSums.apply(*args) if torch.is_grad_enabled() else _row_sums(*args)
        return sums, None, None, None, None


def _row_sums(grad: Tensor, index: Tensor, shape: Any, padding: int, by_frequency: bool) -> Tensor:
    index = index.reshape(-1).to(torch.int64).remainder(max(1, shape[0]))
    sums = sum_rows(grad.reshape(len(index), math.prod(shape[1:])), index, shape[0])
    if by_frequency:
        sums /= torch.bincount(index, minlength=shape[0]).clamp_(min=1)[:, None]
    if padding >= 0:
        sums[padding] = 0
    return sums.reshape(shape)


class RowSums(torch.autograd.Function):
    """The gradient of `Rows`, which can be differentiated again."""

    @staticmethod
    @not_compiled
    def forward(
        ctx: Any, grad: Tensor, index: Tensor, shape: Any, padding: int, by_frequency: bool
    ) -> Tensor:
        """grad: (*index.shape, *shape[1:]); the result: `shape`."""
        ctx.save_for_backward(index)
        ctx.padding, ctx.by_frequency = padding, by_frequency
        return _row_sums(grad, index, shape, padding, by_frequency)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """Return rows of the gradient's gradient."""
        if ctx.by_frequency:
            raise RuntimeError("an embedding with scale_grad_by_freq has no second derivative, in torch too")
        (index,) = ctx.saved_tensors
        rows = grad_outputs[0][index.to(torch.int64)]
        if ctx.padding >= 0:
            rows[index == ctx.padding] = 0
        return rows, None, None, None, None


class SparseRows(Rows):
    """The same with a sparse gradient of the rows that were used, coalesced."""

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """`table.shape`, of which the rows that were used are stored."""
        index = ctx.saved_tensors[0].reshape(-1)
        rows = grad_outputs[0].reshape(len(index), *ctx.shape[1:])
        if ctx.padding >= 0:
            not_padding = index != ctx.padding
            index, rows = index[not_padding], rows[not_padding]
        used, place = torch.unique(index.to(torch.int64), return_inverse=True)
        sums = sum_rows(rows, place, len(used))
        return _sparse_gradient(used, sums, ctx.shape), None, None, None, None


def _sparse_gradient(rows: Tensor, values: Tensor, shape: Any) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def _embedding(
    call: Call,
    table: Tensor,
    index: Tensor,
    padding: int = -1,
    by_frequency: bool = False,
    sparse: bool = False,
) -> Tensor:
    options = padding, by_frequency, sparse
    if not _trains(table):
        return call(table, index, *options)
    if not _has_rows(table, index, sparse):
        return call(table.to(F32), index, *options).to(table.dtype)
    take = functools.partial(call, table, index, *options)
    return (SparseRows if sparse else Rows).apply(table, index, padding, by_frequency, take)


def _index(call: Call, x: Tensor, indices: Any) -> Tensor:
    """`x[indices]`, where the same element may be taken many times, unless a mask takes them."""
    if not _trains(x) or not any(i is not None and i.dtype not in (torch.bool, torch.uint8) for i in indices):
        return call(x, indices)
    if len(indices) == 1 and _has_rows(x, indices[0]):
        return Rows.apply(x, indices[0], -1, False, functools.partial(call, x, indices))
    return call(x.to(F32), indices).to(x.dtype)


def _index_select(call: Call, x: Tensor, dim: int, index: Tensor) -> Tensor:
    if not _trains(x):
        return call(x, dim, index)
    if x.dim() and index.dim() and dim % x.dim() == 0 and _has_rows(x, index):
        return Rows.apply(x, index, -1, False, functools.partial(call, x, dim, index))
    return call(x.to(F32), dim, index).to(x.dtype)


def _take(call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a look-up on an fp32 copy where the gradient of a 16-bit tensor is a sum of its uses."""
    return run_widened(call, x, *args, **kwargs) if _trains(x) else call(x, *args, **kwargs)


def _embedding_bag(
    call: Call,
    table: Tensor,
    index: Tensor,
    offsets: Tensor,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    *rest: Any,
) -> Any:
    """Bags of rows that are taken from the table first, so that each is in one place."""
    padding, weights = rest[2] if len(rest) > 2 else None, rest[0] if rest else None
    if not (_trains(table) or _trains(weights)):
        return call(table, index, offsets, by_frequency, mode, sparse, *rest)
    is_plain = not by_frequency and mode < 2 and (padding is None or padding < 0)
    if not (is_plain and _has_rows(table, index, sparse) and _has_function(offsets, weights)):
        return run_widened(call, table, index, offsets, by_frequency, mode, sparse, *rest)
    take = functools.partial(_aten.index_select, table, 0, index)
    rows = (SparseRows if sparse else Rows).apply(table, index, -1, False, take)
    places = torch.arange(len(index), dtype=offsets.dtype, device=index.device)
    return call(rows, places, offsets, False, mode, False, *rest)


_SUMS: Mapping[str, Callable[..., Any]] = {
    "layer_norm": _layer_norm,
    "native_layer_norm": _native_layer_norm,
    "batch_norm": _batch_norm,
    "instance_norm": functools.partial(_affine_in_fp32, (1, 2), 3),
    "group_norm": functools.partial(_affine_in_fp32, (2, 3), None),
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "index": _index,
    "index_select": _index_select,
    "take": _take,
    **dict.fromkeys(("coalesce", "to_dense"), _sum_repeats),
    **dict.fromkeys(("index_put", "put"), functools.partial(_run_accumulating, run_widened)),
    **dict.fromkeys(("index_put_", "put_"), functools.partial(_run_accumulating, _run_in_place)),
    **dict.fromkeys(
        ("gather", "scatter_add", "scatter_reduce"), functools.partial(_run_scatter, run_widened)
    ),
    **dict.fromkeys(("scatter_add_", "scatter_reduce_"), functools.partial(_run_scatter, _run_in_place)),
    **dict.fromkeys(CONVOLUTIONS.split(), _run_convolution),
    **{name: functools.partial(_run_windows, _USES[name], name == "col2im") for name in WINDOWS.split()},
    **dict.fromkeys(("nll_loss", "nll_loss2d", "cross_entropy_loss"), _run_loss),
    "index_add": functools.partial(_run_index_add, run_widened),
    "index_add_": functools.partial(_run_index_add, _run_in_place),
}
