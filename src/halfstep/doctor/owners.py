"""Who owns the gradients and the updates: what each gradient holds, and who made what steps.

Of each gradient: whether its terms carry the loss scale, how many there are, whether an update has used it,
whether a skipped step left it. Of each optimizer, scaler and schedule: the line that made or stepped it. By
these the mistakes of a loop are found that leave no value that is not finite.
"""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.doctor.ledger import Ledger, read_amaxes
from halfstep.formats import dtype_name
from halfstep.numerics.remedies.base import Cure
from halfstep.numerics.remedies.loop import ClearGradients
from halfstep.numerics.tape import call_site, is_users, users_names
from halfstep.policy.levels import LOW_DTYPES
from halfstep.trees import parameters_of, tensors_in

#: In what a gradient's terms are: times the loss scale, plain, or nobody knows.
SCALED, PLAIN, UNKNOWN = "scaled", "plain", "unknown"
_SCALED = "halfstep.scaled"
#: Ops between a loss and what scaled it; steps in which a thing is seen before it is said.
_NEAR, _OFTEN = 32, 3
#: What was made anew after more steps than this had learned what it could.
_SHORT = 100
#: A rate that fell so far moves no weight, if for this share of the steps.
_FALLEN, _LONG = 1e-4, 1 / 3

Mark = tuple[int, int]
"""Identity and version of a gradient: the same as before, if nobody has written to it."""
Place = tuple[str, int]


def mark_of(gradient: Tensor | None) -> Mark | None:
    """Return the mark of a gradient."""
    return None if gradient is None else (id(gradient), gradient._version)


@dataclass
class Held:
    """What a gradient holds: in which units its terms are, and how many backward passes added one."""

    mark: Mark | None
    units: set[str]
    terms: int = 1


@dataclass
class Life:
    """An optimizer or scaler: the line that made it, its steps, a parameter of it with its version then."""

    kind: str
    made: Place
    steps: int = 0
    stateful: bool = True
    first: Tensor | None = None
    version: int = 0


@dataclass
class Schedule:
    """The rates that a schedule gave, step by step, and the line that stepped it last."""

    kind: str
    optimizer: torch.optim.Optimizer
    rates: list[float] = field(default_factory=list[float])
    where: Place = ("", 0)


def where_made(thing: Any) -> Place:
    """Return the user's line that made a thing, outside of the thing's own `__init__`."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        own = code.co_name == "__init__" and frame.f_locals.get(code.co_varnames[0]) is thing
        if is_users(code.co_filename) and not own:
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _is_scaled(roots: Iterable[Tensor], scale: float) -> bool:
    """Whether a loss comes of `scaler.scale(...)`, or is itself a product with the scale."""
    todo = [t.grad_fn for t in roots if t.grad_fn is not None]
    first = len(todo)
    for place, node in enumerate(todo):
        by_hand = place <= first and node.name() == "MulBackward0" and scale in _factors(node)
        if by_hand or _SCALED in cast(Any, node).metadata:
            return True
        if len(todo) < _NEAR:
            todo += [parent for parent, _ in node.next_functions if parent is not None]
    return False


def _factors(node: Any) -> list[float]:
    """Return the numbers that a product was taken with."""
    try:
        saved = [getattr(node, name, None) for name in ("_saved_self", "_saved_other")]
    except RuntimeError:  # written to since, or freed
        return []
    return [float(t.detach()) for t in saved if isinstance(t, Tensor) and t.numel() == 1]


class Owners:
    """Follows the gradients of a script and who updates by them; its mistakes go to the ledger."""

    def __init__(self, ledger: Ledger, name_of: Callable[[Tensor], str], scale: Callable[[], float]) -> None:
        self._ledger, self._name_of, self._scale = ledger, name_of, scale
        self._held = dict[Tensor, Held]()
        self._spent = dict[Tensor, Mark | None]()
        """The gradients that an update used."""
        self._left = dict[Tensor, Mark | None]()
        """The gradients that are not finite, of a step that was skipped."""
        self._added = dict[Tensor, tuple[int, Place]]()
        """Of these what a backward has added to, and where; it matters if they are stepped by."""
        self.stale = set[Tensor]()
        self._reached, self._starved = Counter[Tensor](), Counter[Tensor]()
        """Steps in which a backward reached a parameter; updates in a row that found no gradient of one."""
        self._reached_now = set[Tensor]()
        self._values, self._suspected = dict[Tensor, Tensor](), False
        self._before, self._unit = dict[Tensor, Mark | None](), PLAIN
        self._uncleared, self._used_before = set[Tensor](), set[Tensor]()
        self._backwards, self._at = 0, dict[torch.optim.Optimizer, int]()
        self._divided = set[torch.optim.Optimizer]()
        """Whose gradients were divided by the loss scale since the scaler's last update."""
        self._scales, self._plain_at, self._plain = False, ("", 0), ""
        self._lives = dict[Any, Life]()
        self._last = dict[tuple[str, Place], Life]()
        self._schedules = dict[Any, Schedule]()

    # Things.

    def on_made(self, thing: Any) -> None:
        """Record who made an optimizer or a scaler."""
        self._lives[thing] = Life(type(thing).__name__, where_made(thing))

    def _on_used(self, thing: Any, optimizer: torch.optim.Optimizer, lost: bool) -> None:
        """Count a step of an optimizer or scaler; note a first one that one of the same line has lost to."""
        life = self._lives.get(thing)
        first = next((p for p in parameters_of(optimizer) if p.grad is not None), None)
        if life is None or first is None:
            return
        key, before = (life.kind, life.made), self._last.get((life.kind, life.made))
        if life.steps == 0 and before is not None and before is not life and lost:
            same = before.first is first and before.version == first._version
            if same and before.stateful and before.steps <= _SHORT:
                what = "its moments" if isinstance(thing, torch.optim.Optimizer) else "its loss scale"
                text = f"{life.kind} is made anew over the same parameters after {before.steps} "
                text += f"step{'s' * (before.steps != 1)}, again and again, and loses {what} each time"
                cure = Cure("advice", f"make the {life.kind} once, before the loop")
                self._ledger.report(life.kind, life.made, "update", text, cure, 2, "prepare")
        life.steps, life.first, life.version = life.steps + 1, first, first._version
        self._last[key] = life

    def on_schedule(self, schedule: Any) -> None:
        """Record the rates that a schedule has set."""
        optimizer = schedule.optimizer
        entry = self._schedules.setdefault(schedule, Schedule(type(schedule).__name__, optimizer))
        entry.rates.append(max((float(g["lr"]) for g in optimizer.param_groups), default=0.0))
        entry.where = call_site()[1:]

    def conclude(self) -> None:
        """Note the schedules under which the rate vanished while each step moved them on."""
        for entry in self._schedules.values():
            life, most = self._lives.get(entry.optimizer), entry.rates[0]
            fallen = [i for i, rate in enumerate(entry.rates) if 0 < rate < _FALLEN * most]
            each_step = life is not None and len(entry.rates) > 0.8 * life.steps > _OFTEN
            if each_step and len(fallen) > _LONG * len(entry.rates) and "Plateau" not in entry.kind:
                text = f"{entry.kind} is stepped after each batch, and the rate fell from {most:g} to "
                text += f"{entry.rates[-1]:.3g} in {len(entry.rates) - 1} steps: nothing is learned by then"
                cure = Cure("advice", "step the schedule once for each epoch, or count its steps in batches",
                            "scheduler.step()  # after the loop over batches")  # fmt: skip
                where, kind = entry.where, "learning rate"
                self._ledger.report("scheduler.step", where, kind, text, cure, step=fallen[0])

    # Gradients.

    def on_scaled(self, outputs: Any) -> None:
        """Record what a scaler returned: a loss that carries the scale."""
        for t in tensors_in(outputs):
            if t.grad_fn is not None:
                self._scales, cast(Any, t.grad_fn).metadata[_SCALED] = True, True

    def before_backward(self, roots: Sequence[Tensor], weighted: bool, parameters: Sequence[Tensor]) -> None:
        """Record what a backward will add to; `weighted`: whether it was given what to begin with."""
        self._before = before = {p: mark_of(p.grad) for p in parameters}
        used = (p for p, mark in before.items() if mark is not None and self._spent.get(p) == mark)
        self._uncleared = {p for p in used if p.grad is not None and bool(p.grad.any())}
        held = [p for p, mark in self._left.items() if mark is not None and before.get(p) == mark]
        self._added |= {p: (id(p.grad), call_site()[1:]) for p in held}
        self._unit = PLAIN
        if weighted or self._scales:
            self._unit = UNKNOWN if weighted else SCALED if _is_scaled(roots, self._scale()) else PLAIN
        if self._unit == PLAIN and self._scales:
            self._plain_at, self._plain = call_site()[1:], next(iter(users_names(roots)), "loss")

    def after_backward(self) -> None:
        """Record what a backward has added to the gradients."""
        self._backwards += 1
        for p, old in self._before.items():
            mark, held = mark_of(p.grad), self._held.get(p)
            if mark is None or mark == old:
                continue
            self._reached_now.add(p)
            self.stale |= {p} & self._uncleared
            if old is None:
                self._held[p] = Held(mark, {self._unit})
            elif held is not None and held.mark == old:
                held.mark, held.terms = mark, held.terms + 1
                held.units.add(self._unit)
            else:
                self._held[p] = Held(mark, {self._unit, UNKNOWN})
        self._find_long_sum(self._before)

    def _find_left(self, optimizer: torch.optim.Optimizer) -> None:
        """Find what a skipped step left, and a backward has added to, in the gradients of a step."""
        left = next((p for p in parameters_of(optimizer) if self._added.get(p, ("",))[0] == id(p.grad)), None)
        if left is not None:
            text = f"the gradient of {self._name_of(left)} still holds what the skipped step before it left, "
            text += "which is not finite: this backward adds to it, and this step is skipped too, and so on"
            where = self._added[left][1]
            cure = ClearGradients(where[1], text="clear the gradients after a skipped step too",
                                  code="optimizer.zero_grad()")  # fmt: skip
            self._ledger.report("backward", where, "accumulation", text, Cure.of(cure))
        for p in parameters_of(optimizer):
            self._added.pop(p, None)

    def _find_long_sum(self, parameters: Iterable[Tensor]) -> None:
        """Find a 16-bit gradient to which more terms are added, one by one, than it can hold."""
        for p in parameters:
            held, gradient = self._held.get(p), p.grad
            if held is None or gradient is None or gradient.dtype not in LOW_DTYPES:
                continue
            if held.terms * torch.finfo(gradient.dtype).eps > 0.5:
                name = dtype_name(gradient.dtype)
                text = f"the gradients of {held.terms} micro-batches are added one by one in {name}, which "
                text += f"rounds the later ones away (as in {self._name_of(p)})"
                cure = Cure("advice", "add them in fp32, and clear the 16-bit gradient after each backward",
                            "master.grad += p.grad.float(); p.grad = None")  # fmt: skip
                self._ledger.report("backward", call_site()[1:], "accumulation", text, cure)
                return

    def on_cleared(self, cleared: Iterable[Tensor]) -> None:
        """Record that gradients were cleared."""
        for p in cleared:
            self.stale.discard(p)
            self._added.pop(p, None)
            self._left.pop(p, None)
            self._held.pop(p, None)
            if p.grad is not None:
                self._held[p] = Held(mark_of(p.grad), set(), 0)

    def _units(self, p: Tensor) -> set[str]:
        """Return in which units the terms of a gradient are; none where somebody else has written to it."""
        held = self._held.get(p)
        known = held is not None and held.mark == mark_of(p.grad) and UNKNOWN not in held.units
        return held.units if held is not None and known else set()

    def before_unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Look whether all gradients of an optimizer are scaled, as a scaler divides them."""
        learning = [p for p in parameters_of(optimizer) if p.grad is not None]
        self._used_before = {p for p in learning if self._spent.get(p) == mark_of(p.grad)}
        if optimizer in self._divided or not self._scales:
            return
        self._divided.add(optimizer)
        plain = next((p for p in learning if PLAIN in self._units(p)), None)
        if plain is not None and self._scale() != 1.0:
            text = "the loss of this backward is not scaled, and the scaler divides its gradients (as of "
            text += f"{self._name_of(plain)}) by the loss scale, {self._scale():g}, all the same"
            cure = Cure("advice", "scale each loss that is passed on to what the scaler steps",
                        f"scaler.scale({self._plain}).backward()")  # fmt: skip
            self._ledger.report("backward", self._plain_at, "loss scale", text, cure, 2)

    def after_unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that gradients are divided by the loss scale."""
        learning = (p for p in parameters_of(optimizer) if p.grad is not None)
        self._held |= {p: Held(mark_of(p.grad), set()) for p in learning}
        self._spent |= {p: mark_of(p.grad) for p in self._used_before}

    def on_scaler_updated(self) -> None:
        """Record that a scaler's round is over."""
        self._divided.clear()

    def on_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Record the gradients that a skipped step leaves; return whether an update by them came before."""
        left = [p for p in parameters_of(optimizer) if p.grad is not None]
        amaxes = zip(left, read_amaxes([p.grad for p in left if p.grad is not None]))
        self._left |= {p: mark_of(p.grad) for p, amax in amaxes if not math.isfinite(amax)}
        return self._at.get(optimizer) == self._backwards

    # Updates.

    def on_scaler_step(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record a step of a scaler, as it begins."""
        self._find_left(optimizer)
        self.before_unscaling(optimizer)
        self._on_used(scaler, optimizer, lost=True)

    def on_update(self, optimizer: torch.optim.Optimizer, by_scaler: bool, place: Place) -> bool:
        """Record an update as it begins; return whether it is the second by the same gradients."""
        updated = parameters_of(optimizer)
        learning = [p for p in updated if p.grad is not None]
        same = all(self._spent.get(p) == mark_of(p.grad) for p in learning)
        again = bool(learning) and same and self._at.get(optimizer) == self._backwards
        scaled = next((p for p in learning if SCALED in self._units(p)), None)
        if scaled is not None and not by_scaler and not again and self._scale() != 1.0:
            text = (
                f"optimizer.step() updates by gradients that still carry the loss scale, {self._scale():g} "
            )
            text += f"(as that of {self._name_of(scaled)})"
            cure = Cure("advice", "let the scaler step the optimizer, and nobody else",
                        "scaler.step(optimizer)  # in place of optimizer.step()")  # fmt: skip
            self._ledger.report("optimizer.step", place, "update", text, cure, 2)
        elif again and not any(m.op == "optimizer.step" for m in self._ledger.mistakes.values()):
            text = "the optimizer is stepped twice by the gradients of one backward"
            self._ledger.report("step", place, "update", text, Cure("advice", "step it once"), _OFTEN)
        for p in updated:
            held, mark = self._held.get(p), mark_of(p.grad)
            cleared = held is not None and held.mark == mark and held.terms == 0
            self._starved[p] = self._starved[p] + 1 if cleared or mark in (None, self._spent.get(p)) else 0
        self._on_used(optimizer, optimizer, lost=not optimizer.state)
        return again

    def on_updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an update was made."""
        updated = parameters_of(optimizer)
        self._at[optimizer] = self._backwards
        self._spent |= {p: mark_of(p.grad) for p in updated if p.grad is not None}
        self.stale -= {*updated}
        for life in self._last.values():  # of the scaler too
            if life.first is not None and any(life.first is p for p in updated):
                life.version = life.first._version
        life = self._lives.get(optimizer)
        if life is not None and life.first is not None:
            state = optimizer.state.get(life.first, {}).values()
            life.stateful = any(isinstance(x, Tensor) and x.dim() > 0 for x in state)

    def on_step(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], place: Place
    ) -> None:
        """Look whether the parameters that get gradients are those that are updated."""
        self._reached.update(self._reached_now)
        self._reached_now.clear()
        owned = {p for optimizer in optimizers for p in parameters_of(optimizer)}
        everyone = {p: None for model in models for p in model.parameters()}
        free = [p for p in everyone if p not in owned and self._reached[p] >= _OFTEN]
        for kept in (self._held, self._spent, self._reached, self._starved):
            for p in [p for p in kept if p not in owned and p not in everyone]:
                del kept[p]
        if not free or not owned:
            return
        starved = [p for p in owned if self._starved[p] >= _OFTEN]
        strange = [p for p in starved if p not in everyone]
        alone = bool(strange) and not self._suspected and any(map(_is_alone, strange))
        self._suspected |= bool(strange)  # to ask who holds a tensor takes long
        more = f" and {len(free) - 1} more" if len(free) > 1 else ""
        names = f"{self._name_of(free[0])}{more}"
        if len(starved) == len(owned) or alone:
            self._note_unowned(names, optimizers, starved)
        elif not any(self._reached[p] for p in owned):
            self._find_still(free, names, place)

    def _note_unowned(
        self, names: str, optimizers: Sequence[torch.optim.Optimizer], starved: Sequence[Tensor]
    ) -> None:
        owner = next(o for o in optimizers if any(p is starved[0] for p in parameters_of(o)))
        life = self._lives.get(owner) or Life(type(owner).__name__, ("", 0))
        text = f"{life.kind} was made before the model was what it is: {names} of the model get gradients "
        text += f"and are in no optimizer, and {len(starved)} of what it holds get none"
        code = "optimizer.add_param_group({'params': new.parameters()})"
        cure = Cure("advice", "make the optimizer after the last change of the model", code)
        self._ledger.report(life.kind, life.made, "update", text, cure, phase="prepare")

    def _find_still(self, free: Sequence[Tensor], names: str, place: Place) -> None:
        """Find parameters that get gradients and keep their values while an optimizer updates others."""
        if not self._values:
            self._values = {p: p.detach().clone() for p in free[:4]}
        elif all(torch.equal(p, value) for p, value in self._values.items()):
            text = "the optimizer updates tensors that are none of the model's parameters, and the model's, "
            text += f"which get the gradients ({names}), never change: the masters are not copied back"
            cure = Cure("advice", "copy the masters into the model after each step, under torch.no_grad()",
                        "p.copy_(master)")  # fmt: skip
            self._ledger.report("step", place, "update", text, cure, _OFTEN)


def _is_alone(parameter: Tensor) -> bool:
    """Whether no module and no variable of the script holds a parameter, but the optimizer alone."""
    gc.collect()
    holders = (r for r in gc.get_referrers(parameter) if isinstance(r, dict))
    return not any(value is parameter for holder in holders for value in list(holder.values()))
