"""The first bad op of a training step: where inf or NaN was born, why, what it spoiled, what cures it.

`trace_step` runs one step under the tape and puts everything back as it was, so it may be called on a live
training run. `first_bad_op` is its short form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.distributed import gather, local_of, rank, world_size
from halfstep.numerics.cause import counted, explain, ill_row, ill_values, outlying_weight
from halfstep.numerics.cures import larger_scale, propose, to_bf16
from halfstep.numerics.fault import Cause, Cure, Fault, Spoiled, TensorInfo
from halfstep.numerics.histogram import amax
from halfstep.numerics.judge import Again, try_cures
from halfstep.numerics.locations import OpLocation
from halfstep.numerics.nodes import End, Node, is_finite, tensors_in
from halfstep.numerics.participants import StepParticipants, listed
from halfstep.numerics.snapshot import Snapshot, replay, run_eagerly
from halfstep.numerics.tape import Tape, key_of
from halfstep.numerics.trials import InPlace, ReplayReport, Together, expected_reductions
from halfstep.numerics.underflow import Flushed, UnderflowProbe

#: The one value for a fault, by the name that it has beside `first_bad_op`.
BadOp = Fault
Observer = Callable[[Node, bool], None]

_NOWHERE = OpLocation("", "", None, "", 0)
_ELSEWHERE = "another rank's gradients were not finite: see that rank's verdict"


@dataclass
class Trace:
    """What one traced step showed. `counts`: how often (phase, op, dtype) ran; `bad`: None if all is well;
    `collectives`: by which kernels ranks talked to each other, and what DDP still expects.
    """

    bad: Fault | None
    counts: Mapping[tuple[str, str, str], int]
    ends: tuple[End, ...]
    result: Any
    ops: int
    seconds: float
    error: BaseException | None = None
    collectives: tuple[str, ...] = ()


def trace_step(
    step: Callable[..., Any],
    *batch: Any,
    model: nn.Module | Iterable[nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    session: Any = None,
    others: Iterable[Any] = (),
    underflow: bool = False,
    try_cures: bool = True,
    keep_bytes: int = 1 << 30,
    observers: Iterable[Observer] = (),
) -> Trace:
    """Runs `step(*batch)` once under the tape and restores weights, buffers, states and random generators.

    Args:
        step: does forward, backward and the optimizer's step; called again for each cure that is tried.
        batch: its arguments.
        model, optimizer, session, others: what takes part. Whatever is left out is found among the names that
            `step` uses; `others` are further things with state_dict (schedulers, scalers).
        underflow: also look for gradients that vanish (a second, slower run of each suspicious op).
        try_cures: replay the step with each cure that can be applied from outside. Over several ranks all try
            everybody's cures together, so all must call this alike; where the step uses collectives other
            than all-reduce and broadcast (FSDP, synchronised batch norm), DDP with a static graph or looking
            for unused parameters, or a last forward of DDP without backward, only other loss scales are
            tried; none where a rank's step raised.
        keep_bytes: memory that results may hold for re-runs.
        observers: called with each op as it ran, and whether its results were finite.

    Raises:
        Exception: what `step` raised, where nothing in it was found to be not finite.
    """
    parts = StepParticipants(step, [*listed(model), *listed(optimizer), *listed(session), *others])
    snapshot = Snapshot(parts)
    started = time.perf_counter()
    try:
        trace = _run(step, batch, parts, underflow, keep_bytes, observers)
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
    """The op at which a step's values stop being finite, or None; takes the arguments of `trace_step`."""
    return trace_step(step, *batch, **parts).bad


def _run(
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    parts: StepParticipants,
    underflow: bool,
    keep_bytes: int,
    observers: Iterable[Observer] = (),
) -> Trace:
    before = bad_names(parts)
    probe = UnderflowProbe() if underflow else None
    tape = Tape(parts.model, keep_bytes, [*observers, *([probe.look] if probe else [])])
    result, error = None, None
    # The tape sees kernels only where Python calls them; compiled regions run as written.
    with run_eagerly(), replay(), expected_reductions(tape.collectives), tape:
        try:
            result = step(*batch)
        except Exception as caught:
            error = caught
    for value in tensors_in(result):
        tape.check("loss", "result", value)
    return finish(tape, parts, before, result, error, probe, batch)


def finish(
    tape: Tape,
    parts: StepParticipants,
    before: frozenset[tuple[str, str]],
    result: Any,
    error: BaseException | None,
    probe: UnderflowProbe | None,
    batch: Any = (),
) -> Trace:
    """Turns a closed tape into a Trace; `before` are the values that were not finite to begin with."""
    spoiled = _spoiled(tape, parts, before)
    bad = _verdict(tape, parts, spoiled, batch)
    flushed = () if probe is None else probe.report(tape)
    if bad is None and flushed:
        bad = _underflow(flushed[0], parts, spoiled)
    return Trace(
        bad, dict(tape.counts), tuple(tape.ends), result, len(tape.nodes), 0.0, error,
        collectives=tuple(tape.collectives),
    )  # fmt: skip


def _named_values(parts: StepParticipants) -> Iterable[tuple[str, str, Tensor]]:
    names: dict[Tensor, str] = {}
    for number, model in enumerate(parts.models):
        prefix = f"{type(model).__name__}." if number else ""
        for name, parameter in model.named_parameters():
            names[parameter] = prefix + name
            yield "parameter", prefix + name, parameter
        for name, buffer in model.named_buffers():
            yield "buffer", prefix + name, buffer
    for number, optimizer in enumerate(parts.optimizers):
        updated = [p for g in optimizer.param_groups for p in g["params"]]
        for place, parameter in enumerate(updated):
            name = names.get(parameter, f"parameter {place} of optimizer {number}")
            if parameter not in names:
                yield "parameter", name, parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield "state", f"{name}.{key}", value


def bad_names(parts: StepParticipants) -> frozenset[tuple[str, str]]:
    """Which parameters, buffers and optimizer states are not finite now."""
    return frozenset((kind, name) for kind, name, t in _named_values(parts) if not is_finite(t))


def _spoiled(tape: Tape, parts: StepParticipants, before: frozenset[tuple[str, str]]) -> Spoiled:
    found: dict[str, list[str]] = {"parameter": [], "buffer": [], "state": []}
    for kind, name, value in _named_values(parts):
        if (kind, name) not in before and not tape.check(kind, name, value):
            found[kind].append(name)
    gradients = tuple(dict.fromkeys(e.name for e in tape.ends if e.kind == "gradient"))
    return Spoiled(gradients, *(tuple(found[k]) for k in ("parameter", "buffer", "state")))


def _verdict(tape: Tape, parts: StepParticipants, spoiled: Spoiled, batch: Any) -> Fault | None:
    if not tape.ends:
        return _from_elsewhere(tape, spoiled) or _hidden(tape, parts, spoiled)
    reached = {i for end in tape.ends for i in end.origins}
    real = sorted(i for i in reached if i in tape.candidates and not tape.candidates[i].intended)
    real = real or sorted(reached & tape.candidates.keys())
    real = real or sorted(i for i, n in tape.candidates.items() if not n.intended)
    ends = tuple(dict.fromkeys(f"{e.kind} {e.name}" if e.kind != "loss" else "loss" for e in tape.ends))
    if not real:
        return _unseen(spoiled, ends)
    node = tape.candidates[real[0]]
    culprit = node
    if node.outside:
        cause = _outside(node, tape, parts, batch)
    else:
        cause, culprit = _inside(node, tape, parts)
    cures = propose(node, cause, parts, tape.root_amax, culprit)
    carried = tuple(
        dict.fromkeys(
            f"{n.phase}: {n.op} in {n.location.module or 'root'}"
            for n in tape.passed
            if node.index in n.origins
        )
    )
    return _bad_op(node, cause, cures, spoiled, ends, carried[:12])


def _from_elsewhere(tape: Tape, spoiled: Spoiled) -> Fault | None:
    """This rank's own gradients were finite and what the optimizer read was not: another rank's were not."""
    read = [n for n in tape.candidates.values() if n.outside and n.phase in ("backward", "optimizer")]
    if not read or world_size() == 1:
        return None
    cause = Cause("rank", _ELSEWHERE)
    outputs = tuple(TensorInfo.of(t) for t in read[0].outside[:1])
    return Fault(
        "backward", "all_reduce", _NOWHERE, cause, aten="c10d.allreduce", origin=False, outputs=outputs,
        spoiled=spoiled, reached=("gradients of this rank",),
    )  # fmt: skip


def _hidden(tape: Tape, parts: StepParticipants, spoiled: Spoiled) -> Fault | None:
    """Range overflows that a later op turned into finite values, so that nothing at the end tells of them."""
    for swallower, origins in tape.swallowed:
        real = sorted(i for i in origins if i in tape.candidates and not tape.candidates[i].intended)
        if not real or tape.candidates[real[0]].outside:
            continue
        node = tape.candidates[real[0]]
        cause, culprit = explain(node, tape.originals)
        if cause.kind == "range":
            bad = _bad_op(node, cause, propose(node, cause, parts, culprit=culprit), spoiled, ())
            place = swallower.location.where
            text = f"{swallower.op}{f' ({place})' if place else ''} makes it finite again; the loss is finite"
            return replace(bad, hidden=text)
    return None


def _bad_op(
    node: Node,
    cause: Cause,
    cures: list[Cure],
    spoiled: Spoiled,
    ends: tuple[str, ...],
    carried: tuple[str, ...] = (),
    underflow: bool = False,
) -> Fault:
    return Fault(
        node.phase,
        node.op,
        replace(node.location, function=None),
        cause,
        cures,
        aten=node.aten,
        origin=not node.outside,
        inputs=tuple(TensorInfo.of(t) for t in node.given()),
        outputs=tuple(TensorInfo.of(t) for t in node.outs),
        spoiled=spoiled,
        reached=ends,
        passed_on=carried,
        underflow=underflow,
    )


def _inside(node: Node, tape: Tape, parts: StepParticipants) -> tuple[Cause, Node]:
    """Why the op's result is not finite, in the terms of what the user gave it: inputs, weights, the loss."""
    rate = next((rate for rate in tape.rates if not math.isfinite(rate)), None)
    if rate is not None and node.phase == "optimizer":
        return Cause("learning rate", f"learning rate: it is {rate} at this step"), node
    cause, culprit = explain(node, tape.originals)
    if cause.kind != "range":
        return cause, culprit
    named = {id(p): (n, p) for kind, n, p in _named_values(parts) if kind == "parameter"}
    outlier = outlying_weight(node, list(named.values()), tape.originals)
    if outlier is not None:
        return replace(cause, text=f"{cause.text}; {outlier.text}", weight=outlier.name), culprit
    large = {n: float(amax(t)) for n, t in node.names.items() if t.is_floating_point()}
    name = max(large, key=lambda n: large[n], default="")
    if name and large[name] > 1e3 and node.phase != "backward":
        return replace(cause, text=f"{cause.text}; {name} reaches {large[name]:.3g}"), culprit
    return cause, culprit


def _outside(node: Node, tape: Tape, parts: StepParticipants, batch: Any) -> Cause:
    """The op read a value that was not finite before the step began: whose is it?"""
    storages = {t.untyped_storage().data_ptr() for t in node.outside if t.layout == torch.strided}
    for kind, name, value in ((kind, name, local_of(t)) for kind, name, t in _named_values(parts)):
        if value.layout == torch.strided and value.untyped_storage().data_ptr() in storages:
            ill = ill_values(tape.originals.get(key_of(value), value))
            return Cause("weights", f"weights: {kind} {name} was not finite before the step ({ill})")
    if any(tape.was_received(t) for t in node.outside):
        late = node.phase in ("backward", "optimizer")
        return Cause("rank", _ELSEWHERE if late else "what came from the other ranks was not finite")
    return Cause("data", f"data: {_wrong_input(node, tape, batch)}")


def _wrong_input(node: Node, tape: Tape, batch: Any) -> str:
    """What is wrong with what the step was given: `1 NaN in x of batch 13`."""
    wrong = node.outside[0]
    name = next((n for n, t in node.names.items() if not is_finite(t)), "")
    place = next((i for i, t in enumerate(tensors_in(batch)) if not is_finite(t)), None)
    where = f" of {tape.batch}" if tape.batch else "" if place is None else f" (tensor {place} of the batch)"
    row = ill_row(node.names.get(name, wrong))
    return f"{counted(wrong)} in {name or 'what the step was given'}{where}, of {wrong.numel()} values{row}"


def _unseen(spoiled: Spoiled, ends: tuple[str, ...]) -> Fault:
    """Something ended up not finite and no op on the tape did it."""
    cause = Cause(
        "machine",
        "no op that Python dispatched gave a value that is not finite: a kernel outside PyTorch, or memory "
        "written by someone else",
    )
    phase = "optimizer" if all(e.startswith(("parameter", "state")) for e in ends) else "backward"
    return Fault(phase, "unknown", _NOWHERE, cause, origin=False, spoiled=spoiled, reached=ends)


def _underflow(worst: Flushed, parts: StepParticipants, spoiled: Spoiled) -> Fault:
    cause = Cause("precision", worst.text, None, worst.format)
    cures = [larger_scale(worst.missing_bits, parts), to_bf16(parts, worst.node.location.in_region)]
    lost = tuple(f"gradient {n}" for n in worst.lost)
    return _bad_op(worst.node, cause, cures, spoiled, lost, (), True)


def _try_cures(
    trace: Trace,
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    parts: StepParticipants,
    restore: Callable[[], None],
) -> None:
    """Tries the cures of the bad op: on all ranks where the step made them talk, else on this one."""
    bad = trace.bad
    told = ReplayReport.of(trace.bad, trace.error, trace.collectives)
    together = world_size() > 1 and bool(trace.collectives)
    everyone = gather(told, parts.group) if together else [told]
    underflow = any(one.underflow for one in everyone)

    def look() -> Fault | None:
        again = _run(step, batch, parts, underflow, 1 << 28)
        if again.error is not None:
            raise again.error
        return again.bad

    alone = InPlace(lambda: step(*batch), look, restore, parts)
    rerun = Together(everyone, alone) if together else alone
    for fault in (one.fault for one in everyone if one.fault is not None):
        try_cures(fault, Again(taped=0), rerun)
    if not together:
        return
    if bad is not None and bad.cause.kind == "rank":
        _say_others(bad, everyone)
    elif bad is not None:
        bad.cures = everyone[rank(parts.group)].cures


def _say_others(bad: Fault, everyone: Sequence[ReplayReport]) -> None:
    """On a rank whose own step was well: what the others found."""
    number = next((i for i, told in enumerate(everyone) if told.fault is not None), None)
    if number is None:
        text = (
            "the gradients of every rank were finite and what the step read was not: it comes from the "
            "reduction over ranks, or from before the step"
        )
        bad.cause = Cause("unknown", text)
        return
    found = everyone[number].fault
    assert found is not None
    story = f"{found.phase}: {found.op} {found.placed}: {found.cause.text}"
    bad.cause = replace(bad.cause, text=f"rank {number} found the first bad op: {story}")
    bad.cures = list({cure.text: cure for one in everyone for cure in one.cures}.values())
