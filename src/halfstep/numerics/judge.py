"""Whether a cure works, and what is asked of a run: one judge for every way to run a step again.

`Rerun` is such a way: in place, in a copy of the process, in a fresh process, on all ranks together. The
judge asks each the same questions in the same order. `Inquiry` looks at the bad steps of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from halfstep.numerics.fault import FAILS, UNTRIED, WORKS, Cure, Fault, Spec

#: Cures that may have to be in place from the start of the run.
FROM_START = ("bf16", "masters", "rate")
#: Cures that change one op where it stands.
OF_AN_OP = ("full", "full_here", "scale", "epsilon", "clamp")


@dataclass(frozen=True)
class Again:
    """What to run again: the step with index `at` and `more` steps after it.

    `cure`: what to put in place just before that step, or (`from_start`) at the start of the run. `taped`:
    the index of a step to tape. `seconds`: after how long a copy is ended.
    """

    at: int = 0
    cure: Spec | None = None
    more: int = 0
    taped: int | None = None
    from_start: bool = False
    seconds: float = 30.0


@dataclass
class Seen:
    """What running again showed. `bad_at`: the first step from `at` on that was bad; None if all were well.

    `applied`: whether the cure was put in place and met what it changes; `falls`: whether the loss scale goes
    down by itself. `faults`: what the tape showed; of a run that was cured from its start, all faults.
    `steps`: how many were run with the cure.
    """

    faults: list[Fault] = field(default_factory=list[Fault])
    counts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    lint: list[Any] = field(default_factory=list[Any])
    bad_at: int | None = None
    applied: bool = True
    falls: bool = False
    steps: int = 1


class Rerun(Protocol):
    """A way to run steps again."""

    def run(self, again: Again) -> Seen | None:
        """What that showed; None where it could not be run."""
        ...


def try_cures(fault: Fault, again: Again, rerun: Rerun) -> list[Fault]:
    """Tries all cures of a fault, and writes down what came of each; the faults found behind them.

    Where no change to the step works alone and another fault shows behind the first, both are cured together.
    """
    behind = [try_cure(cure, fault, again, rerun) for cure in fault.cures]
    if not any(cure.status == WORKS and cure.specs[0][0] not in FROM_START for cure in fault.cures):
        pair = _with_a_second(fault, again, rerun)
        fault.cures = [*fault.cures, *([pair] if pair is not None else [])]
    return [found for found in behind if found is not None]


def try_cure(cure: Cure, fault: Fault, again: Again, rerun: Rerun) -> Fault | None:
    """Tries the doses of a cure until one works, and writes down what came of it.

    Returns the other fault that came to light with it in place, if any.
    """
    for spec in cure.specs:
        status, over, behind = judge(spec, fault, again, rerun)
        if status == WORKS:
            cure.settle(spec, over)
            return behind
        if spec[0] in FROM_START and not again.from_start:
            continue  # what was made before it stays as it was: only a run from the start refutes it
        cure.status = status or cure.status
    return None


def _with_a_second(fault: Fault, again: Again, rerun: Rerun) -> Cure | None:
    """A cure of one op, of which alone another op of the step leaves its range, together with one of that."""
    first = next((c for c in fault.cures if c.status == FAILS and c.specs[-1][0] in OF_AN_OP), None)
    if first is None:
        return None
    spec = first.specs[-1]
    seen = rerun.run(replace(again, cure=spec, more=0, taped=again.at))
    second = seen.faults[0] if seen is not None and seen.faults else None
    if second is None or second.same_as(fault):
        return None
    for other in second.cures:
        for more in (more for more in other.specs if more[0] in OF_AN_OP):
            both = ("both", spec, more)
            status, over, _ = judge(both, fault, again, rerun)
            if status == WORKS:
                text, code = f"{first.text}, and {other.text}", f"{first.code}; {other.code}"
                return Cure(first.kind, text, code, WORKS, [both], over=over)
    return None


def judge(spec: Spec, fault: Fault, again: Again, rerun: Rerun) -> tuple[str, int, Fault | None]:
    """Whether a dose works, in how many steps, and the other fault that comes to light with it, if any.

    It works where what is run again stays well, if need be at the lowest loss scale, or where another fault
    is the next. Empty where it could not be tried.
    """
    tried = rerun.run(replace(again, cure=spec))
    if tried is None or not tried.applied:
        return "", 0, None
    if again.from_start:
        well = tried.bad_at is None and not any(_alike(found, fault) for found in tried.faults)
        return (WORKS if well else FAILS), tried.steps, None
    if tried.bad_at is None:
        return WORKS, tried.steps, None
    if tried.bad_at == again.at:
        if fault.phase != "forward" or not tried.falls or spec[0] in FROM_START:
            return FAILS, 0, None
        lowest = rerun.run(replace(again, cure=("both", ("lowest scale",), spec)))
        well = lowest is not None and lowest.applied and lowest.bad_at is None
        return (WORKS if well else FAILS), 0 if lowest is None else lowest.steps, None
    traced = rerun.run(replace(again, cure=spec, more=tried.bad_at - again.at, taped=tried.bad_at))
    second = traced.faults[0] if traced is not None and traced.faults else None
    weight = fault.cause.weight
    if second is None or second.same_as(fault) or (weight and second.cause.weight == weight):
        return FAILS, 0, None
    return WORKS, tried.bad_at - again.at, second


def _alike(one: Fault, other: Fault) -> bool:
    """Whether a fault is still there; the next op of a line may have taken over from the first."""
    return (one.phase, one.module, one.cause.kind) == (other.phase, other.module, other.cause.kind)


#: Faults of one run that are traced; bad steps, and steps that seem well, that are looked at for them.
_FAULTS, _TRACES, _GLANCES = 3, 6, 3
#: Steps that must be well after a bad one for a cure of it to work.
_AFTER = 3


@dataclass(frozen=True)
class Suspect:
    """A step to look at again: its index, its iteration, what was bad (nothing: it is only worth a look), and
    whether it left something lasting that is not finite."""

    index: int
    number: int
    bad: str = ""
    spoiled: bool = False


class Inquiry:
    """Looks at steps of a run again; `seen` holds the faults, the counts of ops and what lint found."""

    def __init__(self, rerun: Rerun, steps: int, seen: Seen | None = None) -> None:
        self.seen = Seen() if seen is None else seen
        self.notes: list[str] = []
        self._rerun, self._steps = rerun, steps
        self._looks: Counter[str] = Counter()

    def look(self, suspect: Suspect) -> bool:
        """Tapes a step and tries the cures of what it shows; whether the step needs no other look."""
        enough = self._looks[suspect.bad] >= (_TRACES if suspect.bad else _GLANCES)
        known = [fault for fault in self.seen.faults if not fault.of_the_scale]
        if enough or (suspect.bad and len(known) >= _FAULTS):
            return True
        found = self._rerun.run(Again(suspect.index, taped=suspect.index))
        if found is None or not found.counts:
            self.notes = ["the traced run did not reach that step: the script is not deterministic"]
            return False
        self._looks[suspect.bad] += 1
        if not self.seen.counts:
            self.seen.counts, self.seen.lint = found.counts, found.lint
        for fault in found.faults:
            self._keep(suspect, fault)
        if suspect.bad and not found.faults:
            text = "was bad in the first run and not when it was traced: nondeterminism, or a compiled region"
            self.notes = [f"step {suspect.number + 1} {text} that differs from eager"]
        return bool(found.faults) or not suspect.bad

    def _keep(self, suspect: Suspect, fault: Fault) -> None:
        known = self.seen.faults
        twin = next((other for other in known if fault.same_as(other)), None)
        if twin is not None and not twin.behind:
            return
        if twin is not None:  # found behind a cure before; here it is on its own
            known.remove(twin)
        known.append(fault)
        taped = not suspect.bad or fault.underflow or bool(fault.hidden)
        more = max(0, min(self._steps - suspect.number - 1, 2 * _AFTER if suspect.spoiled else _AFTER))
        again = Again(suspect.index, more=more, taped=suspect.index if taped else None)
        self._add_behind(try_cures(fault, again, self._rerun))

    def try_from_start(self, fault: Fault, index: int, whole: bool) -> None:
        """Tries the cures that need a run of their own; `whole`: to the end of the run."""
        taped = index if fault.underflow or fault.hidden else None
        more = 0 if taped is not None else self._steps if whole else _AFTER
        for cure in fault.cures:
            if cure.status == UNTRIED and cure.specs and cure.specs[0][0] in FROM_START:
                try_cure(cure, fault, Again(index, more=more, taped=taped, from_start=True), self._rerun)

    def _add_behind(self, faults: Sequence[Fault]) -> None:
        for behind in faults:
            if not any(behind.same_as(other) for other in self.seen.faults):
                behind.behind = True
                self.seen.faults.append(behind)
