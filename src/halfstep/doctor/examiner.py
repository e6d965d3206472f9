"""Watches a script from inside its process, step by step, and has the steps that matter taped.

A step begins where the one before it ended (or, with workers that load data, at its first forward or
autocast region, so that its batch is there already), and ends where a Session, a GradScaler or an optimizer
is stepped. Where the process can be copied, each step's beginning is held as a `Moment`, from which a copy
runs the step again under the tape, and again with each cure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from halfstep.doctor.checkpoints import answer
from halfstep.doctor.conversions import Conversions
from halfstep.doctor.document import counts_of, fault_of
from halfstep.doctor.ledger import Ledger, knobs_of, length, read_amaxes, unmoved, update_length
from halfstep.doctor.moments import Moments
from halfstep.doctor.order import Job, Order, Traced
from halfstep.doctor.quiet import rate_fault
from halfstep.doctor.roster import Roster
from halfstep.doctor.substitutes import FP16, put_in_place
from halfstep.numerics.locations import look
from halfstep.numerics.snapshot import run_eagerly
from halfstep.numerics.tape import Tape
from halfstep.numerics.trace import Trace, bad_names, finish
from halfstep.numerics.underflow import UnderflowProbe
from halfstep.numerics.watch import Watch, watch

#: Faults of one run that are traced.
_TRACES = 3


class Enough(BaseException):
    """Ends the script after the last step that was asked for."""


def _larger(a: float, b: float) -> float:
    """The larger magnitude; what is not finite counts as largest."""
    return a if not math.isfinite(a) or a > b else b


class Taping:
    """The tape of one step, from when it is armed to the end of the step."""

    def __init__(self, roster: Roster) -> None:
        from halfstep.numerics.lint import LintProbe

        self._roster = roster
        self._lint = LintProbe(roster.session)
        self._probe = UnderflowProbe()
        self._before = bad_names(roster.parts())
        self._around = ExitStack()
        model = roster.models[0] if roster.models else None
        self.tape = Tape(model, observers=[self._probe.look, self._lint.look])
        self._around.enter_context(run_eagerly())
        self.tape.__enter__()

    def end(self, error: BaseException | None = None) -> tuple[Trace, list[Any]]:
        """Closes the tape; the trace of the step and what the lint found."""
        self.tape.__exit__()
        self._around.close()
        trace = finish(self.tape, self._roster.parts(), self._before, None, error, self._probe)
        return trace, self._lint.found()


class Examiner:
    """Runs along with a script: keeps the ledger, watches the model, traces what goes wrong."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.roster = Roster()
        self.ledger = Ledger()
        self.conversions = Conversions()
        self.traced = Traced()
        self.seen: Watch | None = None
        self.job: Job | None = None
        self.limit = 0
        self.around = ExitStack()
        self.taping: Taping | None = None
        self.cured = False
        self.halves = False
        self._took_effect: Callable[[], bool] | None = None
        self._moments = Moments(self)
        self._before: list[Tensor] = []

    @property
    def done(self) -> int:
        """Steps of optimizers that have ended; optimizers that take turns share one iteration."""
        return len(self.ledger.notes)

    def _over(self) -> bool:
        """Whether that was the last step: of a copy's job, or of the iterations that were asked for."""
        if self.job is not None:
            return self.done >= self.limit
        armed = self.order.armed
        return self.ledger.now.number >= self.order.steps and (armed is None or self.done > armed)

    # What the hooks report.

    def on_made(self, thing: Any) -> None:
        """An optimizer, a scaler or a session was made."""
        if isinstance(thing, LRScheduler):
            self.roster.schedules.append(thing)
            return
        if hasattr(thing, "get_scale"):
            self.roster.scaler = thing
        elif isinstance(thing, torch.optim.Optimizer):
            self.roster.add(thing)
        else:
            self.roster.session = thing
        if self.done == 0:
            self._moments.at_start()

    def on_sign(self, module: nn.Module | None = None) -> bool:
        """A step shows that it has begun: a region opens or a model is called; whether a tape knows of it."""
        if module is not None:
            self.roster.meet(module)
        armed = self._moments.on_sign() and module is not None and self.taping is not None
        if armed and module is not None and self.taping is not None:
            self.taping.tape.enter_module(module)
        return armed

    def on_inputs(self, names: dict[str, Tensor]) -> None:
        """What a model is called with."""
        floats = {n: t for n, t in names.items() if t.is_floating_point() and t.numel()}
        for name, amax in zip(floats, read_amaxes(list(floats.values()))):
            now = self.ledger.now
            if amax > now.inputs.get(name, 0.0) and floats[name].dim():
                rows = floats[name].detach().abs().reshape(len(floats[name]), -1).amax(1)
                now.rows[name] = int(rows.argmax())
            now.inputs[name] = max(amax, now.inputs.get(name, 0.0))

    def on_loss(self, loss: Tensor) -> None:
        """Backward begins."""
        scale = self.roster.scale()
        value = float(loss.detach())
        self.ledger.now.loss, self.ledger.now.scale = value / scale, scale
        if not math.isfinite(value):
            self.ledger.blame("loss")

    def on_output(self, module: nn.Module, amax: float) -> None:
        """A module without submodules gave a result."""
        name = self.roster.name_of(module)
        outputs = self.ledger.now.outputs
        outputs[name] = _larger(amax, outputs.get(name, 0.0))
        if amax == 0.0 or not math.isfinite(amax):
            self.ledger.now.silent = self.ledger.now.silent or name

    def on_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to update."""
        self.roster.add(optimizer)
        _, file, line = look()
        now = self.ledger.now
        now.where = file, line
        now.rates = tuple(float(g["lr"]) for g in optimizer.param_groups if "lr" in g)
        now.schedule, now.knobs = self.roster.schedule_of(optimizer), knobs_of(optimizer)
        updated = [p for g in optimizer.param_groups for p in g["params"]]
        self.on_gradients(updated)
        self._before = [p.detach().clone() for p in updated]

    def on_gradients(self, updated: list[Tensor]) -> None:
        """What the gradients of these parameters are as the update begins."""
        now = self.ledger.now
        learning = [p for p in updated if p.grad is not None]
        found = self.on_found([p.grad for p in learning if p.grad is not None])
        now.gradients |= {self.roster.name_of(p): amax for p, amax in zip(learning, found)}

    def on_found(self, gradients: list[Tensor]) -> list[float]:
        """Gradients of this step; their largest magnitudes."""
        now = self.ledger.now
        found = read_amaxes([g for g in gradients if isinstance(g, Tensor)])
        now.gradient = max(now.gradient, max(found, default=0.0))
        if not all(map(math.isfinite, found)):
            now.gradient = math.inf
            self.ledger.blame("gradient")
        if any(amax == 0.0 for amax in found):
            now.silent = now.silent or "a gradient"
        return found

    def on_updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has updated."""
        now = self.ledger.now
        now.taken = True
        after = [p for g in optimizer.param_groups for p in g["params"]]
        now.update += update_length(self._before, after)
        if self.seen is None and any(now.rates):
            now.still = unmoved(self._before, after)
        now.size += length(self._before)
        self._before = []

    def on_step(self, owner: object, skipped: bool, finite: bool) -> None:
        """A step ends."""
        now = self.ledger.now
        named = self.roster.named()
        weights = dict(zip(named, read_amaxes(list(named.values()))))
        for name, amax in weights.items():
            self.ledger.weights.setdefault(name, []).append((self.done, amax))
        if self.roster.fell_ill(weights):
            self.ledger.blame("parameter")
            now.spoiled = True
        if skipped or not finite:
            self.ledger.blame("gradient")
        if now.taken and now.bad == "gradient" and now.update == 0.0 and not now.spoiled:
            now.taken, skipped = False, True  # an optimizer that was told to do nothing, as Apex does
        now.skipped = skipped
        if skipped and self.seen is not None and self.roster.session is None:
            self.seen.note_skip()
        self.ledger.number(owner)
        if self.taping is not None:
            self._end_tape()
        note = self.ledger.close(owner)
        self._judge(self.done - 1, bool(note.bad))
        if self._over():
            self.leave()
        self._begin()

    def _judge(self, index: int, bad: bool) -> None:
        """Has the step that just ended traced, if it tells something new."""
        if self.job is not None and (self.job.kind != "go_on" or index < self.job.at):
            return
        before = bool(index) and bool(self.ledger.notes[index - 1].bad)
        if bad and not before and len(self.traced.faults) < _TRACES:
            self._moments.trace(index)
            if self.job is not None:
                self.reply()
        elif not bad and self.job is None and (index == 1 or self.ledger.notes[index].silent):
            self._moments.glance(index)

    def leave(self) -> None:
        """The last step is done."""
        if self.job is not None:
            self.reply()
        raise Enough

    def reply(self) -> None:
        """In a copy: say what was found, and end."""
        at = self.job.at if self.job is not None else 0
        bad = [index for index, note in enumerate(self.ledger.notes) if note.bad and index >= at]
        self.traced.bad_at = bad[0] if bad else at if self.traced.faults else None
        self.traced.well = self.traced.bad_at is None
        self.traced.applied = self.applied()
        answer(self.traced)

    def applied(self) -> bool:
        """Whether the cure that this run tries was put in place, and met what it is to change."""
        spec = self.order.cure if self.job is None else self.job.spec
        if spec is None:
            return True
        if spec[0] == "bf16" and (self.halves or FP16 in {p.dtype for p in self.roster.named().values()}):
            return False
        if self.job is None and spec[0] == "bf16":
            return True  # asked for before the script began
        return self._took_effect is not None and self._took_effect()

    def _begin(self) -> None:
        """The next step begins."""
        self._moments.on_begin()
        if self.seen is None and self.order.armed is None and self.job is None and self.roster.models:
            roster = self.roster
            what = roster.session if roster.session is not None else roster.optimizers
            every = max(1, self.order.steps // 12)
            self.seen = watch(roster.models[0], what, every=every, scaler=roster.scaler)
            self.seen.step = self.done

    # The tape.

    def arm(self) -> None:
        """Tape the step that begins now."""
        if self.taping is None:
            self.taping = Taping(self.roster)

    def _end_tape(self, error: BaseException | None = None) -> None:
        taping, self.taping = self.taping, None
        assert taping is not None
        taping.tape.batch = f"batch {self.ledger.now.number + 1}"
        trace, lint = taping.end(error)
        self.traced.counts = counts_of(trace.counts)
        self.traced.lint = list(dict.fromkeys(lint))
        if trace.bad is not None:
            fault = fault_of(self.ledger.now.number, trace.bad)
            if trace.bad.phase == "optimizer":
                fault = rate_fault(self.ledger.now) or fault
            self.traced.faults.append(fault)
        if self.job is not None and self.job.kind == "trace":
            self.reply()

    def failed(self, error: BaseException) -> None:
        """The script raised."""
        if self.taping is not None:
            self._end_tape(error)
        elif self.job is None:
            self._moments.trace(self.done)
        if self.job is not None:
            self.ledger.now.bad = "error"
            self.ledger.notes.append(self.ledger.now)
            self.reply()

    def ended(self) -> None:
        """The script is over."""
        if self.taping is not None:
            self._end_tape()
        if self.job is not None:
            self.reply()
        self._moments.close()
        if self.seen is not None:
            self.seen.close()

    def cure_from_start(self) -> None:
        """Put the cure in place that the whole run is to try: before the taped step, else after the first."""
        spec = self.order.cure
        if spec is None or spec[0] == "bf16" or self.cured or self.done < self.order.cure_at:
            return
        if not self.roster.models and not self.roster.optimizers:
            return
        self.cured = True
        self._took_effect = put_in_place(spec, self.roster.parts(), self.around)
        self.halves = False

    def become(self, job: Job) -> None:
        """This process is a copy now, made for a job."""
        self.job = job
        self.limit = job.at + 1 + job.more
        self.traced = Traced()
        self.ledger.notes = self.ledger.notes[:]
        for note in self.ledger.notes:
            note.bad = ""
        if self.seen is not None:
            self.seen.close()
            self.seen = None
        if job.spec is not None:
            self._took_effect = put_in_place(job.spec, self.roster.parts(), self.around)
            self.halves = False
            if self._took_effect is None:
                self.traced.applied = False
                answer(self.traced)
