"""The notes of every step of a watched script, and the faults that follow from the notes alone.

A step is bad when a loss, a gradient, a parameter or a buffer is not finite after it and all were before, or
when its update was skipped. A run can also go wrong without a value that is not finite: a jump of the
learning rate, a batch out of all proportion, updates that rounding swallows, divergence, a conversion that
took weights to zero or to infinity. Where values left their range later, the step that caused it is the
fault, and the op at which they left it a consequence.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.convert import conversion
from halfstep.formats import format_of
from halfstep.gradients.per_parameter import amaxes
from halfstep.names import fqn
from halfstep.numerics.cause import Cause
from halfstep.numerics.fault import Fault
from halfstep.numerics.histogram import amax as largest_of
from halfstep.numerics.remedies.base import Cure, with_attributes
from halfstep.numerics.remedies.bf16 import UseBf16
from halfstep.numerics.remedies.loop import ClearGradients, LimitRates
from halfstep.numerics.remedies.masters import KeepMasters
from halfstep.numerics.remedies.terms import PLAIN
from halfstep.numerics.tape import OpLocation, call_site
from halfstep.numerics.watch import LostUpdates

#: An update that is so many times the largest one before it is no training step ...
SPIKE = 1e3
#: ... if it changes this share of the weights: after a rate of almost nothing any other is a great step.
_MOVED = 0.1
#: An input that is so many times the largest of the batches before it is the data's fault, if of so many.
_OUTLYING, _BATCHES = 30, 3
#: A first update that is so many times the weights, and the loss after it so many times that before.
_SHOT = 10
#: Steps in which a scalar goes one way before that is a drift.
_STEADY = 4
#: A loss that grew so many times is not training; before values that are not finite, less says as much.
DIVERGED, _BLOWN = 1e4, 1e2


@dataclass(frozen=True)
class GroupOptions:
    """Options of a parameter group that decide how large an update is."""

    weight_decay: float = 0.0
    betas: tuple[float, ...] = ()
    eps: float = 0.0


def options_of_groups(optimizer: torch.optim.Optimizer) -> tuple[GroupOptions, ...]:
    """Return the options of each group; weight decay inside Adam's moments scales no weights: 0 here."""
    through = bool(optimizer.defaults.get("betas")) and type(optimizer).__name__ in ("Adam", "NAdam", "RAdam")
    return tuple(
        GroupOptions(
            0.0 if through and not g.get("decoupled_weight_decay") else _number(g.get("weight_decay")),
            tuple(map(_number, g.get("betas", ()))),
            _number(g.get("eps")),
        )
        for g in optimizer.param_groups
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float | Tensor) else 0.0


@dataclass
class Note:
    """One step: `number` counts the script's iterations, from 0; `bad` says what was first not finite.

    `update`, `size`: Euclidean lengths of the update and the weights before it. `rates`, `options`: learning
    rate and further options by group; `schedule`: the class of what sets the rates. `rows`: where inputs are
    largest. `nonfinite`: whose gradients are not finite as a step begins that may be skipped. `read`: whether
    the script read a value that was not finite, and did not go backward from it since. `stale`: a
    parameter whose gradient is in part that of the step before; `flushed`: second moments that became zero;
    `again`: whether it is the second update by the same gradients; `scalars`: parameters of one
    value.
    """

    number: int
    loss: float | None = None
    rates: tuple[float, ...] = ()
    bad: str = ""
    skipped: bool = False
    taken: bool = False
    lasting_damage: bool = False
    update: float = 0.0
    size: float = 0.0
    schedule: str = ""
    options: tuple[GroupOptions, ...] = ()
    gradient: float = 0.0
    silent: str = ""
    nonfinite: frozenset[str] = frozenset()
    read: bool = False
    inputs: dict[str, float] = field(default_factory=dict[str, float])
    rows: dict[str, int] = field(default_factory=dict[str, int])
    outputs: dict[str, float] = field(default_factory=dict[str, float])
    gradients: dict[str, float] = field(default_factory=dict[str, float])
    scale: float = 1.0
    where: tuple[str, int] = ("", 0)
    stale: str = ""
    flushed: str = ""
    again: bool = False
    scalars: dict[str, float] = field(default_factory=dict[str, float])


#: Beyond 0 and 1 by this is no label that was smoothed; so far from 1 is no sum that was rounded.
_SMOOTHED, _ROUNDED = 0.5, 0.02


def judge_targets(loss: str, targets: Tensor) -> tuple[str, str, str]:
    """Say what is wrong with the targets of a loss, what to do, and the code for that; else nothing.

    `targets`: probabilities, for cross_entropy [N, C, ...] or [C]. Rows of zeros, as of what is masked, and
    targets of 0 and 1 alone, as of several labels at once, pass.
    """
    if "binary" in loss:
        low, high = (float(x) for x in torch.aminmax(targets.float()))
        if max(-low, high - 1) <= _SMOOTHED or not math.isfinite(high - low):
            return "", "", ""
        text = f"the targets of {loss} reach from {low:.4g} to {high:.4g}, and it takes targets in [0, 1]"
        code = f"{{}} / {high:.4g}" if low >= 0 else f"({{}} + {-low:.4g}) / {high - low:.4g}"
        return text, "bring the targets into [0, 1] where they are loaded", code
    sums = targets.float().sum(min(1, targets.dim() - 1))
    off = ((sums - 1).abs() > _ROUNDED) & (sums != 0)
    if 2 * int(off.sum()) < off.numel() or bool(((targets == 0) | (targets == 1)).all()):
        return "", "", ""
    text = (
        f"the targets of {loss} are no probabilities: those of a row sum to {float(sums[off].median()):.3g}"
    )
    return text, "make the targets of each row sum to 1", "{0} / {0}.sum(1, keepdim=True)"


@dataclass
class Mistake:
    """What a loop does with its gradients, updates or targets that it should not, and in which steps.

    It is a fault where it is seen in `least` steps.
    """

    phase: str
    op: str
    kind: str
    where: tuple[str, int]
    text: str
    cure: Cure
    least: int
    steps: set[int] = field(default_factory=set[int])


def read_amaxes(tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest magnitude of each tensor, NaN or inf where one value is."""
    return [] if not tensors else [float(x) for x in amaxes(tensors).tolist()]


@torch.no_grad()
def length(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean length of all of these together; inf where it is not finite."""
    floats = (t for t in tensors if t.is_floating_point() and t.layout == torch.strided)
    norms = [torch.linalg.vector_norm(t.float()).double() for t in floats]
    total = float(torch.stack(norms).norm()) if norms else 0.0
    return total if math.isfinite(total) else math.inf


class Ledger:
    """The notes of a run by step, with values lost in conversions and updates lost to rounding."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.flushes: list[Flush] = []
        self.lost: Sequence[LostUpdates] = ()
        self.mistakes: dict[tuple[str, tuple[str, int]], Mistake] = {}
        self.terms = PLAIN
        self.now = Note(0)
        self._iteration = 0
        self._round: set[int] = set()
        self._next: dict[int, int] = {}
        self._last = 0

    def blame(self, what: str) -> None:
        """Note the first thing that was not finite in this step."""
        self.now.bad = self.now.bad or what

    def report(
        self, op: str, where: tuple[str, int], kind: str, text: str, cure: Cure, least: int = 1,
        phase: str = "optimizer", step: int | None = None,
    ) -> None:  # fmt: skip
        """Note a mistake of the loop in this step, or in another; the last words of its first step count."""
        made = self.mistakes.setdefault((op, where), Mistake(phase, op, kind, where, text, cure, least))
        made.steps.add(self.now.number if step is None else step)
        made.text = text if len(made.steps) == 1 else made.text

    def close(self, owner: object) -> Note:
        """End the step that `owner` (an optimizer, as a rule) made."""
        self.number(owner)
        self._iteration = self.now.number
        self._round = {id(owner)} if id(owner) in self._round else self._round | {id(owner)}
        self._next[self._last], self._last = id(owner), id(owner)
        self.notes.append(self.now)
        follows = self._next.get(id(owner), id(owner))  # whoever took a turn after this one before
        self.now = Note(self._iteration + (follows in self._round))
        return self.notes[-1]

    def number(self, owner: object) -> int:
        """Return the number of the step that ends: an optimizer that steps again begins another iteration."""
        self.now.number = self._iteration + (id(owner) in self._round and not self.now.again)
        return self.now.number

    @property
    def iterations(self) -> int:
        """Return how many iterations the steps made; alternating optimizers share one."""
        return len({note.number for note in self.notes})

    def index_of(self, number: int) -> int:
        """Return the index of the last step of an iteration."""
        return max((i for i, note in enumerate(self.notes) if note.number == number), default=number)

    @property
    def skips(self) -> list[int]:
        """Return the iterations in which a step was skipped."""
        return sorted({note.number for note in self.notes if note.skipped})

    def outlier(self, number: int) -> tuple[str, str]:
        """Return the input of a step that is far beyond earlier batches: its name, and a description."""
        for note in (note for note in self.notes if note.number == number):
            for name, amax in note.inputs.items():
                before = [n.inputs[name] for n in self.notes if n.number < number and name in n.inputs]
                most = max(before, default=0.0)
                if len(before) >= _BATCHES and math.isfinite(amax) and amax > _OUTLYING * most > 0:
                    row = f" in row {note.rows[name]}" if name in note.rows else ""
                    text = (
                        f"{name} of batch {number + 1} reaches {amax:.3g}{row}, at most {most:.3g} before it"
                    )
                    return name, text
        return "", ""

    def drift(self, module: str, number: int) -> str:
        """Say which parameter of one value, of this module or above it, has gone one way until a step."""
        notes = [note for note in self.notes if note.number <= number and note.scalars]
        for name in notes[-1].scalars if len(notes) > _STEADY else ():
            values = [note.scalars[name] for note in notes if name in note.scalars]
            moves = [b - a for a, b in itertools.pairwise(values)]
            steady = sum(move * (values[-1] - values[0]) > 0 for move in moves) > 0.9 * len(moves)
            if (
                steady
                and abs(values[-1]) > max(1.0, 2 * abs(values[0]))
                and module.startswith(name.rpartition(".")[0])
            ):
                return f"{name} has gone from {values[0]:.3g} to {values[-1]:.3g} in {len(values)} steps"
        return ""

    def is_recovered(self, index: int = 0) -> bool:
        """Whether a skipped step only lowered the loss scale: steps after it are taken.

        What goes wrong later, without a skip or in the loss itself, is another fault.
        """

        def of_the_scale(note: Note) -> bool:
            return note.skipped and note.bad != "loss"

        after = list(itertools.dropwhile(of_the_scale, self.notes[index:]))
        bad_at = next((i for i, note in enumerate(after) if note.bad and not of_the_scale(note)), None)
        after, ended = after[:bad_at], bad_at is None
        if ended and len(after) < min(3, len(self.notes)):  # too little to tell: was the run well before it?
            well = sum(not (note.bad or note.skipped) for note in self.notes[:index])
            return well >= 3 and len(self.notes) - index - len(after) <= 2
        return bool(after) and self._skips_without_growth(after) <= max(2, len(after) // 6)

    @staticmethod
    def _skips_without_growth(notes: Sequence[Note]) -> int:
        """Count skips without those that follow a growth of the scale at once."""
        count, least = 0, math.inf
        for note in notes:
            if not note.skipped:
                least = min(least, note.scale)
            elif note.scale > least:
                least = math.inf
            else:
                count += 1
        return count

    def until(self, stop: int | None) -> Ledger:
        """Return the notes up to the one with this index; all with None."""
        part = copy.copy(self)
        part.notes = self.notes if stop is None else self.notes[: stop + 1]
        return part

    def first_broken_step(self) -> int | None:
        """Return the index of the first step after which something lasting was not finite, or None."""
        indices = (i for i, n in enumerate(self.notes) if n.lasting_damage or (n.bad and not n.skipped))
        return next(indices, None)

    def spike(self) -> int | None:
        """Return the index of the first step whose update is far larger than those before it."""
        most, count = 0.0, 0
        for index, note in enumerate(self.notes):
            if not note.taken or note.bad not in ("", "parameter") or not note.update > 0:
                continue
            if count >= 3 and note.update > SPIKE * most and note.update > _MOVED * note.size:
                return index
            most, count = max(most, note.update), count + 1
        return None

    def too_long(self) -> bool:
        """Whether the first update is far too large for the weights, and the loss is since then."""
        first, second = [*self.notes[:2], *[Note(0)] * 2][:2]
        now = math.inf if second.bad == "loss" else abs(second.loss or 0.0)
        grew = first.loss is not None and now > _SHOT * max(abs(first.loss), 1e-3)
        return grew and first.taken and not first.bad and first.update > _SHOT * first.size > 0

    def find_divergence(self) -> tuple[int, float, float] | None:
        """Return where a loss began to diverge, its value at first and at last.

        The step is the one whose update the larger loss came of.
        """
        end = self.first_broken_step()
        notes = self.notes[:end]
        losses = [
            (i, abs(n.loss)) for i, n in enumerate(notes) if n.loss is not None and math.isfinite(n.loss)
        ]
        if len(losses) < (8 if end is None else 2):
            return None
        first = (
            max(loss for _, loss in losses[:3]) if end is None else next((x for _, x in losses if x > 0), 0.0)
        )
        last = min(loss for _, loss in losses[-3:]) if end is None else losses[-1][1]
        if not (first > 0 and last > (DIVERGED if end is None else _BLOWN) * max(first, 1e-3)):
            return None
        at = next(place for place, (_, loss) in enumerate(losses) if loss > 10 * first)
        return losses[max(0, at - 1)][0], first, last

    def blew_up(self, at: int) -> bool:
        """Whether the loss diverged after the step with this index, or its update was large enough for that.

        Up to that step, where inputs have grown since. A loss that is not finite ends what counts.
        """
        indices = (i for i, n in enumerate(self.notes) if i > at and n.loss and not math.isfinite(n.loss))
        end = next(indices, len(self.notes))
        losses = [abs(n.loss) if n.loss and math.isfinite(n.loss) else 0.0 for n in self.notes[:end]]
        most = dict[str, float]()
        for note in self.notes[:at]:
            most |= {name: max(x, most.get(name, 0.0)) for name, x in note.inputs.items()}
        inputs = [(name, x) for note in self.notes[:end][-2:] for name, x in note.inputs.items()]
        usual = bool(inputs) and all(x <= 10 * most.get(name, 0.0) for name, x in inputs)
        before = losses[: at + (not usual)]
        after = losses[at + 1 :][-2:]
        if end == at + 1 and any(n.taken and n.update > _SHOT * n.size > 0 for n in self.notes[at:end]):
            return True
        return len(after) > (end == len(self.notes)) and min(after) > _BLOWN * max(1e-3, *before, 0.0)

    def only_skipped(self, index: int) -> bool:
        """Whether a step was bad only in that its update was skipped, and later ones were made."""
        note = self.notes[index]
        return note.skipped and note.bad != "loss" and not note.lasting_damage and self.is_recovered(index)

    def weight_growth(self) -> float:
        """Return the factor by which the weights have grown since the first step, while they were finite."""
        sizes = [note.size for note in self.notes if note.size > 0 and math.isfinite(note.size)]
        return max(sizes) / sizes[0] if sizes else 1.0


def beside(ledger: Ledger, number: int) -> dict[str, Any]:
    """Return the largest magnitudes at a bad step and at the last good one: `good`, `bad`, `rows`."""
    bad = next((note for note in ledger.notes if note.number == number), None)
    before = [note for note in ledger.notes if note.number < number and not note.bad]
    if bad is None or not before:
        return {}
    good = before[-1]
    values = [
        *(("learning rate", f"group {i}", a, b) for i, (a, b) in enumerate(zip(good.rates, bad.rates))),
        ("update", "all weights", good.update, bad.update if bad.taken else None),
        ("loss", "loss", good.loss, bad.loss),
        *(("input", path, good.inputs.get(path), value) for path, value in bad.inputs.items()),
        *(("result", path, good.outputs.get(path), value) for path, value in bad.outputs.items()),
        *(("gradient", path, good.gradients.get(path), value) for path, value in bad.gradients.items()),
    ]
    rows = [{"kind": k, "path": p, "good": a, "bad": b} for k, p, a, b in values if b is not None]
    return {"good": good.number, "bad": number, "rows": rows}


_LOST = 0.5


@dataclass(frozen=True)
class Flush:
    """A parameter in which a conversion made `lost` values zero or infinite."""

    name: str
    lost: int
    cause: Cause
    location: OpLocation


def note_conversions(stack: ExitStack, flushes: list[Flush]) -> None:
    """Note what `.half()`, `.to(dtype)` and our own conversions flush until the stack closes."""
    torchs: Any = nn.Module
    apply, inside = torchs._apply, False

    @contextmanager
    def compare_around(model: nn.Module) -> Generator[None]:
        """Compare the parameters before and after the block; only the outermost does."""
        nonlocal inside
        if inside:
            yield
            return
        inside = True
        floats = (pair for pair in model.named_parameters() if pair[1].is_floating_point())
        before = {name: p.detach() for name, p in floats if not p.is_meta}
        try:
            yield
        finally:
            inside = False
        _, file, line = call_site()
        modules = dict(model.named_modules())
        for name, new in model.named_parameters():
            lost_values = (
                _count_lost_values(fqn(name), before[name], new.detach()) if name in before else None
            )
            if lost_values is not None:
                owner = name.rpartition(".")[0]
                kind = type(modules[owner]).__name__ if owner in modules else ""
                flushes.append(Flush(fqn(name), *lost_values, OpLocation(fqn(owner), kind, None, file, line)))

    def apply_and_compare(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with compare_around(module):
            return apply(module, *args, **kwargs)

    conversion.conversion_listeners.append(compare_around)
    stack.callback(conversion.conversion_listeners.remove, compare_around)
    stack.enter_context(with_attributes(torchs, _apply=apply_and_compare))


def _count_lost_values(name: str, old: Tensor, new: Tensor) -> tuple[int, Cause] | None:
    """Count values of a parameter that became infinite in another dtype, or (if most did) zero; say why."""
    count = int(torch.count_nonzero(old)) if old.dtype != new.dtype else 0
    if count == 0:
        return None
    amax, fmt = float(largest_of(old)), format_of(new.dtype)
    infinite = int(torch.isinf(new).sum())
    lost = count - int(torch.count_nonzero(new)) + infinite
    text = f"{lost} of the {count} values of {name} (up to {amax:.3g}) became"
    if infinite and math.isfinite(amax):
        return lost, Cause("range", f"range: {text} infinite in {fmt.name}, which ends at {fmt.max:.5g}")
    if lost - infinite < (1 - _LOST) * count:
        return None
    smallest = f"whose smallest value is {fmt.smallest_subnormal:.3g}"
    return lost, Cause("precision", f"precision: {text} zero in {fmt.name}, {smallest}")


#: Share of the updates that rounding swallows beyond which a model does not train.
_ALL_LOST = 0.9


def _fault(note: Note, kind: str, text: str, *cures: Cure) -> Fault:
    """Return a fault of a step's update."""
    location, cause = OpLocation("", "", None, *note.where), Cause(kind, f"{kind}: {text}")
    return Fault("optimizer", "", location, cause, [*cures], note.number, taped=False)


def all_faults(ledger: Ledger, traced: Sequence[Fault]) -> list[Fault]:
    """Return the faults on the tape and in the notes, the gravest first.

    Faults masked by another come last, before them those that a lower loss scale cures; else the earliest
    leads.
    """
    broken = ledger.first_broken_step()
    sound, mistakes = broken is None, _mistakes(ledger.until(broken))
    left = min((m.step for m in mistakes if m.cause.kind == "accumulation"), default=math.inf)
    first = min((m.step for m in mistakes if m.cause.kind != "data"), default=math.inf)
    traced = [f for f in traced if f.step < left or (f.phase, f.cause.kind) != ("backward", "data")]
    noted = [*traced, *quiet_faults(ledger)] if sound else with_roots(ledger, traced)
    faults = [*mistakes, *(f for f in noted if f.step < first or f.taped or f.cause.kind != "divergence")]
    return sorted(
        faults, key=lambda f: (f.masked_by is not None, f.of_the_scale, f.phase != "prepare", f.step)
    )


def _mistakes(ledger: Ledger) -> list[Fault]:
    """Return the mistakes of the loop that were seen often enough, up to the last step there is."""
    last = ledger.notes[-1].number if ledger.notes else 0
    return [
        Fault(m.phase, m.op, OpLocation("", "", None, *m.where), Cause(m.kind, f"{m.kind}: {m.text}"),
              [m.cure], min(m.steps), taped=False)
        for m in ledger.mistakes.values()
        if len(m.steps) >= m.least and min(m.steps) <= last
    ]  # fmt: skip


def quiet_faults(ledger: Ledger) -> list[Fault]:
    """Return the faults in the notes of a run without lasting damage, the earliest first."""
    faults = _find_lost_values(ledger)
    spike, grown = ledger.spike(), ledger.find_divergence()
    if spike is not None:
        faults.append(_spike(ledger, spike))
    shares = [note.share for note in ledger.lost]
    share = statistics.median(shares) if len(shares) >= 2 else 0.0
    still = [note for note in ledger.lost if note.worst_share >= _ALL_LOST and note.dtype != "fp32"]
    if share >= _ALL_LOST or (len(still) >= 2 and len(still) == len(ledger.lost)):
        faults.append(_lost_updates_fault(ledger, share))
    faults += [*_find_uncleared(ledger), *_without_moments(ledger)]
    if ledger.too_long():
        faults.append(_overshoot_fault(ledger))
    elif grown is not None and spike is None and not any(note.bad for note in ledger.notes):
        faults.append(_divergence_fault(ledger, *grown))
    return faults


def _find_uncleared(ledger: Ledger) -> list[Fault]:
    """Return the fault of gradients that nobody clears, where it happens in most steps."""
    stale = [note for note in ledger.notes if note.stale]
    if len(stale) < 3 or len(stale) < ledger.iterations // 2:
        return []
    text = f"the gradient of {stale[0].stale} still holds that of the step before"
    words, code = "clear the gradients before each backward", "optimizer.zero_grad()"
    dose = ClearGradients(stale[0].where[1], text=words, code=code)
    return [_fault(stale[0], "accumulation", text, Cure.of(dose))]


def _without_moments(ledger: Ledger) -> list[Fault]:
    """Return the fault of second moments that are zero, by which an update is divided."""
    note = next((note for note in ledger.notes if note.flushed), None)
    if note is None:
        return []
    cure = Cure("advice", "keep the optimizer's state in fp32: fp32 master weights", 'level="O2"')
    return [_fault(note, "precision", f"{note.flushed}: the update divides by epsilon alone", cure)]


def _overshoot_fault(ledger: Ledger) -> Fault:
    note = ledger.notes[0]
    rate = max(note.rates, default=0.0)
    at = f" of {rate:g}" if rate else ""
    text = (
        f"the first update is {note.update / note.size:.3g} times as long as the weights: "
        f"the learning rate{at} is too large for them"
    )
    cure = Cure("advice", "lower the learning rate, or warm it up", f"lr={rate / 100:g}" if rate else "")
    return _fault(note, "learning rate", text, cure)


def with_roots(ledger: Ledger, faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults of a run with lasting damage, with the update or growing loss that led to each."""
    ledger = ledger.until(ledger.first_broken_step())
    noted_faults = [*_find_lost_values(ledger), *_find_uncleared(ledger)]
    root = _root(ledger, faults)
    after = root.step if root is not None else math.inf
    came_of_it = [f for f in faults if f.step >= after and f.cause.kind not in ("data", "learning rate")]
    if root is None or not came_of_it:
        return [*noted_faults, *faults]
    root.led_to = came_of_it[0]
    return [*noted_faults, root, *(f for f in faults if all(f is not other for other in came_of_it))]


def _root(ledger: Ledger, faults: Sequence[Fault]) -> Fault | None:
    """Return the step that took a run out of range, by its update or because its loss grew from there."""
    out_of_range = any(f.cause.kind == "range" and not f.cause.weight for f in faults)
    if ledger.too_long():
        return _overshoot_fault(ledger)
    spike, grown = ledger.spike(), ledger.find_divergence()
    if spike is not None and (grown is None or spike <= grown[0]):
        root = _spike(ledger, spike)
        telling = root.cause.kind == "learning rate" or (out_of_range and not ledger.notes[spike].bad)
        return root if telling else None
    return _divergence_fault(ledger, *grown) if grown is not None and out_of_range else None


def _find_lost_values(ledger: Ledger) -> list[Fault]:
    """Return the fault of the conversion that lost most values of a parameter."""
    flushes = ledger.flushes
    if not flushes:
        return []
    worst = max(flushes, key=lambda f: (f.cause.kind == "range", f.lost))
    more = f"; and so with {len(flushes) - 1} more parameters" if len(flushes) > 1 else ""
    cause = replace(worst.cause, text=worst.cause.text + more)
    cures = [
        Cure.of(UseBf16(text="use bf16: it has the range of fp32", code=ledger.terms.bf16)),
        Cure("advice", f"store {worst.name} times a power of two, and divide where it is used"),
    ]
    return [Fault("prepare", "cast", worst.location, cause, cures, taped=False)]


def _spike(ledger: Ledger, index: int) -> Fault:
    note, clip = ledger.notes[index], Cure("advice", "clip the gradients", ledger.terms.clip)
    before = [n for n in ledger.notes[:index] if n.taken and n.update > 0 and not n.bad]
    times = note.update / max(n.update for n in before)
    tail = f"the update is {times:.3g} times the largest before it"
    usual = [n.rates for n in before if len(n.rates) == len(note.rates)]
    most = [max(rates) for rates in zip(*usual)]
    jumped = [place for place, old in enumerate(most) if note.rates[place] > 30 * old]
    if jumped:
        return _jump(note, jumped[0], most, usual[-1], tail)
    name, text = ledger.outlier(note.number)
    if text:
        return _fault(note, "data", f"{text}, and {tail}", smaller_data(name), clip)
    usually = statistics.median(n.gradient for n in before)
    if note.gradient <= usually:
        return _small_divisor(note, tail, usually)
    return _fault(note, "divergence", f"{tail}; the gradients reach {note.gradient:.3g}", clip)


def smaller_data(name: str) -> Cure:
    """Say what to do with an input whose batches are too large."""
    return Cure("data", "drop or clamp such batches where they are loaded", f"{name}.clamp(-k, k)")


def _jump(note: Note, group: int, most: Sequence[float], last: Sequence[float], tail: str) -> Fault:
    """Return the fault of a learning rate far larger than all before it.

    `most`: the largest of each group so far; `last`: those of the step before.
    """
    old, new = most[group], note.rates[group]
    of = f" of group {group}" if len(most) > 1 else ""
    text = f"it jumps{of} from {last[group]:g} to {new:g}, and {tail}"
    whose = f"what {note.schedule} gives" if note.schedule else "what sets the rate"
    code = f'optimizer.param_groups[{group}]["lr"] = {old:g}' if of and not note.schedule else f"lr={old:g}"
    dose = LimitRates(tuple(most), text=f"check {whose} at step {note.number + 1}", code=code)
    return _fault(note, "learning rate", text, Cure.of(dose))


def _small_divisor(note: Note, tail: str, usually: float) -> Fault:
    """Return the fault of an update that is large though its gradients are not: its divisor is too small."""
    options = next((k for k in note.options if k.betas or k.eps), None)
    by = f" (eps={options.eps:g}{f', betas={options.betas}' if options.betas else ''})" if options else ""
    text = (
        f"{tail}, though the gradients are no larger ({note.gradient:.3g}, usually "
        f"{usually:.3g}): what the optimizer divides them by has become too small{by}"
    )
    betas = [*options.betas] if options else []
    cure = Cure("advice", "give the optimizer a larger epsilon", "eps=1e-4")
    if len(betas) > 1 and betas[1] < 0.9:
        words = "let the second moment remember more steps"
        cure = Cure("advice", words, f"betas=({betas[0]:g}, 0.999)")
    return _fault(note, "divergence", text, cure)


def _lost_updates_fault(ledger: Ledger, share: float) -> Fault:
    """Return the fault of updates lost in most weights, or in most weights of one tensor."""
    of_all = share >= _ALL_LOST
    first = next(note for note in ledger.lost if (note.share if of_all else note.worst_share) >= _ALL_LOST)
    note = ledger.notes[min(first.step, len(ledger.notes) - 1)]
    lost = f"{share:.0%} of the updates are lost (worst: {first.worst})"
    if not of_all:
        lost = f"{first.worst_share:.0%} of the updates of {first.worst} are lost ({share:.0%} of all)"
    text = (
        f"{lost}: they are smaller than half the spacing of the {first.dtype} weights, which stay as they are"
    )
    words = "keep fp32 master weights, which take up what 16 bits lose"
    cure = Cure.of(KeepMasters(text=words, code=ledger.terms.masters))
    if first.dtype == "fp32":
        cure = Cure("advice", "raise the learning rate: the weights have all the bits of fp32 already")
    return _fault(note, "rounding", text, cure)


#: Weights that grew so many times are what a loss grew by.
_GROWN = 4


def _divergence_fault(ledger: Ledger, index: int, first: float, last: float) -> Fault:
    note = ledger.notes[index]
    rate = note.rates[0] if note.rates else 0.0
    decay = max((k.weight_decay * r for k, r in zip(note.options, note.rates)), default=0.0)
    tail = f"the loss grew from {first:.3g} to {last:.3g}"
    if decay > 2:
        value = max(k.weight_decay for k in note.options)
        text = f"{tail}: weight decay {value:g} times the learning rate is {decay:.3g}; beyond 2 it enlarges"
        cure = Cure("advice", "lower the weight decay", "weight_decay=0.01")
    elif ledger.weight_growth() < _GROWN:
        text = f"{tail}, and the weights did not: what they are compared with did, or what they are given"
        cure = Cure("advice", "look at what makes the targets: an average, another model, the data")
    else:
        at = f" of {rate:g}" if rate else ""
        text = f"{tail}: the learning rate{at} is too large"
        cure = Cure("advice", "lower the learning rate, or warm it up", f"lr={rate / 10:g}" if rate else "")
    return _fault(note, "divergence", text, cure)
