"""From the arguments of a LOW op on a CPU to its class, its choice and the call: the runner of such an op.

A call costs one look-up by shapes; where the choice is native throughout, torch's own kernels run as if
nothing were registered. Tracers' tensors, function transforms, forward-mode derivatives, sparse tensors and
whatever does not fit go by `rest`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.casting.kernel_choice import KernelTable, directions
from halfstep.casting.kinds import KINDS
from halfstep.casting.kinds.kind import Args, Call, Choice, OpClass, sizes
from halfstep.formats import dtype_name
from halfstep.torch_private import functorch_level, in_forward_ad, is_jit_tracing

Runner = Callable[[Any, Args, Mapping[str, Any]], Any]

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# What rules may change. fp64 is asked for on purpose, fp8 carries its scale elsewhere, complex has no 16-bit
# twin.
CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
_threads = torch.get_num_threads
_grad = torch.is_grad_enabled
_KEPT = 4096


def class_of(op: str, geometry: str, work: float, dtype: torch.dtype) -> OpClass:
    """Return the class of so much work by an op in a compute dtype, with torch's threads as they are now."""
    size_names = sizes(geometry)
    size = size_names[min(sum(work >= limit for limit in KINDS[op].limits), len(size_names) - 1)]
    return OpClass(op, dtype_name(dtype), geometry, size, _threads())


# --- ops that are rounded whole or not at all --------------------------------------------------------------

_READERS = {name: (op, read) for op, kind in KINDS.items() for name, read in kind.readers.items()}
_STANDS_FOR = {name: op for op, kind in KINDS.items() for name in kind.stands_for}


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments, one level of lists deep (no op takes more)."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [v for v in value if isinstance(v, Tensor)]  # pyright: ignore
    return tensors


def _whole_class(name: str, args: Args, dtype: torch.dtype, has_shapes: bool) -> OpClass | None:
    """The class that stands for an op as a whole; tracers' tensors have no shapes that may be read."""
    threads, low = _threads(), dtype_name(dtype)
    if name in _READERS:
        op, _ = _READERS[name]
        geometry = f"{args[1].dim() - 2}d dense" if op == "convolution" else KINDS[op].geometries[0]
        return OpClass(op, low, geometry, "medium", threads) if geometry in KINDS[op].geometries else None
    op = _STANDS_FOR.get(name.removeprefix("aten::").partition(".")[0])
    if op is None:
        return None
    geometry = KINDS[op].geometries[0]
    if not has_shapes:
        return OpClass(op, low, geometry, "medium", threads)
    tensors = tensors_of(args)
    if KINDS[op].one_backward:  # the weights of the input and of the state, at every step
        weight = max(t.numel() for t in tensors[1:] if t.dim() == 2)
        work = 2.0 * weight * tensors[0].numel() / tensors[0].shape[-1]
    else:
        work = math.prod(sorted(t.numel() for t in tensors)[-2:]) ** 0.75
    return class_of(op, geometry, work, dtype)


def rounds_whole(table: KernelTable, name: str, args: Args, dtype: torch.dtype) -> bool:
    """Whether an op (by its overload's name) is rounded around fp32, forward and backward alike."""
    tensors = tensors_of(args)
    has_shapes = all(type(t) in PLAIN for t in tensors)
    cls = _whole_class(name, args, dtype, has_shapes)
    if cls is None:
        return table.choose(OpClass(name, dtype_name(dtype), "", "", 0), "*").forward != "native"
    needs = "iw" if _grad() and any(t.requires_grad for t in tensors) else ""
    return table.choose(cls, needs + "*").forward != "native"


def choice_of_gradients(table: KernelTable, name: str, args: Args, dtype: torch.dtype) -> Choice | None:
    """The choice of a product (by its overload's name) where it takes torch's own kernel for a gradient.

    None where it does so for no gradient that is needed.
    """
    op_call = _READERS[name][1](args, {}) if name in _READERS else None
    if op_call is None or op_call.op != "linear":
        return None
    choice = table.choose(class_of(op_call.op, op_call.geometry, op_call.work, dtype), op_call.needs)
    return choice if any(getattr(choice, d) == "native" for d in directions(op_call.needs)[1:]) else None


# --- the runner --------------------------------------------------------------------------------------------

_SIMPLE = frozenset({int, float, bool, str, type(None)})


def _key(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return all that a choice hangs on; None where an argument is no ordinary tensor."""
    parts: list[Any] = [_grad(), _threads()]
    for a in args:
        kind = type(a)
        if kind in PLAIN:
            layout = a.layout
            placed = layout is torch.strided and (a.is_contiguous() or a.stride())
            parts += (a.shape, a.dtype, a.requires_grad, layout, placed)
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


def make_low_op_runner(
    name: str,
    compute: torch.dtype,
    table: KernelTable,
    under: Callable[..., Any],
    native: Runner,
    rounded: Runner,
    straight: Callable[..., Any] | None,
) -> Runner:
    """Return the runner of a LOW op on a CPU.

    `name`: of the overload; `under(call, ...)` makes a call with autocast out of the way; `native` and
    `rounded` run the op whole, whatever its arguments; `straight` is `native` where all of them can be cast.
    """
    memo: dict[Any, Runner] = {}
    _, read = _READERS.get(name, (None, None))
    torchs: Runner = native
    if straight is not None:
        torchs = lambda keyset, args, kwargs: straight(keyset, *args, **kwargs)  # noqa: E731

    def whole(args: Args, plain: Runner = native) -> Runner:
        return rounded if rounds_whole(table, name, args, compute) else plain

    def runner_by_choice(call: Call) -> Runner:
        def run(keyset: Any, args: Args, kwargs: Mapping[str, Any]) -> Any:
            low = [a.to(compute) if isinstance(a, Tensor) and a.dtype in CASTABLE else a for a in args]
            out = under(call, low, kwargs)
            return whole(args)(keyset, args, kwargs) if out is NotImplemented else out

        return run

    def decide(args: Args, kwargs: Mapping[str, Any]) -> Runner:
        tensors = tensors_of((*args, *kwargs.values()))
        if any(t.dtype not in CASTABLE and t.dtype is not torch.bool for t in tensors):
            return native
        if any(t.layout is not torch.strided for t in tensors):
            return rounded  # torch's products of sparse tensors add in the dtype they are given
        if not all(t.numel() for t in tensors):
            return native
        op_call = None if read is None else read(args, kwargs)
        if op_call is None:
            return whole(args, torchs)
        choice = table.choose(class_of(op_call.op, op_call.geometry, op_call.work, compute), op_call.needs)
        return torchs if choice.is_native else runner_by_choice(functools.partial(op_call.run, choice))

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
