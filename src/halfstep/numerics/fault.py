"""A fault of a training step as data: where, why, what it corrupted, what cures it; and how cures are judged.

The tape and the notes of a run find faults; warnings, the doctor's document and its report show them. All
share these values, which can be pickled and describe themselves in words.

`judge` decides whether a cure works, in the same way for every way to run a step again. `Rerun` is such a
way: in place, in a copy of the process, in a fresh process, on all ranks together. `Investigation` reruns the
bad steps of a run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from halfstep.formats import dtype_name
from halfstep.numerics.cause import Cause
from halfstep.numerics.histogram import amax
from halfstep.numerics.remedies.base import FAILS, UNTRIED, WORKS, Both, Cure, Remedy
from halfstep.numerics.remedies.loss import LowestLossScale
from halfstep.numerics.tape import OpLocation


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in words: dtype, shape, largest magnitude (inf or NaN where it is not finite)."""

    dtype: str
    shape: tuple[int, ...]
    amax: float

    @classmethod
    def of(cls, t: Tensor) -> TensorInfo:
        """Describe `t`."""
        largest = abs(float(amax(t))) if t.is_floating_point() or t.is_complex() else 0.0
        return cls(dtype_name(t.dtype), tuple(t.shape), largest)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Corrupted:
    """What is not finite after the step and was before it, by name."""

    gradients: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    optimizer_state: tuple[str, ...] = ()

    @property
    def lasting(self) -> tuple[str, ...]:
        """Return what stays corrupted after the step, or when it is skipped: everything but the gradients."""
        return (*self.parameters, *self.buffers, *self.optimizer_state)

    def __str__(self) -> str:
        named = {
            "optimizer states" if k == "optimizer_state" else k: names for k, names in vars(self).items()
        }
        more = {kind: ", ..." if len(names) > 3 else "" for kind, names in named.items()}
        parts = (f"{len(n)} {kind} ({', '.join(n[:3])}{more[kind]})" for kind, n in named.items() if n)
        return ", ".join(parts) or "nothing"


#: What of a fault is told in JSON as it is.
_PLAIN = (
    "step", "phase", "module", "op", "where", "code", "module_class", "aten", "harmless", "origin",
    "underflow", "hidden", "rank",
)  # fmt: skip


@dataclass
class Fault:
    """A fault: the op at which values stopped being finite (or, `underflow`, became zero), or a step at which
    the notes of a run show that it went wrong (no `aten` then).

    `step`: from 0. `phase`: prepare, forward, backward, recompute or optimizer. `op`: as the op table names
    it; `aten`: the kernel. `origin`: finite in, not finite out (False: it read a value that was not finite
    before the step). `passed_on`: ops that carried it further, first ones first. `hidden`: every gradient is
    finite, because a later op made finite (and wrong) values of it. `harmless`: only the present loss scale
    was too large, and it goes down by itself. `masked_by`: a fault with whose cure in place alone it shows.
    `led_to`: what came of it at a later step. `rank`: where, of several.
    """

    phase: str
    op: str
    location: OpLocation
    cause: Cause
    cures: list[Cure] = field(default_factory=list[Cure])
    step: int = 0
    aten: str = ""
    origin: bool = True
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    corrupted: Corrupted = Corrupted()
    reached: tuple[str, ...] = ()
    passed_on: tuple[str, ...] = ()
    underflow: bool = False
    hidden: str = ""
    harmless: bool = False
    masked_by: Fault | None = None
    led_to: Fault | None = None
    rank: int | None = None
    taped: bool = True

    @property
    def module(self) -> str:
        """Return the path in the model; empty for the root and outside."""
        return self.location.module

    @property
    def module_class(self) -> str:
        """Return the module's class."""
        return self.location.module_class

    @property
    def where(self) -> str:
        """Return the user's source line: `train.py:9`."""
        return self.location.where

    @property
    def code(self) -> str:
        """Return the text of that line."""
        return self.location.code

    @property
    def place(self) -> str:
        """Return rank (of several), module and source line in one phrase."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        kind = f" ({self.module_class})" if self.module_class else ""
        module = f"{self.module}{kind}" if self.module else ""
        return ", ".join(part for part in (rank, module, self.where) if part) or "the script"

    @property
    def damage(self) -> str:
        """Return what became nonfinite in the step, the loss if nothing else did."""
        return "the loss" if self.corrupted == Corrupted() and "loss" in self.reached else str(self.corrupted)

    @property
    def of_the_scale(self) -> bool:
        """Whether only the current loss scale is too large, and nothing corrupted outlives the step.

        True where a run with a lower scale was finite, or could not be tried.
        """
        lowered = any(c.kind == "loss_scale" and c.status != FAILS for c in self.cures)
        other_damage = self.underflow or self.hidden or self.corrupted.lasting
        return self.phase == "backward" and lowered and not other_damage

    @property
    def best(self) -> Cure | None:
        """Return the first cure that works, else the first that was not tried."""
        works = (c for c in self.cures if c.status == WORKS)
        return next(works, next((c for c in self.cures if c.status == UNTRIED), None))

    def same_as(self, other: Fault | None) -> bool:
        """Whether both have one origin: phase, module, op, source line and kind of cause."""
        return other is not None and self._origin == other._origin

    @property
    def _origin(self) -> tuple[Any, ...]:
        return self.phase, self.module, self.op, self.where, self.cause.kind

    def story(self) -> str:
        """Return the verdict in a few lines of plain text, without the cures."""
        code = [f"  {self.code}"] if self.code else []
        cause = f"  cause: {self.cause.words}"
        if not self.taped:
            place, last = f" in {self.where}" if self.where else "", self.led_to
            lines = [f"{self.phase}: {self.op or 'the update'}{place}", *code, cause]
            if last is not None:
                lines += [
                    f"  then: step {last.step + 1}: {last.phase}: {last.op} in {last.place} is not finite"
                ]
            return "\n".join(lines)
        verb = "flushes to zero" if self.underflow else "is the first op that is not finite"
        lines = [f"{self.phase}: {self.op} {self.location.phrase} {verb}", *code]
        lines += [f"  inputs: {', '.join(map(str, self.inputs))}", cause, f"  spoiled: {self.damage}"]
        return "\n".join([*lines, *([f"  hidden: {self.hidden}"] if self.hidden else [])])

    def summary(self) -> str:
        """Return the verdict in a few lines of plain text."""
        return "\n".join([self.story(), *(f"  {cure}" for cure in self.cures)])

    def __str__(self) -> str:
        return self.summary()

    def as_dict(self) -> dict[str, Any]:
        """Return the fault as plain values: a row of the doctor's JSON."""
        return {name: getattr(self, name) for name in _PLAIN} | {
            "behind": self.masked_by is not None,
            "cause": {"kind": self.cause.kind, "text": self.cause.words, "times": self.cause.times},
            "cures": [cure.as_dict() for cure in self.cures],
            "summary": self.story(),
            "inputs": [{"what": str(t), "amax": t.amax} for t in self.inputs],
            "outputs": [{"what": str(t), "amax": t.amax} for t in self.outputs],
            "spoiled": self.damage,
            "spoiled_lasting": list(self.corrupted.lasting),
            "reached": list(self.reached),
            "passed_on": list(self.passed_on),
            "weight": self.cause.weight,
        }


@dataclass(frozen=True)
class RerunRequest:
    """A request to rerun the step with index `at` and `more` steps after it.

    `cure`: what to apply just before that step, or (`from_start`) at the start of the run. `taped`:
    the index of a step to tape. `raises`: whether the script raises at that step without a cure.
    """

    at: int = 0
    cure: Remedy | None = None
    more: int = 0
    taped: int | None = None
    from_start: bool = False
    raises: bool = False


@dataclass
class RerunResult:
    """The result of a rerun. `bad_at`: the first step from `at` on that was bad, `at` where the loss blew
    up; None if all were well.

    `applied`: whether the cure was put in place and met what it changes; `falls`: whether the loss scale goes
    down by itself; `recovers`: whether all that was bad is one skipped update, before others that were made.
    `faults`: what the tape showed; of a run that was cured from its start, all faults. `steps`: how many were
    run with the cure. `error`: what the script raised, in words. `losses`: those of the steps before it.
    `low`: whether an op gave values in 16 bits.
    """

    faults: list[Fault] = field(default_factory=list[Fault])
    counts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    lint: list[Any] = field(default_factory=list[Any])
    bad_at: int | None = None
    applied: bool = True
    falls: bool = False
    recovers: bool = False
    steps: int = 1
    error: str = ""
    losses: list[float | None] = field(default_factory=list[float | None])
    low: bool = False


class Rerun(Protocol):
    """A way to run steps again."""

    def run(self, request: RerunRequest) -> RerunResult | None:
        """Return the result; None where it could not be run."""
        ...


def try_cures(fault: Fault, request: RerunRequest, rerun: Rerun, rest: int = 0) -> list[Fault]:
    """Try all cures of a fault, record the result of each, and return the faults found behind them.

    The first that works is tried for the `rest` of the steps; where these are few, each is. Where no change
    to the step works alone and another fault shows behind the first, both are cured together.
    """
    masked = list[Fault | None]()
    for cure in fault.cures:
        cure_proven = min(rest, max((other.over for other in fault.cures), default=0)) > _FEW
        longer = request if cure_proven else replace(request, more=max(request.more, rest))
        masked.append(try_cure(cure, fault, longer, rerun))
    if not any(cure.status == WORKS and cure.doses[0].scope != "run" for cure in fault.cures):
        pair = _with_a_second(fault, request, rerun)
        fault.cures = [*fault.cures, *([pair] if pair is not None else [])]
    return [other for other in masked if other is not None]


def try_cure(cure: Cure, fault: Fault, request: RerunRequest, rerun: Rerun) -> Fault | None:
    """Try the doses of a cure until one works, and record the result.

    Returns the other fault that appeared with the cure applied, if any.
    """
    for dose in cure.doses:
        status, steps, masked = judge(dose, fault, request, rerun)
        if status == WORKS:
            cure.mark_working(dose, steps)
            return masked
        if dose.scope == "run" and not request.from_start:
            continue  # what was made before it stays as it was: only a run from the start refutes it
        cure.status = status or cure.status
    return None


def _with_a_second(fault: Fault, request: RerunRequest, rerun: Rerun) -> Cure | None:
    """Combine a cure with one for the op that leaves its range once the first is applied."""
    first = next((c for c in fault.cures if c.status == FAILS and c.doses[-1].scope == "op"), None)
    if first is None:
        return None
    dose = first.doses[-1]
    second = _trace_again(dose, request, rerun, request.at)
    if second is None or second.same_as(fault):
        return None
    for other in second.cures:
        for more in (more for more in other.doses if more.scope == "op"):
            text, code = f"{first.text}, and {other.text}", f"{first.code}; {other.code}"
            both = Both(dose, more, text=text, code=code)
            status, steps, _ = judge(both, fault, request, rerun)
            if status == WORKS:
                return Cure(first.kind, text, code, WORKS, [both], steps)
    return None


def judge(dose: Remedy, fault: Fault, request: RerunRequest, rerun: Rerun) -> tuple[str, int, Fault | None]:
    """Return whether a dose works, in how many steps, and the other fault that appears with it, if any.

    It works where what is run again stays well, if need be at the lowest loss scale or but for one skipped
    update, or where another fault is the next. Empty where it could not be tried.
    """
    tried = rerun.run(replace(request, cure=dose))
    if tried is None or not tried.applied:
        return "", 0, None
    if request.from_start:
        steps = tried.steps if tried.bad_at is None else tried.bad_at
        well = tried.bad_at is None or steps > request.at + _AFTER
        return (WORKS if well and not any(alike(f, fault) for f in tried.faults) else FAILS), steps, None
    if tried.bad_at is None:
        return WORKS, tried.steps, None
    if tried.error and not request.raises:  # as where it may not write: what it did before counts
        well = tried.bad_at - request.at
        return (WORKS, well, None) if well >= _AFTER else ("", 0, None)
    if tried.bad_at == request.at:
        of_values = fault.phase == "forward" or fault.cause.kind == "mathematics"
        if not of_values or dose.scope == "run":
            return FAILS, 0, None
        if tried.falls:
            lowest = rerun.run(replace(request, cure=Both(LowestLossScale(), dose)))
            well = lowest is not None and lowest.applied and lowest.bad_at is None
            return (WORKS if well else FAILS), 0 if lowest is None else lowest.steps, None
        skipped = (
            None if request.more and not tried.recovers else _trace_again(dose, request, rerun, request.at)
        )
        if skipped is None or not skipped.of_the_scale or skipped.same_as(fault):
            return FAILS, 0, None
        return (WORKS if tried.recovers else ""), tried.steps, None
    second = _trace_again(dose, request, rerun, tried.bad_at)
    weight = fault.cause.weight
    if second is None or second.same_as(fault) or (weight and second.cause.weight == weight):
        return FAILS, 0, None
    return WORKS, tried.bad_at - request.at, second


def _trace_again(dose: Remedy, request: RerunRequest, rerun: Rerun, index: int) -> Fault | None:
    """Return the fault of a step with a cure applied."""
    rerun_result = rerun.run(replace(request, cure=dose, more=index - request.at, taped=index))
    return rerun_result.faults[0] if rerun_result is not None and rerun_result.faults else None


def alike(fault: Fault, other: Fault) -> bool:
    """Whether two faults are one; the next op of the same line counts as the first."""
    return (fault.phase, fault.module, fault.cause.kind) == (other.phase, other.module, other.cause.kind)


#: Faults of one run that are traced; bad steps, and steps that seem well, that are looked at for them.
_FAULTS, _TRACES, _GLANCES = 3, 6, 3
#: Steps that are looked at besides, for averages that begin later and sums that stand still late; after the
#: first of them by copies only.
LATER = (3, 40, 400, 4000)
#: Steps that must be well after a bad one for a cure of it to work; with the first that does, so many; few.
_AFTER, _REST, _FEW = 3, 40, 16


@dataclass(frozen=True)
class SuspectStep:
    """A step to look at again: its index, its iteration, what was bad (nothing: it is only worth a look), and
    whether it left something lasting that is not finite."""

    index: int
    number: int
    bad: str = ""
    lasting_damage: bool = False


class Investigation:
    """Looks at steps of a run again; `rerun_result` holds the faults, the counts of ops and what lint
    found, `unchecked_steps` those that need another look than this one could give."""

    def __init__(self, rerun: Rerun, steps: int, rerun_result: RerunResult | None = None) -> None:
        self.rerun_result = RerunResult() if rerun_result is None else rerun_result
        self.unchecked_steps: list[SuspectStep] = []
        self.notes: list[str] = []
        self._rerun, self._steps = rerun, steps
        self._reruns: Counter[str] = Counter()

    def rerun(self, suspect: SuspectStep) -> None:
        """Tape a step and try the cures of its fault."""
        later = not suspect.bad and suspect.index in LATER
        if later and self.rerun_result.counts and not self.rerun_result.low:
            return
        enough = self._reruns[suspect.bad] >= (_TRACES if suspect.bad else _GLANCES) and not later
        faults = [fault for fault in self.rerun_result.faults if not fault.of_the_scale]
        if enough or (suspect.bad and len(faults) >= _FAULTS):
            return
        rerun_result = self._rerun.run(RerunRequest(suspect.index, taped=suspect.index))
        if rerun_result is not None:
            self.rerun_result.low |= rerun_result.low
        if later:
            self.unchecked_steps += [suspect] if rerun_result is None and suspect.index == LATER[0] else []
            found = [] if rerun_result is None else rerun_result.lint
            self.rerun_result.lint = list(dict.fromkeys([*self.rerun_result.lint, *found]))
            return
        if rerun_result is not None and suspect.bad == "error" and not rerun_result.faults:
            return  # what a script raises is no matter of numbers, as a rule
        if rerun_result is None or not rerun_result.counts or (suspect.bad and not rerun_result.faults):
            self.unchecked_steps.append(suspect)
        if rerun_result is None or not rerun_result.counts:
            if suspect.bad != "error":
                why = "the traced run did not reach that step: the script is not deterministic"
                error = "" if rerun_result is None else rerun_result.error
                self.notes = [f"step {suspect.number + 1} could not be run again: {error}" if error else why]
            return
        self._reruns[suspect.bad] += 1
        if not self.rerun_result.counts:
            self.rerun_result.counts, self.rerun_result.lint = rerun_result.counts, rerun_result.lint
        for fault in rerun_result.faults:
            self._keep(suspect, fault, rerun_result)
        if suspect.bad and not rerun_result.faults:
            text = "was bad in the first run and not when it was traced: nondeterminism, or a compiled region"
            self.notes = [f"step {suspect.number + 1} {text} that differs from eager"]

    def _keep(self, suspect: SuspectStep, fault: Fault, rerun_result: RerunResult) -> None:
        faults = self.rerun_result.faults
        twin = next((other for other in faults if fault.same_as(other)), None)
        if twin is not None and twin.masked_by is None:
            return
        if twin is not None:  # found behind a cure before; here it is on its own
            faults.remove(twin)
        faults.append(fault)
        taped = not suspect.bad or fault.underflow or bool(fault.hidden)
        rest = max(0, self._steps - suspect.number - 1)
        more = min(rest, 2 * _AFTER if suspect.lasting_damage else _AFTER)
        request = RerunRequest(
            suspect.index, more=more, taped=suspect.index if taped else None, raises=bool(rerun_result.error)
        )
        rest = 0 if rerun_result.falls and fault.of_the_scale else min(rest, _REST)
        for masked in try_cures(fault, request, self._rerun, rest):
            if not any(masked.same_as(other) for other in faults):
                masked.masked_by = fault
                faults.append(masked)

    def try_from_start(self, fault: Fault, index: int, whole: bool) -> None:
        """Try the cures that need a run of their own; `whole`: to the end of the run."""
        taped = index if fault.underflow or fault.hidden else None
        more = 0 if taped is not None else self._steps if whole else min(self._steps - index, _REST)
        for cure in fault.cures:
            if cure.status == UNTRIED and cure.doses and cure.doses[0].scope == "run":
                try_cure(
                    cure, fault, RerunRequest(index, more=more, taped=taped, from_start=True), self._rerun
                )
