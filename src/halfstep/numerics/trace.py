"""The first bad op of a training step: where inf or NaN appeared, why, what it corrupted, what cures it.

`trace_step` runs one step under the tape and puts everything back as it was, so it may be called on a live
training run. `first_bad_op` is its short form. Cures are tried in place: on one rank, or on all
ranks together. Ranks find different ops, and a trial takes part in the step's collectives, so
ranks tell each other first what they found and then try everybody's cures, in one order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from halfstep.distributed import gather, local_of, rank, world_size
from halfstep.errors import LossScaleCollapsed
from halfstep.numerics.cause import (
    Cause,
    UnderflowProbe,
    count_in_words,
    count_nonfinite,
    explain,
    nonfinite_row,
    outlying_weight,
)
from halfstep.numerics.fault import (
    Corrupted,
    Fault,
    RerunRequest,
    RerunResult,
    TensorInfo,
    try_cures,
)
from halfstep.numerics.histogram import amax
from halfstep.numerics.remedies import Cure, Evidence, propose
from halfstep.numerics.remedies.advice import unmask
from halfstep.numerics.remedies.bf16 import to_bf16
from halfstep.numerics.remedies.loss import larger_scale
from halfstep.numerics.snapshot import Snapshot, StepParticipants, as_list, replay, run_eagerly
from halfstep.numerics.tape import End, Node, OpLocation, Tape, is_finite, key_of
from halfstep.trees import tensors_in


class _InPlace:
    """Runs a step again in this process: on this rank, or on all ranks, each of which must ask alike.

    Over ranks other loss scales alone are tried, with which the step runs the very same ops: a rank that
    raised with another cure would leave the others waiting in a collective for ever.

    Args:
        retrace: runs it under the tape; what was bad, if anything.
        restore: puts everything back as it was before the step.
        parts: what takes part in the step.
        together: whether all ranks take part.
        through: whether the step ran to its end on each of them.
    """

    def __init__(
        self, retrace: Callable[[], Fault | None], restore: Callable[[], None], parts: StepParticipants,
        together: bool, through: bool,
    ) -> None:  # fmt: skip
        self._retrace, self._restore, self._parts = retrace, restore, parts
        self._together, self._through = together, through

    def run(self, request: RerunRequest) -> RerunResult | None:
        """Return whether the step stays finite with the cure; one with which it cannot run does not help."""
        assert request.cure is not None
        if self._together and not (self._through and request.cure.same_ops):
            return None
        rerun_result = RerunResult(falls=self._parts.scale_falls)
        try:
            with ExitStack() as stack:
                met = request.cure.apply(self._parts, stack)
                bad = None if met is None else self._retrace()
                rerun_result.applied = met is not None and met()
            rerun_result.faults = [] if bad is None else [bad]
            rerun_result.bad_at = None if bad is None else request.at
        except Exception:
            rerun_result.bad_at = request.at
        finally:
            self._restore()
        if not self._together:
            return rerun_result
        well = all(gather(rerun_result.applied and rerun_result.bad_at is None, self._parts.group))
        return RerunResult(bad_at=None if well else request.at)


#: The one value for a fault, by the name that it has beside `first_bad_op`.
BadOp = Fault
Observer = Callable[[Node, bool], None]

_NOWHERE = OpLocation("", "", None, "", 0)
_ELSEWHERE = "another rank's gradients were not finite: see that rank's verdict"


@dataclass
class Trace:
    """What one traced step showed. `counts`: how often (phase, op, dtype) ran; `bad`: None if all is well;
    `used_collectives`: whether ranks used_collectives to each other in it.
    """

    bad: Fault | None
    counts: Mapping[tuple[str, str, str], int]
    ends: tuple[End, ...]
    result: Any
    ops: int
    seconds: float
    error: BaseException | None = None
    used_collectives: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """Return how often each (phase, op, dtype) ran, as rows."""
        return [{"phase": p, "op": o, "dtype": d, "count": n} for (p, o, d), n in self.counts.items()]


def trace_step(
    step: Callable[..., Any],
    *batch: Any,
    model: nn.Module | Iterable[nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    session: Any = None,
    others: Iterable[Any] = (),
    underflow: bool = False,
    try_cures: bool = True,
    observers: Iterable[Observer] = (),
) -> Trace:
    """Run `step(*batch)` once under the tape and restore weights, buffers, states and random generators.

    Args:
        step: does forward, backward and the optimizer's step; called again for each cure that is tried.
        batch: its arguments.
        model, optimizer, session, others: what takes part. Whatever is left out is found among the names that
            `step` uses; `others` are further things with state_dict (schedulers, scalers).
        underflow: also look for gradients that vanish (a second, slower run of each suspicious op).
        try_cures: replay the step with each cure that can be applied from outside. Over several ranks all try
            everybody's cures together, so all must call this alike; only other loss scales are tried there,
            and none where a rank's step raised.
        observers: called with each op as it ran, and whether its results were finite.

    Raises:
        Exception: what `step` raised, where nothing in it was found to be not finite.
    """
    parts = StepParticipants(step, [*as_list(model), *as_list(optimizer), *as_list(session), *others])
    snapshot = Snapshot(parts)
    started = time.perf_counter()
    try:
        trace = _run(step, batch, parts, underflow, observers)
    finally:
        snapshot.restore()
    if try_cures:
        _try_cures(trace, step, batch, parts, snapshot.restore)
    if trace.bad is not None:
        trace.bad.harmless = trace.bad.of_the_scale
    trace.seconds = time.perf_counter() - started
    if trace.error is not None and trace.bad is None:
        raise trace.error
    return trace


def first_bad_op(step: Callable[..., Any], *batch: Any, **parts: Any) -> Fault | None:
    """Return the op at which a step's values stop being finite, or None; arguments as in `trace_step`."""
    return trace_step(step, *batch, **parts).bad


def _run(
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    parts: StepParticipants,
    underflow: bool,
    observers: Iterable[Observer] = (),
) -> Trace:
    result, error = None, None
    taping = Taping(parts, underflow, observers)
    with replay(), taping.around:
        try:
            result = step(*batch)
        except Exception as caught:
            error = caught
    return taping.end(parts, error, result, batch)


class Taping:
    """The tape of one step, running from construction to `end`, which makes a trace of it."""

    def __init__(
        self,
        parts: StepParticipants,
        underflow: bool = True,
        observers: Iterable[Observer] = (),
    ) -> None:
        self._initially_nonfinite = frozenset[tuple[str, str]]()
        self.begin_with(parts)
        self._probe = UnderflowProbe()
        self.tape = Tape(parts.model, [*observers, *([self._probe.observe] if underflow else [])])
        self.around = ExitStack()
        # The tape sees kernels only where Python calls them; compiled regions run as written.
        self.around.enter_context(run_eagerly())
        self.around.enter_context(self.tape)

    def begin_with(self, parts: StepParticipants) -> None:
        """Note which values are not finite as the step begins, or as a model is met in it."""
        self._initially_nonfinite |= {
            (kind, name) for kind, name, t in parts.named_values() if not is_finite(t)
        }

    def end(
        self, parts: StepParticipants, error: BaseException | None = None, result: Any = None,
        batch: Any = (), dropped: bool = False,
    ) -> Trace:  # fmt: skip
        """Close the tape and return its trace; a step that raised or was `dropped` ends with what it read."""
        self.around.close()
        tape = self.tape
        for value in tensors_in(result):
            tape.check("loss", "result", value)
        names: dict[str, list[str]] = {"parameter": [], "buffer": [], "state": []}
        for kind, name, value in parts.named_values():
            if (kind, name) not in self._initially_nonfinite and not tape.check(kind, name, value):
                names[kind].append(name)
        if dropped or error is not None:
            tape.end_early(error)
        gradients = dict.fromkeys(e.name for e in tape.ends if e.kind == "gradient")
        damage = Corrupted(tuple(gradients), *map(tuple, names.values()))
        bad = _verdict(tape, parts, damage, batch) or _underflow(self._probe, tape, parts, damage)
        return Trace(
            bad, dict(tape.counts), tuple(tape.ends), result, len(tape.nodes), 0.0, error,
            used_collectives=tape.used_collectives,
        )  # fmt: skip


def _verdict(tape: Tape, parts: StepParticipants, damage: Corrupted, batch: Any) -> Fault | None:
    if not tape.ends:
        return _from_elsewhere(tape, damage) or _find_hidden_overflow(tape, parts, damage)
    reached = {i for end in tape.ends for i in end.origins}
    real = sorted(i for i in reached if i in tape.candidates and not tape.candidates[i].intended)
    real = real or sorted(reached & tape.candidates.keys())
    real = real or sorted(i for i, n in tape.candidates.items() if not n.intended)
    ends = tuple(dict.fromkeys(f"{e.kind} {e.name}" if e.kind != "loss" else "loss" for e in tape.ends))
    if not real:
        return _unseen(damage, ends)
    node = tape.candidates[real[0]]
    culprit = node
    mask, taker = _takes_in(tape, node)
    if taker is not None and mask is not None:
        text = f"mathematics: {taker.op} takes in terms that are -inf; {mask.op} masked them"
        cause = Cause("mathematics", text + (f" at {mask.location.where}" if mask.location.file else ""))
        return _bad_op(taker, cause, unmask(taker, mask), damage, ends)
    if node.outside:
        cause = _outside(node, tape, parts, batch)
    else:
        cause, culprit = _inside(node, tape, parts)
    cures = propose(Evidence(node, cause, parts, tape.root_amax, culprit, tape.nodes[node.index + 1 :]))
    later = (n for n in tape.passed if node.index in n.origins)
    passed = dict.fromkeys(f"{n.phase}: {n.op} in {n.location.module or 'root'}" for n in later)
    return _bad_op(node, cause, cures, damage, ends, passed_on=(*passed,)[:12])


_TAKE_IN = ("sum", "mean", "neg", "abs", "pow", "nll_loss_forward", "nll_loss2d_forward")


def _takes_in(tape: Tape, node: Node) -> tuple[Node | None, Node | None]:
    """Return a mask and the first op that turns its -inf into a loss or, as 0 times -inf is, NaN."""
    if node.intended:
        passed = (n for n in tape.passed if node.index in n.origins and n.phase == "forward")
        return node, next((n for n in passed if n.base in _TAKE_IN), None)
    masks = (tape.candidates[i] for i in sorted(node.origins - {node.index}))
    return next(masks, None), node if node.base in ("mul", "sub") and node.phase == "forward" else None


def _from_elsewhere(tape: Tape, damage: Corrupted) -> Fault | None:
    """Return another rank's fault: this rank's gradients were finite, those the optimizer read were not."""
    read = [n for n in tape.candidates.values() if n.outside and n.phase in ("backward", "optimizer")]
    if not read or world_size() == 1:
        return None
    cause = Cause("rank", _ELSEWHERE)
    outputs = tuple(TensorInfo.of(t) for t in read[0].outside[:1])
    return Fault(
        "backward", "all_reduce", _NOWHERE, cause, aten="c10d.allreduce", origin=False, outputs=outputs,
        corrupted=damage, reached=("gradients of this rank",),
    )  # fmt: skip


def _find_hidden_overflow(tape: Tape, parts: StepParticipants, damage: Corrupted) -> Fault | None:
    """Find range overflows that a later op turned into finite values, so that no end shows them."""
    for swallower, origins in tape.swallowed:
        real = sorted(i for i in origins if i in tape.candidates and not tape.candidates[i].intended)
        if not real or tape.candidates[real[0]].outside:
            continue
        node = tape.candidates[real[0]]
        cause, culprit = explain(node, tape.originals)
        if cause.kind == "range":
            cures = propose(Evidence(node, cause, parts, 0.0, culprit, tape.nodes[node.index + 1 :]))
            place = swallower.location.where
            text = f"{swallower.op}{f' ({place})' if place else ''} makes it finite again; the loss is finite"
            return _bad_op(node, cause, cures, damage, hidden=text)
    return None


def _bad_op(
    node: Node, cause: Cause, cures: list[Cure], damage: Corrupted, reached: tuple[str, ...] = (), **more: Any
) -> Fault:
    return Fault(
        node.phase, node.op, replace(node.location, function=None), cause, cures, aten=node.aten,
        origin=not node.outside, inputs=tuple(TensorInfo.of(t) for t in node.user_tensors()),
        outputs=tuple(TensorInfo.of(t) for t in node.outs), corrupted=damage, reached=reached, **more,
    )  # fmt: skip


def _inside(node: Node, tape: Tape, parts: StepParticipants) -> tuple[Cause, Node]:
    """Explain the op's nonfinite result by what the user gave it: inputs, weights, the loss."""
    rate = next((rate for rate in tape.rates if not math.isfinite(rate)), None)
    if rate is not None and node.phase == "optimizer":
        return Cause("learning rate", f"learning rate: it is {rate} at this step"), node
    cause, culprit = explain(node, tape.originals)
    if cause.kind != "range":
        return cause, culprit
    named = {id(p): (n, p) for kind, n, p in parts.named_values() if kind == "parameter"}
    outlier = outlying_weight(node, list(named.values()), tape.originals)
    if outlier is not None:
        return replace(cause, weight=outlier[0]).and_also(outlier[1]), culprit
    large = {n: float(amax(t)) for n, t in node.names.items() if t.is_floating_point()}
    name = max(large, key=lambda n: large[n], default="")
    if name and large[name] > 1e3 and node.phase != "backward":
        return cause.and_also(f"{name} reaches {large[name]:.3g}"), culprit
    return cause, culprit


def _outside(node: Node, tape: Tape, parts: StepParticipants, batch: Any) -> Cause:
    """Explain an op that read a value that was not finite before the step began."""
    storages = {t.untyped_storage().data_ptr() for t in node.outside if t.layout == torch.strided}
    for kind, name, value in ((kind, name, local_of(t)) for kind, name, t in parts.named_values()):
        if value.layout == torch.strided and value.untyped_storage().data_ptr() in storages:
            count_text = count_nonfinite(tape.originals.get(key_of(value), value))
            return Cause("weights", f"weights: {kind} {name} was not finite before the step ({count_text})")
    if any(tape.was_received(t) for t in node.outside):
        late = node.phase in ("backward", "optimizer")
        return Cause("rank", _ELSEWHERE if late else "what came from the other ranks was not finite")
    tensor = node.outside[0]
    name = next((n for n, t in node.names.items() if not is_finite(t)), "")
    place = next((i for i, t in enumerate(tensors_in(batch)) if not is_finite(t)), None)
    where = f" of {tape.batch}" if tape.batch else "" if place is None else f" (tensor {place} of the batch)"
    what = (
        f"{count_in_words(tensor)} in {name or 'what the step was given'}{where}, of {tensor.numel()} values"
    )
    return Cause("data", f"data: {what}{nonfinite_row(node.names.get(name, tensor))}")


def _unseen(damage: Corrupted, ends: tuple[str, ...]) -> Fault:
    """Return the fault of something that became nonfinite without an op on the tape."""
    cause = Cause(
        "machine",
        "no op that Python dispatched gave a value that is not finite: a kernel outside PyTorch, or memory "
        "written by someone else",
    )
    phase = "optimizer" if all(e.startswith(("parameter", "state")) for e in ends) else "backward"
    return Fault(phase, "unknown", _NOWHERE, cause, origin=False, corrupted=damage, reached=ends)


def _underflow(probe: UnderflowProbe, tape: Tape, parts: StepParticipants, damage: Corrupted) -> Fault | None:
    """Return the fault of the first op that flushed its results to zero, where gradients vanished."""
    lost = tuple(name for name, gradient in tape.gradients.items() if not gradient.any())
    if not lost or probe.worst is None:
        return None
    node, share, fmt, bits = probe.worst
    text = f"underflow: {share:.0%} of the nonzero results of {node.op} are zero in {fmt}"
    cause = Cause("precision", f"{text}; {len(lost)} parameter gradients vanish", None, fmt)
    cures = [larger_scale(bits, parts), to_bf16(parts, node.location.in_region)]
    reached = tuple(f"gradient {name}" for name in lost)
    return _bad_op(node, cause, cures, damage, reached, underflow=True)


def _try_cures(
    trace: Trace,
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    parts: StepParticipants,
    restore: Callable[[], None],
) -> None:
    """Try the cures of the bad op: on all ranks if the step used collectives, else on this one."""
    bad = trace.bad
    local_fault = None if bad is None or bad.cause.kind == "rank" else bad
    through = trace.error is None or isinstance(trace.error, LossScaleCollapsed)
    together = world_size() > 1 and trace.used_collectives
    everyone = gather((local_fault, through), parts.group) if together else [(local_fault, through)]
    by_rank = [fault for fault, _ in everyone]
    faults = [fault for fault in by_rank if fault is not None]
    underflow = any(fault.underflow for fault in faults)

    def retrace() -> Fault | None:
        rerun_trace = _run(step, batch, parts, underflow)
        if rerun_trace.error is not None:
            raise rerun_trace.error
        return rerun_trace.bad

    rerun = _InPlace(retrace, restore, parts, together, all(through for _, through in everyone))
    for fault in faults:
        try_cures(fault, RerunRequest(taped=0), rerun)
    if not together or bad is None:
        return
    mine = by_rank[rank(parts.group)]
    if bad.cause.kind == "rank":
        _say_others(bad, by_rank)
    elif mine is not None:
        bad.cures = mine.cures


def _say_others(bad: Fault, by_rank: Sequence[Fault | None]) -> None:
    """Report the faults of other ranks on a rank whose own step was sound."""
    faults = [(number, fault) for number, fault in enumerate(by_rank) if fault is not None]
    if not faults:
        text = (
            "the gradients of every rank were finite and what the step read was not: it comes from the "
            "reduction over ranks, or from before the step"
        )
        bad.cause = Cause("unknown", text)
        return
    number, first = faults[0]
    story = f"{first.phase}: {first.op} {first.location.phrase}: {first.cause.words}"
    bad.cause = replace(bad.cause, text=f"rank {number} found the first bad op: {story}")
    bad.cures = list({cure.text: cure for _, fault in faults for cure in fault.cures}.values())
