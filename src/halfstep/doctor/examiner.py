"""Watches a script from inside its process, step by step, and has the steps that matter taped.

A step begins where the one before it ended (or, with workers that load data, at its first forward or
autocast region, so that its batch is there already), and ends where a Session, a GradScaler or an optimizer
is stepped; one that the script drops, since a value that it read was not finite, ends where the next begins,
or with the script. Where the process can be copied, it is forked at the beginning of each step. A copy runs
the step again under the tape, and again with each cure. A run started to run a step again does as much
from the moment at which that step begins. `Participants` knows who takes part.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import sys
import time
import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from halfstep.doctor.document import STEPS
from halfstep.doctor.ledger import (
    Ledger,
    Note,
    all_faults,
    judge_targets,
    length,
    options_of_groups,
    read_amaxes,
)
from halfstep.doctor.owners import Owners
from halfstep.doctor.process import SECONDS, ForkPoint, Order, StopScript, in_words
from halfstep.names import fqn
from halfstep.numerics.fault import LATER, Investigation, RerunRequest, RerunResult, SuspectStep
from halfstep.numerics.histogram import amax as largest_of
from halfstep.numerics.lint import Audit, LintProbe, audit
from halfstep.numerics.remedies.base import Cure, Met, always
from halfstep.numerics.remedies.bf16 import FP16
from halfstep.numerics.remedies.terms import LOOPS, terms_of
from halfstep.numerics.snapshot import StepParticipants, is_session, scale_of, with_prefixes
from halfstep.numerics.tape import call_site, running_loop, users_names
from halfstep.numerics.trace import Taping
from halfstep.numerics.watch import Watch, watch
from halfstep.optim.loading import find_zero_moments
from halfstep.session.prepare import prepare
from halfstep.torch_private import disable_current_modes
from halfstep.trees import parameters_of


class ApexScale:
    """The first loss scale of `halfstep.compat.apex.amp`, with the interface of a GradScaler."""

    frontend = "apex"

    def __init__(self, amp: Any) -> None:
        self.state_dict, self.load_state_dict = amp.state_dict, amp.load_state_dict

    def is_enabled(self) -> bool:
        """Return True: there is one once amp.initialize has run."""
        return True

    def get_scale(self) -> float:
        """Return the current scale."""
        return float(self.state_dict()["loss_scaler0"]["loss_scale"])

    def update(self, new_scale: float) -> None:
        """Set another scale."""
        state = self.state_dict()
        state["loss_scaler0"]["loss_scale"] = new_scale
        self.load_state_dict(state)


def scale_of_apex() -> ApexScale | None:
    """Return the loss scale of `compat.apex.amp`, if the script has initialised it."""
    amp = sys.modules.get("halfstep.compat.apex.amp")
    return ApexScale(amp) if amp is not None and amp.state_dict() else None


class Participants:
    """The models, optimizers, scalers and schedulers of a script, recorded as they are made or used."""

    def __init__(self) -> None:
        self._parts = StepParticipants(None)
        self.things: list[Any] = []
        self._met = set[nn.Module]()
        self._names: dict[int, str] = {}
        self._initially_nonfinite: frozenset[str] = frozenset()

    @property
    def parts(self) -> StepParticipants:
        """Return all of them, as the tape and the cures want them."""
        if self._parts.session is None and self._parts.scaler is None:
            self.add(scale_of_apex())
        return self._parts

    def add(self, thing: Any) -> None:
        """Record a model, an optimizer or another object with state; of scalers the last one counts."""
        if thing is not None and all(thing is not other for other in self.things):
            first = is_session(thing) or hasattr(thing, "get_scale")
            self.things.insert(0 if first else len(self.things), thing)
            loop, self._parts = self._parts.loop, StepParticipants(None, self.things)
            self._parts.loop, self._parts.prepare = loop or running_loop(LOOPS), prepare

    def meet(self, module: nn.Module) -> bool:
        """Record a called module with weights or buffers, a model or part of one; say whether it is new."""
        if module in self._met:
            return False
        self._met.add(module)
        modules = (m for root in self.things if isinstance(root, nn.Module) for m in root.modules())
        if all(module is not m for m in modules) and (*module.parameters(), *module.buffers()):
            inside = {*module.modules()}
            self.things = [t for t in self.things if not (isinstance(t, nn.Module) and t in inside)]
            self.add(module)
            with disable_current_modes():
                self._initially_nonfinite |= self._nonfinite_names()
            return True
        return False

    @property
    def models(self) -> list[nn.Module]:
        """Return the models that have weights."""
        return [m for m in self._parts.models if next(m.parameters(), None) is not None]

    def is_root(self, module: nn.Module) -> bool:
        """Whether the script itself calls this module, and it has weights."""
        return any(module is t for t in self.things) and next(module.parameters(), None) is not None

    def _nonfinite_names(self) -> frozenset[str]:
        """Return the names of parameters and buffers that are not finite."""
        values = {
            n: t for kind, n, t in self._parts.named_values() if kind != "state" and t.is_floating_point()
        }
        amaxes = zip(values, read_amaxes(list(values.values())))
        return frozenset(name for name, amax in amaxes if not math.isfinite(amax))

    def became_nonfinite(self) -> bool:
        """Whether a parameter or buffer became nonfinite after its model was first called."""
        return not self._nonfinite_names() <= self._initially_nonfinite

    def scale(self) -> float:
        """Return the current loss scale."""
        return float(scale_of(self.parts.session, self.parts.scaler))

    def name_of(self, thing: nn.Module | Tensor) -> str:
        """Return the path of a module (with its class) or parameter; its class if no known model holds it."""
        if id(thing) not in self._names:
            for prefix, model in with_prefixes(self.models):
                for name, module in model.named_modules():
                    path = f"{prefix}{fqn(name)}".rstrip(".")
                    self._names[id(module)] = f"{path} ({type(module).__name__})" if path else "the model"
                for name, p in model.named_parameters():
                    self._names[id(p)] = prefix + fqn(name)
        return self._names.get(id(thing), type(thing).__name__)

    @property
    def by_hand(self) -> bool:
        """Whether the script has no optimizer, so that it updates weights by hand."""
        parts = self.parts
        return not parts.optimizers and parts.session is None and parts.scaler is None


class Examiner:
    """Follows a script: writes the ledger, watches the model, traces steps that go wrong."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.participants = Participants()
        self.ledger = Ledger()
        self.watch: Watch | None = None
        self.request = order.request
        self.active_request: RerunRequest | None = None  # once it is reached
        self.rerun_result = RerunResult()
        self.around = ExitStack()
        self.taping: Taping | None = None
        self.output_dtypes = set[torch.dtype]()
        self.ended_by = "script"
        self.audit = Audit()
        self._steps = order.steps or sys.maxsize
        self._lint = LintProbe()
        self._copied = 0.0
        """When this process became a copy; 0 in the run itself."""
        self._signed = False
        self._evaluated = False
        self._owner: object = self
        """What was stepped last."""
        self.took_effect: Met | None = None
        """Of a cure that is in place: whether it met what it changes."""
        self._copies = ForkPoint(self)
        self.investigation = Investigation(self._copies, self._steps)
        self._before: list[Tensor] = []
        self._updated = weakref.WeakSet[torch.optim.Optimizer]()
        self.owners = Owners(self.ledger, self.participants.name_of, self.participants.scale)
        self._parameters: list[Tensor] | None = None

    @property
    def done(self) -> int:
        """Return how many optimizer steps have ended; alternating optimizers share one iteration."""
        return len(self.ledger.notes)

    def _over(self) -> bool:
        """Whether the last step was done, of a rerun or of the iterations that were asked for."""
        request = self.request
        if request is not None:
            whole = request.from_start and self.ledger.now.number >= self._steps
            late = self._copied and time.monotonic() - self._copied > SECONDS / 3
            return self.done > request.at + request.more or whole or bool(late)
        return self.ledger.now.number >= self._steps

    # What the hooks report.

    def on_made(self, thing: Any) -> None:
        """Record a new optimizer, schedule, scaler or session."""
        self.participants.add(thing)
        if isinstance(thing, torch.optim.Optimizer | torch.amp.GradScaler):
            self.owners.on_made(thing)
        if self.done == 0 and not isinstance(thing, LRScheduler):
            self._copies.fork_here()

    def on_sign(self, module: nn.Module | None = None) -> None:
        """Begin a step if none has begun: a region opens or a model is called."""
        if module is not None:
            met = self.participants.meet(module)
            if met and self.taping is not None:
                with disable_current_modes():
                    self.taping.begin_with(self.participants.parts)
        if not self._signed:
            self._signed = True
            if self.done == 0 or multiprocessing.active_children():
                self._copies.fork_here()
                self._go_on()

    def on_evaluation(self) -> None:
        """Record a forward without gradients."""
        self._evaluated = True

    def on_read(self) -> None:
        """Record that the script read a value that is not finite; before a forward it is the last step's."""
        self.ledger.now.read = self.ledger.now.read or self._signed or self._evaluated

    def on_new_forward(self) -> None:
        """End the step that the script dropped, as the model is called for the next."""
        if self._note_dropped() and self._signed:
            self.on_step(self._owner, skipped=True, finite=True)

    def _note_dropped(self) -> bool:
        """Whether the last that the script did with this step was to read a value that is not finite."""
        now = self.ledger.now
        dropped = now.read and now.bad != "error"
        if dropped:
            self.ledger.blame("loss" if now.loss is None else "gradient")
            now.loss = math.nan if now.loss is None else now.loss
            if self.taping is not None:
                self._end_tape(dropped=True)
        now.read = False
        return dropped

    def _begin(self) -> None:
        """Begin the next step; with workers that load its batch, only at its first forward or region."""
        self._signed = self._evaluated = False
        if not multiprocessing.active_children():
            self._copies.fork_here(freely=False)
            self._go_on()
        self._watch()

    def _watch(self) -> None:
        """Watch the model from now on: at the first backward, when model and optimizer usually exist."""
        parts, models = self.participants.parts, self.participants.models
        if self.watch is not None and self.done == 24 * self.watch.every:
            self.watch.every *= 2  # of a long run fewer steps are enough
        whole_run = self.request is None or self.request.from_start  # not the notes of some steps
        if self.watch is None and whole_run and models:
            what = parts.session if parts.session is not None else parts.optimizers
            every = max(1, self.order.steps // 12)
            self.watch = watch(models[0], what, every=every, scaler=parts.scaler)
            self.watch.step = self.done
            self.audit = audit(models, parts.optimizers)

    def _go_on(self) -> None:
        """Apply the cure and start the tape if this step is to be run again."""
        request = self.request
        if request is not None and self.active_request is None:
            first = min(1, request.at) if request.from_start else request.at
            if self.done >= first:
                self._reach(request)
        if self.active_request is not None and self.active_request.taped == self.done and self.taping is None:
            parts = self.participants.parts
            self._lint = LintProbe(parts.session, parts.models)
            first = self.done not in LATER
            self.taping = Taping(parts, underflow=first, observers=[self._lint.observe])

    def on_inputs(self, names: dict[str, Tensor]) -> None:
        """Record the inputs of a model."""
        floats = {n: t for n, t in names.items() if t.is_floating_point() and t.numel()}
        for name, amax in zip(floats, read_amaxes(list(floats.values()))):
            now = self.ledger.now
            if amax > now.inputs.get(name, 0.0) and floats[name].dim():
                rows = floats[name].detach().abs().reshape(len(floats[name]), -1).amax(1)
                now.rows[name] = int(rows.argmax())
            now.inputs[name] = max(amax, now.inputs.get(name, 0.0))

    def on_loss(self, loss: Tensor) -> None:
        """Record the loss as backward begins."""
        self._watch()
        self.ledger.now.read = False
        scale = self.participants.scale()
        value = float(loss.detach())
        self.ledger.now.loss, self.ledger.now.scale = value / scale, scale
        if not math.isfinite(value):
            self.ledger.blame("loss")

    def on_backward(self, roots: list[Tensor], weighted: bool) -> None:
        """Record gradients before a backward; `weighted`: whether it is given what to begin with."""
        if self._parameters is None:
            self._parameters = self.participants.parts.parameters()
        self.owners.before_backward(roots, weighted, self._parameters)

    def on_targets(self, loss: str, targets: Tensor) -> None:
        """Note targets that this loss is not made for."""
        text, do, code = judge_targets(loss, targets)
        if text:
            name = next(iter(users_names([targets])), "targets")
            where, cure = call_site()[1:], Cure("data", do, code.format(name))
            self.ledger.report(loss, where, "data", text, cure, 1 if "binary" in loss else 3, "forward")

    def on_output(self, module: nn.Module, out: Tensor) -> None:
        """Record the result of a module without submodules."""
        name, amax = self.participants.name_of(module), float(largest_of(out))
        now, finite = self.ledger.now, math.isfinite(amax)
        if not finite or amax >= now.outputs.get(name, 0.0):
            now.outputs[name] = amax
        if amax == 0.0 or not finite:
            now.silent = now.silent or name

    def on_update(self, optimizer: torch.optim.Optimizer, by_scaler: bool, searches: bool) -> None:
        """Record weights and gradients before an optimizer updates; `searches`: it runs backward itself."""
        self.participants.add(optimizer)
        _, file, line = call_site()
        now = self.ledger.now
        now.where = file, line
        now.rates = tuple(float(g["lr"]) for g in optimizer.param_groups if "lr" in g)
        schedules = (
            s for s in self.participants.things if isinstance(s, LRScheduler) and s.optimizer is optimizer
        )
        now.schedule = ", ".join(dict.fromkeys(type(s).__name__ for s in schedules))
        now.options = options_of_groups(optimizer)
        updated = parameters_of(optimizer)
        if not searches:
            now.again = self.owners.on_update(optimizer, by_scaler, now.where)
        stale = (p for p in updated if p in self.owners.stale and p.grad is not None)
        now.stale = now.stale or next((self.participants.name_of(p) for p in stale), "")
        self.on_gradients(updated)
        if optimizer not in self._updated:
            self._updated.add(optimizer)
            now.flushed = next((words for _, words in find_zero_moments(optimizer)), now.flushed)
        self._before = [p.detach().clone() for p in updated]

    def on_stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Record gradients before a step that may be skipped."""
        learning = [p for p in parameters_of(optimizer) if p.grad is not None]
        amaxes = zip(learning, read_amaxes([p.grad for p in learning if p.grad is not None]))
        self.ledger.now.nonfinite |= {
            self.participants.name_of(p) for p, amax in amaxes if not math.isfinite(amax)
        }

    def on_gradients(self, updated: list[Tensor]) -> None:
        """Record the gradients of these parameters before the update."""
        now = self.ledger.now
        learning = [p for p in updated if p.grad is not None]
        amaxes = self.on_found([p.grad for p in learning if p.grad is not None])
        now.gradients |= {self.participants.name_of(p): amax for p, amax in zip(learning, amaxes)}

    def on_found(self, gradients: list[Tensor]) -> list[float]:
        """Record the largest magnitudes of gradients of this step."""
        now = self.ledger.now
        amaxes = read_amaxes([g for g in gradients if isinstance(g, Tensor)])
        now.gradient = max(now.gradient, max(amaxes, default=0.0))
        if not all(map(math.isfinite, amaxes)):
            now.gradient = math.inf
            self.ledger.blame("gradient")
        if any(amax == 0.0 for amax in amaxes):
            now.silent = now.silent or "a gradient"
        return amaxes

    def on_updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what an optimizer's update did."""
        now = self.ledger.now
        now.taken = True
        after = parameters_of(optimizer)
        self.owners.on_updated(optimizer)
        now.flushed = now.flushed or self._find_zero_moments(optimizer, after)
        pairs = zip(self._before, after)
        scalars = (p for p in after if p.numel() == 1 and p.requires_grad)
        now.scalars |= {self.participants.name_of(p): float(p.detach()) for p in scalars}
        now.update += length(new.detach() - old for old, new in pairs if old.shape == new.shape)
        now.size += length(self._before)
        self._before = []

    def on_cleared(self, owner: Any) -> None:
        """Record a `zero_grad` of an optimizer or a module."""
        self.owners.on_cleared(owner.parameters() if isinstance(owner, nn.Module) else parameters_of(owner))

    def _find_zero_moments(self, optimizer: torch.optim.Optimizer, updated: list[Tensor]) -> str:
        """Describe second moments that are zero in fp16 where most gradients are not."""
        lost = learning = 0
        for p in updated:
            squares = optimizer.state.get(p, {}).get("exp_avg_sq")
            if isinstance(squares, Tensor) and squares.dtype == FP16 and p.grad is not None:
                lost += int(((squares == 0) & (p.grad != 0)).sum())
                learning += int((p.grad != 0).sum())
        return f"{lost} of {learning} second moments are zero in fp16" if 2 * lost > learning else ""

    def on_step(self, owner: object, skipped: bool, finite: bool) -> None:
        """End a step."""
        now, self._owner, self._parameters = self.ledger.now, owner, None
        optimizer = owner if isinstance(owner, torch.optim.Optimizer) else None
        owner = owner if optimizer is None else next(iter(parameters_of(optimizer)), owner)  # one made anew
        self.ledger.number(owner)
        if self.taping is not None:
            self._end_tape()
        if self.participants.became_nonfinite():
            self.ledger.blame("parameter")
            now.lasting_damage = True
        if skipped or not finite:
            self.ledger.blame("gradient")
        if now.taken and now.bad == "gradient" and now.update == 0.0 and not now.lasting_damage:
            now.taken, skipped = False, True  # an optimizer that was told to do nothing, as Apex does
        now.skipped = skipped
        if skipped and optimizer is not None:
            now.again = self.owners.on_skipped(optimizer)
        if self.participants.parts.session is None:
            self.owners.on_step(self.participants.models, self.participants.parts.optimizers, now.where)
        if skipped and self.watch is not None and self.participants.parts.session is None:
            self.watch.note_skip()
        note = self.ledger.close(owner)
        self._judge(note, self.done - 1)
        if self._over():
            self.leave()
        self._begin()

    def _judge(self, note: Note, index: int) -> None:
        """Have the step that just ended rerun, if it may show something new."""
        if self.request is not None:
            return
        before = self.ledger.notes[index - 1] if index else Note(0)
        run = sum(1 for _ in itertools.takewhile(lambda note: note.bad, reversed(self.ledger.notes)))
        other = note.bad != before.bad or not note.nonfinite <= before.nonfinite or run & (run - 1) == 0
        another = not before.bad or (before.skipped and other)  # what is corrupted stays so
        if (note.bad and another) or (not note.bad and (index in (1, *LATER) or note.silent)):
            self.investigation.rerun(SuspectStep(index, note.number, note.bad, note.lasting_damage))

    def leave(self) -> None:
        """Leave after the last step. A copy ends here, without the rest of the script."""
        if self._copied:
            self.report_result()
        self.ended_by = STEPS
        raise StopScript

    def report_result(self) -> None:
        """Report the result of a rerun. A copy ends with that."""
        request, result = self.active_request, self.rerun_result
        assert request is not None
        bad = [
            index for index, note in enumerate(self.ledger.notes)
            if note.bad
            and (index >= request.at or (request.from_start and not self.ledger.is_recovered(index)))
        ]  # fmt: skip
        bad += [] if request.taped is None or not result.faults else [request.taped]
        result.recovers = bool(bad) and not result.faults and self.ledger.only_skipped(min(bad))
        exact = request.cure is None or request.cure.keeps_updates
        bad += [] if exact or not self.ledger.blew_up(request.at) else [request.at]
        result.bad_at = min(bad, default=None)
        result.applied = self._apply_cure(request)
        failures = (index for index in bad if not (result.recovers and self.ledger.only_skipped(index)))
        result.steps = min(failures, default=len(self.ledger.notes)) - (
            0 if request.from_start else request.at
        )
        if request.from_start:
            result.faults = all_faults(self.complete_ledger(), result.faults)
        self._copies.send_and_exit(self.rerun_result)

    def complete_ledger(self) -> Ledger:
        """Return the ledger, completed by what the watch and the tape hold."""
        self.owners.conclude()
        if self.watch is not None:
            self.watch.collect()
            self.ledger.lost = [*self.watch.lost]
        self.ledger.terms = terms_of(
            self.participants.parts, in_region=self.participants.parts.scaler is not None
        )
        return self.ledger

    def _apply_cure(self, request: RerunRequest) -> bool:
        """Whether the cure under trial was applied, and met what it is to change."""
        if request.cure is None:
            return True
        dtypes = {p.dtype for p in self.participants.parts.parameters()} | self.output_dtypes
        if request.cure.removes in dtypes:
            return False
        return self.took_effect is not None and self.took_effect()

    def run_as_copy(self, request: RerunRequest) -> None:
        """Continue as a copy that was forked to run steps again."""
        self.request, self._copied = request, time.monotonic()
        self._go_on()

    def _reach(self, request: RerunRequest) -> None:
        """Apply the cure as the steps to run again begin."""
        self.active_request = request
        self.ledger.notes = self.ledger.notes[:]
        for note in self.ledger.notes:
            note.bad = ""
        if self.watch is not None and not request.from_start:
            self.watch.close()
            self.watch = None
        parts = self.participants.parts
        self.rerun_result.falls = parts.scale_falls
        if request.cure is None or self.took_effect is not None:
            return
        self.output_dtypes.clear()
        self.took_effect = request.cure.apply(parts, self.around)
        if self.took_effect is None:
            self.rerun_result.applied = False
            self._copies.send_and_exit(self.rerun_result)
            raise StopScript
        request.cure.replace_names(self.around)

    def begin_with(self, request: RerunRequest, stack: ExitStack) -> None:
        """Apply what a cure changes before the script begins."""
        if request.from_start and request.cure is not None and request.cure.replace_names(stack):
            self.took_effect = always

    # The tape.

    def _end_tape(self, error: BaseException | None = None, dropped: bool = False) -> None:
        taping, self.taping = self.taping, None
        assert taping is not None
        taping.tape.batch = f"batch {self.ledger.now.number + 1}"
        trace = taping.end(self.participants.parts, error, dropped=dropped)
        self.rerun_result.counts = trace.rows()
        self.rerun_result.low = self._lint.low
        self.rerun_result.lint = list(dict.fromkeys(self._lint.list_findings()))
        if trace.bad is not None:
            trace.bad.step = self.ledger.now.number
            self.rerun_result.faults.append(trace.bad)

    def on_end(self, error: BaseException | None = None) -> None:
        """Record that the script is over, by an error or maybe in a step that it dropped."""
        index, now = self.done, self.ledger.now
        if error is not None:
            now.bad = "error"
        dropped = self._note_dropped()
        if error is not None:
            self.rerun_result.error = in_words(error, self.ledger.iterations)
        if self.taping is not None:
            self._end_tape(error)
        if self.active_request is not None or (dropped and self._signed):  # an evaluation is no step
            self.ledger.notes += [now] if now.bad else []
        if error is not None and self.request is None:
            self.investigation.rerun(SuspectStep(index, now.number, bad="error", lasting_damage=True))
        elif dropped:
            self._judge(now, index)
        if self.active_request is not None:
            self.report_result()
        else:  # a copy that did not come so far
            self.rerun_result.applied = False
            self._copies.send_and_exit(self.rerun_result)
        self._copies.close()
        if self.watch is not None:
            self.watch.close()
