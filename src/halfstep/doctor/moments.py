"""When a run is held, and what its copies are asked: to tape a step, to try a cure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from halfstep.doctor.checkpoints import Moment, can_fork
from halfstep.doctor.document import Fault
from halfstep.doctor.order import Job, Traced
from halfstep.numerics.cures import lowest_scale

if TYPE_CHECKING:
    from halfstep.doctor.examiner import Examiner

#: Looks at steps in which something fell silent.
_LOOKS = 2
#: Steps that must be well after a bad one for a cure of it to help.
_AFTER = 3
#: What holding steps may cost: seconds, and beyond them a share of the run.
_GRACE, _SHARE = 0.5, 0.15


class Moments:
    """When a run is held, and what its copies are asked."""

    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner
        self._may = examiner.order.copies and can_fork()
        self._moment: Moment | None = None
        self._signed = False
        self._held_at = 0
        self._glances = 0
        self._began = time.monotonic()
        self._spent = 0.0

    def at_start(self) -> None:
        """Something was made before the first step."""
        self._hold()

    def on_begin(self) -> None:
        """A step begins: hold it, unless its batch is still with a worker."""
        self._signed = False
        if not _loads_with_workers() and self._may_spend():
            self._hold()
        self._begin_job()

    def _may_spend(self) -> bool:
        """Whether another hold keeps their share of the run's time small."""
        return self._spent < _GRACE + _SHARE * (time.monotonic() - self._began)

    def on_sign(self) -> bool:
        """The step shows itself; whether the tape was armed just now."""
        if self._signed:
            return False
        self._signed = True
        examiner = self._examiner
        if examiner.done == 0 or _loads_with_workers():
            self._hold()
        taping = examiner.taping
        self._begin_job()
        if examiner.order.armed == examiner.done:
            examiner.arm()
        return taping is None and examiner.taping is not None

    def _begin_job(self) -> None:
        """In a copy, or a run that cannot be copied: arm the tape where the step is the one to tape."""
        examiner = self._examiner
        job = examiner.job
        examiner.cure_from_start()
        if job is not None and examiner.done == job.at and (job.kind == "trace" or job.tape):
            examiner.arm()
        elif examiner.order.armed is not None and 0 < examiner.done == examiner.order.armed:
            examiner.arm()  # at step 0 the first sign arms it

    def _hold(self) -> None:
        examiner = self._examiner
        wanted = examiner.job is None or examiner.job.kind == "go_on"
        if not self._may or not wanted or examiner.order.armed is not None:
            return
        self.close()
        began = time.monotonic()
        moment = Moment()
        job = moment.hold()
        if job is not None:
            self._may = job.kind == "go_on"
            self._moment, self._spent = None, 0.0
            examiner.become(job)
            self._begin_job()
            return
        self._moment, self._held_at = moment, examiner.done
        self._spent += time.monotonic() - began

    def close(self) -> None:
        """Let go of the moment that is held."""
        if self._moment is not None:
            self._moment.close()
            self._moment = None

    def _ask(self, job: Job) -> Traced | None:
        if self._moment is None:
            return None
        found = self._moment.ask(job)
        return found if isinstance(found, Traced) else None

    def glance(self, index: int) -> None:
        """Tape a step that seems well: which op runs in which dtype, the lint, and overflows that hide."""
        examiner = self._examiner
        if self._glances > _LOOKS or self._moment is None or self._held_at > index:
            return
        self._glances += 1
        found = self._ask(Job("trace", index))
        if found is None:
            return
        if not examiner.traced.counts:
            examiner.traced.counts, examiner.traced.lint = found.counts, found.lint
        for fault in found.faults:
            self._keep(index, fault, tape=True)

    def trace(self, index: int) -> None:
        """Tape a bad step and try the cures of what it shows."""
        found = self._ask(Job("trace", index))
        if found is None:
            return
        examiner = self._examiner
        if not examiner.traced.counts:
            examiner.traced.counts, examiner.traced.lint = found.counts, found.lint
        for fault in found.faults:
            self._keep(index, fault, tape=fault.underflow or bool(fault.hidden))

    def _keep(self, index: int, fault: Fault, tape: bool) -> None:
        known = self._examiner.traced.faults
        twin = next((other for other in known if fault.same_as(other)), None)
        if twin is not None and not twin.behind:
            return
        if twin is not None:  # found behind a cure before; here it is on its own
            known.remove(twin)
        known.append(fault)
        if self._examiner.job is not None:
            return
        for cure in fault.cures:
            for spec in cure.specs:
                status = self._try(index, spec, tape, fault)
                if spec[0] == "bf16" and status != "works":
                    continue  # what was made before stays in fp16 here: a run from the start tells
                cure.status = status or cure.status
                if status == "works":
                    cure.settle(spec)
                    break

    def _try(self, index: int, spec: tuple[Any, ...], tape: bool, fault: Fault) -> str:
        """Whether a cure works, by a copy of the run with it in place; empty where it cannot be tried."""
        ledger = self._examiner.ledger
        note = ledger.notes[index] if index < self._examiner.done else ledger.now
        spoiled = note.spoiled or note is ledger.now
        left = self._examiner.order.steps - note.number - 1
        more = min(left, 2 * _AFTER if spoiled else _AFTER)
        tried = self._ask(Job("trial", index, spec, more, tape))
        if tried is None or not tried.applied:
            return ""
        if tried.well:
            return "works"
        if tried.bad_at == index:
            return "works" if self._settles(index, spec, more, tape, fault) else "does not help"
        behind = self._ask(Job("go_on", index, spec, more))
        second = behind.faults[0] if behind is not None and behind.faults else None
        if second is None or second.same_as(fault) or (fault.weight and second.weight == fault.weight):
            return "does not help"
        if not any(second.same_as(other) for other in self._examiner.traced.faults):
            second.behind = True
            self._examiner.traced.faults.append(second)
        return "works"

    def _settles(self, index: int, spec: tuple[Any, ...], more: int, tape: bool, fault: Fault) -> bool:
        """Whether a cure helps in forward and what is left is the loss scale's, which goes down by itself."""
        if (
            fault.phase != "forward"
            or spec[0] == "bf16"
            or lowest_scale(self._examiner.roster.parts()) is None
        ):
            return False
        again = self._ask(Job("trial", index, ("lowest scale", *spec), more, tape))
        return again is not None and again.applied and again.well


def _loads_with_workers() -> bool:
    import multiprocessing

    return bool(multiprocessing.active_children())
