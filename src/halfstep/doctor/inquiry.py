"""What is asked of a run: its bad steps, run again under the tape, and again with each cure."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.doctor.order import Suspect
from halfstep.numerics.fault import UNTRIED, Fault
from halfstep.numerics.judge import FROM_START, Again, Rerun, Seen, try_cure, try_cures

#: Faults of one run that are traced; bad steps, and steps that seem well, that are looked at for them.
_FAULTS, _TRACES, _GLANCES = 3, 6, 3
#: Steps that must be well after a bad one for a cure of it to work.
_AFTER = 3


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
