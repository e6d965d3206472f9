"""What a region really does with each op: run a small sample of it and look at the dtypes inside.

Nothing here assumes how a region works; it is given as a context manager and watched from below, at the ops
that reach the device. `halfstep devices` shows the outcome and the conformance battery demands it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from halfstep.conformance.op_samples import SAMPLES
from halfstep.errors import BannedOpError
from halfstep.policy.ops import OpRow, Rule
from halfstep.torch_private import TorchDispatchMode, pytree, schema_of
from halfstep.trees import tensors_in

Verdict = Literal["agrees", "differs", "absent", "unsampled"]
_MOVES = frozenset({"_to_copy", "copy_", "clone", "detach", "empty_like", "fill_", "zero_", "contiguous"})
_HALF_TO_FLOAT = frozenset({"_softmax", "_log_softmax"})  # their third argument: fp16 in, fp32 inside and out
#: Note of an op that the running torch does not have: tables list the ops of every torch.
NOT_IN_TORCH = "not in this torch"
#: Note of a LOW op that the device computes in fp32, giving back the compute dtype.
ROUNDED = "fp32 arithmetic, rounded"
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Observed:
    """One op under a region.

    `given`: dtypes of its floating arguments. `compute`: floating dtypes taken in by the ops below that are
    no casts and no views (an own `dtype=` counts as its dtype). `output`: dtype of the first result. The
    verdict: `agrees` or `differs` with the rule, `absent` where the device lacks the op in fp32 already,
    or the running torch does, `unsampled` where there is no sample of it. `note` says why.
    """

    op: str
    rule: Rule
    given: tuple[torch.dtype, ...]
    compute: tuple[torch.dtype, ...]
    output: torch.dtype | None
    verdict: Verdict
    note: str = ""


class _DtypesSeen(TorchDispatchMode):
    """Remembers the floating dtypes that computing ops take in."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[torch.dtype] = set()

    @property
    def compute(self) -> tuple[torch.dtype, ...]:
        return tuple(d for d in _FLOATING if d in self._seen)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dtypes, name = _dtypes((args, kwargs)), schema_of(func).name.removeprefix("aten::")
        if dtypes and not func.is_view and name not in _MOVES:
            dtype = (kwargs or {}).get("dtype")
            if name in _HALF_TO_FLOAT and args[2]:
                dtype = torch.float32
            self._seen.update((dtype,) if dtype in _FLOATING else dtypes)
        return func(*args, **(kwargs or {}))


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _dtypes(tree: Any) -> tuple[torch.dtype, ...]:
    """Return the floating dtypes of the tensors in a tree, complex ones by their parts, widest last."""
    leaves = {_real(t.dtype) for t in tensors_in(tree)}
    return tuple(d for d in _FLOATING if d in leaves)


def probe_casting(
    device: torch.device | str,
    dtype: torch.dtype,
    rows: Mapping[str, OpRow],
    region: Callable[[], AbstractContextManager[Any]],
) -> dict[str, Observed]:
    """Run every op of `rows` once under `region()` and compare what happened with its rule.

    LOW ops are given fp32, FULL, KEEP and BANNED ops `dtype`, WIDEST ops both. A LOW op may also compute in
    fp32 and give back `dtype`: arithmetic with rounding, on devices where `dtype` is slow.

    Args:
        device: where to run.
        dtype: the compute dtype of the region.
        rows: op name to rule, as `Policy.rows` gives them.
        region: makes the region to look at.
    """
    observations: dict[str, Observed] = {}
    with warnings.catch_warnings(), torch.no_grad():
        # Deprecated and beta ops are in the table like any other; their warnings are not about us.
        warnings.simplefilter("ignore")
        for name, row in rows.items():
            observations[name] = _probe(name, row.rule, device, dtype, region)
    return observations


def _probe(
    name: str,
    rule: Rule,
    device: torch.device | str,
    dtype: torch.dtype,
    region: Callable[[], AbstractContextManager[Any]],
) -> Observed:
    if name not in SAMPLES:
        return Observed(name, rule, (), (), None, "unsampled", "no sample call of it")
    if not hasattr(torch.ops.aten, name):
        return Observed(name, rule, (), (), None, "absent", NOT_IN_TORCH)
    if name.startswith("mkldnn") and torch.device(device).type != "cpu":
        return Observed(name, rule, (), (), None, "absent", "belongs to the CPU")
    fn, args = SAMPLES[name](device, torch.float32)
    args = _sample_arguments(rule, dtype, args)
    dtypes, watch = _dtypes(args), _DtypesSeen()
    try:
        with region(), watch:
            result = fn(*args)
    except BannedOpError as error:
        verdict: Verdict = "agrees" if rule is Rule.BANNED else "differs"
        return Observed(name, rule, dtypes, (), None, verdict, str(error))
    except (RuntimeError, ValueError, TypeError) as error:
        absent = _fails_plainly(name, device)
        return Observed(name, rule, dtypes, (), None, "absent" if absent else "differs", _first_line(error))
    output = next((t.dtype for t in tensors_in(result)), None)
    verdict, note = _judge(rule, dtype, watch.compute, output)
    return Observed(name, rule, dtypes, watch.compute, output, verdict, note)


def _sample_arguments(rule: Rule, dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sample arguments in the dtypes that show what the rule does."""
    if rule in (Rule.LOW, Rule.FP32_OUT):
        return args
    quota = Counter({"fp32": 1 if rule is Rule.WIDEST else 0})

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return value
        if quota["fp32"]:
            quota["fp32"] -= 1
            return value
        return value.to(dtype)

    return cast("tuple[Any, ...]", pytree.tree_map(change, args))


def _judge(
    rule: Rule, dtype: torch.dtype, compute: tuple[torch.dtype, ...], output: torch.dtype | None
) -> tuple[Verdict, str]:
    if rule is Rule.BANNED:
        return "differs", "ran although it is banned"
    wide = torch.float32
    target = dtype if rule in (Rule.LOW, Rule.KEEP) else wide
    result = None if output is None else _real(output)
    right = result is target or result not in _FLOATING
    inside = rule is Rule.KEEP or not compute or target in compute
    if rule is Rule.LOW and compute == (wide,) and right:
        return "agrees", ROUNDED
    return ("agrees", "") if right and inside else ("differs", f"the rule is {rule.value}")


def _fails_plainly(name: str, device: torch.device | str) -> bool:
    """Whether the op fails in fp32 without any region: this device does not have it."""
    fn, args = SAMPLES[name](device, torch.float32)
    try:
        fn(*args)
    except (RuntimeError, ValueError, TypeError):
        return True
    return False


def _first_line(error: Exception) -> str:
    """Return the first sentence of torch's message; the lists of backends after it help nobody."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].partition(". ")[0][:160]


def groups(observations: Iterable[Observed]) -> Iterator[tuple[Observed, list[str]]]:
    """Observations that look alike, with the names of their ops: one of them, and all names."""
    by_key: dict[tuple[Any, ...], tuple[Observed, list[str]]] = {}
    for o in observations:
        shows_note = o.verdict in ("agrees", "differs") and o.rule is not Rule.BANNED
        note = o.note if shows_note or o.note == NOT_IN_TORCH else ""
        key = (o.rule, o.given, o.compute, o.output, o.verdict, note)
        by_key.setdefault(key, (o, []))[1].append(o.op)
    order = list(Rule)
    yield from sorted(by_key.values(), key=lambda each: (order.index(each[0].rule), each[0].verdict))
