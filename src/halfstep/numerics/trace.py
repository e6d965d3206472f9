"""The first bad op of a training step: where inf or NaN was born, why, what it spoiled, what cures it.

`trace_step` runs one step under the tape and puts everything back as it was, so it may be called on a live
training run. `first_bad_op` is its short form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.distributed import gather, local_of, world_size
from halfstep.errors import LossScaleCollapsed
from halfstep.formats import dtype_name
from halfstep.numerics.cause import Cause, counted, explain, ill_row, ill_values, outlying_weight
from halfstep.numerics.cures import FAILS, Cure, lowest_scale, propose
from halfstep.numerics.histogram import amax
from halfstep.numerics.locations import OpLocation, within
from halfstep.numerics.nodes import End, Node, is_finite, tensors_in
from halfstep.numerics.participants import StepParticipants, listed
from halfstep.numerics.snapshot import Snapshot, replay, run_eagerly
from halfstep.numerics.tape import Tape, key_of
from halfstep.numerics.trials import (
    ReplayReport,
    Trials,
    TrialsTogether,
    can_rehearse,
    expected_reductions,
    judge,
    plain,
    try_alone,
)
from halfstep.numerics.underflow import Flushed, UnderflowProbe

Observer = Callable[[Node, bool], None]

_ELSEWHERE = "another rank's gradients were not finite: see that rank's verdict"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in words: dtype, shape, largest magnitude (inf or NaN where it is not finite)."""

    dtype: str
    shape: tuple[int, ...]
    amax: float

    @classmethod
    def of(cls, t: Tensor) -> TensorInfo:
        """Describes `t`."""
        largest = abs(float(amax(t))) if t.is_floating_point() or t.is_complex() else 0.0
        return cls(dtype_name(t.dtype), tuple(t.shape), largest)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Spoiled:
    """What is not finite after the step and was before it, by name."""

    gradients: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    optimizer_state: tuple[str, ...] = ()

    @property
    def lasting(self) -> tuple[str, ...]:
        """What stays spoiled when the step is skipped or over: everything but the gradients."""
        return (*self.parameters, *self.buffers, *self.optimizer_state)

    def __str__(self) -> str:
        parts = [
            f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for kind, names in (
                ("gradients", self.gradients),
                ("parameters", self.parameters),
                ("buffers", self.buffers),
                ("optimizer states", self.optimizer_state),
            )
            if names
        ]
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class BadOp:
    """The op at which values stopped being finite (or, `underflow`, became zero).

    `phase`: forward, backward, recompute or optimizer. `module`: path in the model, "" for the root.
    `op`: as the op table names it; `aten`: the kernel. `origin`: finite in, not finite out (False: it read a
    value that was not finite before the step). `passed_on`: ops that carried it further, first ones first.
    `hidden`: every gradient is finite, because a later op made finite (and wrong) values of it.
    """

    phase: str
    module: str
    module_class: str
    op: str
    aten: str
    location: OpLocation
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    origin: bool
    cause: Cause
    cures: tuple[Cure, ...]
    spoiled: Spoiled
    reached: tuple[str, ...]
    passed_on: tuple[str, ...] = ()
    underflow: bool = False
    hidden: str = ""

    @property
    def where(self) -> str:
        """Module and source line in one phrase."""
        return self.placed.removeprefix("in ")

    @property
    def placed(self) -> str:
        """`where` after an op: `in 2, train.py:9` or `outside any module, train.py:7`."""
        line = self.location.where
        return within(self.module, self.module_class) + (f", {line}" if line else "")

    @property
    def harmless(self) -> bool:
        """Whether only the present loss scale is too large for it: a dynamic one skips and goes on, lower.

        True where a replay with a lower scale was finite (or could not be tried) and nothing spoiled outlives
        the skipped step.
        """
        lowered = any(c.kind == "loss_scale" and c.status != FAILS for c in self.cures)
        return self.phase == "backward" and lowered and not self.underflow and not self.spoiled.lasting

    def same_as(self, other: BadOp | None) -> bool:
        """Whether both have one origin: phase, module, op, source line and kind of cause."""
        return other is not None and self._origin() == other._origin()

    def _origin(self) -> tuple[Any, ...]:
        return self.phase, self.module, self.op, self.location.where, self.cause.kind

    def story(self) -> str:
        """The verdict in a few lines of plain text, without the cures."""
        verb = "flushes to zero" if self.underflow else "is the first op that is not finite"
        shapes = ", ".join(map(str, self.inputs))
        lines = [f"{self.phase}: {self.op} {self.placed} {verb}"]
        if self.location.code:
            lines.append(f"  {self.location.code}")
        lines += [f"  inputs: {shapes}", f"  cause: {self.cause.text}", f"  spoiled: {self.spoiled}"]
        lines += [f"  hidden: {self.hidden}"] if self.hidden else []
        return "\n".join(lines)

    def summary(self) -> str:
        """The verdict in a few lines of plain text."""
        return "\n".join([self.story(), *(f"  cure ({c.status}): {c.text}" for c in self.cures)])

    def __str__(self) -> str:
        return self.summary()


@dataclass
class Trace:
    """What one traced step showed. `counts`: how often (phase, op, dtype) ran; `bad`: None if all is well;
    `collectives`: by which kernels ranks talked to each other, and what DDP still expects.
    """

    bad: BadOp | None
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
        trace.bad = _try_cures(trace, step, batch, parts, snapshot.restore)
    trace.seconds = time.perf_counter() - started
    if trace.error is not None and trace.bad is None:
        raise trace.error
    return trace


def first_bad_op(step: Callable[..., Any], *batch: Any, **parts: Any) -> BadOp | None:
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


def _verdict(tape: Tape, parts: StepParticipants, spoiled: Spoiled, batch: Any) -> BadOp | None:
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
    cause = _outside(node, tape, parts, batch) if node.outside else _inside(node, tape, parts)
    cures = tuple(propose(node, cause, parts, tape.root_amax))
    carried = tuple(
        dict.fromkeys(
            f"{n.phase}: {n.op} in {n.location.module or 'root'}"
            for n in tape.passed
            if node.index in n.origins
        )
    )
    return _bad_op(node, cause, cures, spoiled, ends, carried[:12])


def _from_elsewhere(tape: Tape, spoiled: Spoiled) -> BadOp | None:
    """This rank's own gradients were finite and what the optimizer read was not: another rank's were not."""
    read = [n for n in tape.candidates.values() if n.outside and n.phase in ("backward", "optimizer")]
    if not read or world_size() == 1:
        return None
    cause = Cause("rank", _ELSEWHERE)
    outputs = tuple(TensorInfo.of(t) for t in read[0].outside[:1])
    here = OpLocation("", "", None, "", 0)
    args = ("backward", "", "", "all_reduce", "c10d.allreduce", here, (), outputs, False, cause, (), spoiled)
    return BadOp(*args, reached=("gradients of this rank",))


def _hidden(tape: Tape, parts: StepParticipants, spoiled: Spoiled) -> BadOp | None:
    """Range overflows that a later op turned into finite values, so that nothing at the end tells of them."""
    for swallower, origins in tape.swallowed:
        real = sorted(i for i in origins if i in tape.candidates and not tape.candidates[i].intended)
        if not real or tape.candidates[real[0]].outside:
            continue
        node = tape.candidates[real[0]]
        cause = explain(node, tape.originals)
        if cause.kind == "range":
            bad = _bad_op(node, cause, tuple(propose(node, cause, parts)), spoiled, ())
            place = swallower.location.where
            text = f"{swallower.op}{f' ({place})' if place else ''} makes it finite again; the loss is finite"
            return replace(bad, hidden=text)
    return None


def _bad_op(
    node: Node,
    cause: Cause,
    cures: tuple[Cure, ...],
    spoiled: Spoiled,
    ends: tuple[str, ...],
    carried: tuple[str, ...] = (),
    underflow: bool = False,
) -> BadOp:
    inputs = tuple(TensorInfo.of(t) for t in node.given())
    outputs = tuple(TensorInfo.of(t) for t in node.outs)
    location = node.location
    return BadOp(
        node.phase, location.module, location.module_class, node.op, node.aten, location, inputs, outputs,
        not node.outside, cause, cures, spoiled, ends, carried, underflow,
    )  # fmt: skip


def _inside(node: Node, tape: Tape, parts: StepParticipants) -> Cause:
    """Why the op's result is not finite, in the terms of what the user gave it: inputs, weights, the loss."""
    cause = explain(node, tape.originals)
    if cause.kind != "range":
        return cause
    named = {id(p): (n, p) for kind, n, p in _named_values(parts) if kind == "parameter"}
    outlier = outlying_weight(node, list(named.values()), tape.originals)
    if outlier is not None:
        return replace(cause, text=f"{cause.text}; {outlier.text}", weight=outlier.name)
    large = {n: float(amax(t)) for n, t in node.names.items() if t.is_floating_point()}
    name = max(large, key=lambda n: large[n], default="")
    if name and large[name] > 1e3 and node.phase != "backward":
        return replace(cause, text=f"{cause.text}; {name} reaches {large[name]:.3g}")
    return cause


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


def _unseen(spoiled: Spoiled, ends: tuple[str, ...]) -> BadOp:
    """Something ended up not finite and no op on the tape did it."""
    cause = Cause(
        "machine",
        "no op that Python dispatched gave a value that is not finite: a kernel outside PyTorch, or memory "
        "written by someone else",
    )
    phase = "optimizer" if all(e.startswith(("parameter", "state")) for e in ends) else "backward"
    location = OpLocation("", "", None, "", 0)
    return BadOp(phase, "", "", "unknown", "", location, (), (), False, cause, (), spoiled, ends)


def _underflow(worst: Flushed, parts: StepParticipants, spoiled: Spoiled) -> BadOp:
    cause = Cause("precision", worst.text, None, worst.format)
    return _bad_op(
        worst.node, cause, worst.cures(parts), spoiled, tuple(f"gradient {n}" for n in worst.lost), (), True
    )


def _try_cures(
    trace: Trace,
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    parts: StepParticipants,
    restore: Callable[[], None],
) -> BadOp | None:
    """The bad op with its cures tried: by all ranks where the step made them talk, else by this one."""
    bad = trace.bad
    underflow = bad is not None and bad.underflow

    def trials(underflow: bool) -> Trials:
        def look() -> bool:
            again = _run(step, batch, parts, underflow, 1 << 28)
            return again.error is None and again.bad is None

        in_forward = bad is not None and bad.phase == "forward" and not trace.collectives
        lowest = lowest_scale(parts) if in_forward else None
        return Trials(lambda: step(*batch), look, restore, lowest)

    if world_size() == 1 or not trace.collectives:
        return bad and replace(bad, cures=try_alone(bad.cures, trials(underflow)))
    everyone = gather(_told(trace), parts.group)
    together = TrialsTogether(everyone, trials(any(told.underflow for told in everyone)), parts)
    judged = together.run()
    if bad is not None and bad.cause.kind == "rank":
        return _with_others(bad, everyone, judged)
    return bad and replace(bad, cures=judge(bad.cures, together.status_of))


def _told(trace: Trace) -> ReplayReport:
    """What the other ranks need to know of this one's replay."""
    bad = trace.bad
    through = trace.error is None or isinstance(trace.error, LossScaleCollapsed)
    known = can_rehearse(trace.collectives)
    if bad is None or bad.cause.kind == "rank":
        return ReplayReport(through=through, known=known)
    story = f"{bad.phase}: {bad.op} {bad.placed}: {bad.cause.text}"
    return ReplayReport(story, tuple(plain(c) for c in bad.cures), bad.underflow, through, known)


def _with_others(bad: BadOp, everyone: Sequence[ReplayReport], judged: Sequence[tuple[Cure, ...]]) -> BadOp:
    """The verdict of a rank whose own step was well, with what the others found."""
    rank = next((i for i, told in enumerate(everyone) if told.story), None)
    if rank is None:
        text = (
            "the gradients of every rank were finite and what the step read was not: it comes from the "
            "reduction over ranks, or from before the step"
        )
        return replace(bad, cause=Cause("unknown", text))
    text = f"rank {rank} found the first bad op: {everyone[rank].story}"
    unique = {c.text: replace(c, apply=None, variants=()) for cures in judged for c in cures}
    return replace(bad, cause=replace(bad.cause, text=text), cures=tuple(unique.values()))
