"""What running again tells of a run: its bad steps under the tape, and which cures work, by one judge.

`Rerun` is a way to run again: in a copy of the running process, or in a fresh process. The judge asks either
the same questions in the same order, so that the verdict does not depend on the way.
"""

from __future__ import annotations

from typing import Any, Protocol

from halfstep.doctor.document import CureFound, Fault
from halfstep.doctor.order import Again, Seen, Suspect

WORKS, FAILS = "works", "does not help"

#: Faults of one run that are traced; bad steps, and steps that seem well, that are looked at for them.
_FAULTS, _TRACES, _GLANCES = 3, 6, 3
#: Steps that must be well after a bad one for a cure of it to work.
_AFTER = 3
#: Cures that may have to be in place from the start of the run.
FROM_START = ("bf16", "masters", "rate")


class Rerun(Protocol):
    """A way to run part of a run again."""

    def run(self, again: Again) -> Seen | None:
        """What that showed; None where it could not be run."""
        ...


class Inquiry:
    """Looks at steps of a run again; `seen` holds the faults, the counts of ops and what lint found."""

    def __init__(self, rerun: Rerun, steps: int, seen: Seen | None = None) -> None:
        self.seen = Seen() if seen is None else seen
        self.notes: list[str] = []
        self._rerun, self._steps = rerun, steps
        self._looks = {True: 0, False: 0}

    def look(self, suspect: Suspect) -> bool:
        """Tapes a step and tries the cures of what it shows; whether the step needs no other look."""
        enough = self._looks[suspect.bad] >= (_TRACES if suspect.bad else _GLANCES)
        if enough or (suspect.bad and len(self.seen.faults) >= _FAULTS):
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
        for cure in fault.cures:
            again = Again(suspect.index, more=more, taped=suspect.index if taped else None)
            self._judge(cure, fault, again)

    def try_from_start(self, fault: Fault, index: int, whole: bool) -> None:
        """Tries the cures that need a run of their own; `whole`: to the end of the run."""
        taped = index if fault.underflow or fault.hidden else None
        more = 0 if taped is not None else self._steps if whole else _AFTER
        for cure in fault.cures:
            if cure.status == "untried" and cure.specs and cure.specs[0][0] in FROM_START:
                self._judge(cure, fault, Again(index, more=more, taped=taped, from_start=True))

    def _judge(self, cure: CureFound, fault: Fault, again: Again) -> None:
        """Tries the doses of a cure until one works, and writes down what came of it."""
        for spec in cure.specs:
            status, behind = judge(spec, fault, again, self._rerun)
            if status != WORKS and spec[0] == "bf16" and not again.from_start:
                continue  # what was made before stays in fp16: a run from the start tells
            cure.status = status or cure.status
            if behind is not None and not any(behind.same_as(other) for other in self.seen.faults):
                behind.behind = True
                self.seen.faults.append(behind)
            if status == WORKS:
                cure.settle(spec)
                return


def judge(spec: tuple[Any, ...], fault: Fault, again: Again, rerun: Rerun) -> tuple[str, Fault | None]:
    """Whether a cure works, and the other fault that comes to light with it in place, if any.

    It works where what is run again stays well, if need be at the lowest loss scale, or where another fault
    is the next. Empty where it could not be tried.
    """
    again = _with(again, spec)
    tried = rerun.run(again)
    if tried is None or not tried.applied:
        return "", None
    if again.from_start and any(_alike(found, fault) for found in tried.faults):
        return FAILS, None
    if tried.bad_at is None:
        return WORKS, None
    if tried.bad_at == again.at:
        if fault.phase != "forward" or not tried.falls or spec[0] in FROM_START:
            return FAILS, None
        lowest = rerun.run(_with(again, ("lowest scale", *spec)))
        well = lowest is not None and lowest.applied and lowest.bad_at is None
        return (WORKS if well else FAILS), None
    traced = rerun.run(_with(again, spec, tried.bad_at))
    second = traced.faults[0] if traced is not None and traced.faults else None
    if second is None or second.same_as(fault) or (fault.weight and second.weight == fault.weight):
        return FAILS, None
    return WORKS, second


def _with(again: Again, spec: tuple[Any, ...], taped: int | None = None) -> Again:
    if taped is None:
        return Again(again.at, spec, again.more, again.taped, again.from_start)
    return Again(again.at, spec, taped - again.at, taped, again.from_start)


def _alike(one: Fault, other: Fault) -> bool:
    """Whether a fault is still there; the next op of a line may have taken over from the first."""
    return (one.phase, one.module, one.cause.kind) == (other.phase, other.module, other.cause.kind)
