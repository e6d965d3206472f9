"""What is noted of every step of a watched script, and the faults that can be read off those notes alone.

A step is bad when a loss, a gradient, a parameter or a buffer is not finite after it and all were before, or
when its update was skipped. A run can also go wrong without a value that is not finite: `quiet_faults` finds
a jump of the learning rate, a batch out of all proportion, updates that rounding swallows, divergence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.gradients.per_parameter import amaxes

#: An update that is so many times the largest one before it is no training step ...
SPIKE = 1e3
#: ... if it changes this share of the weights: after a rate of almost nothing any other is a great step.
_MOVED = 0.1
#: An input that is so many times the largest of the batches before it is the data's fault, if of so many.
_OUTLYING, _BATCHES = 100, 3
#: A loss that grew so many times is not training; before values that are not finite, less says as much.
DIVERGED, _BLOWN = 1e4, 1e2


@dataclass(frozen=True)
class Knobs:
    """Options of a parameter group that decide how far an update goes."""

    weight_decay: float = 0.0
    betas: tuple[float, ...] = ()
    eps: float = 0.0


def knobs_of(optimizer: torch.optim.Optimizer) -> tuple[Knobs, ...]:
    """The options of each group; a weight decay inside Adam's moments scales no weights, and is 0 here."""
    through = bool(optimizer.defaults.get("betas")) and type(optimizer).__name__ in ("Adam", "NAdam", "RAdam")
    return tuple(
        Knobs(
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

    `update`, `size`: Euclidean lengths of the update and of the weights before it. `rates`, `knobs`: learning
    rate and further options by group; `schedule`: the class of what sets the rates. `still`: the share of the
    16-bit weights with a gradient that an update left as they were. `rows`: where inputs are largest.
    """

    number: int
    loss: float | None = None
    rates: tuple[float, ...] = ()
    bad: str = ""
    skipped: bool = False
    taken: bool = False
    spoiled: bool = False
    update: float = 0.0
    size: float = 0.0
    still: float = 0.0
    schedule: str = ""
    knobs: tuple[Knobs, ...] = ()
    gradient: float = 0.0
    silent: str = ""
    inputs: dict[str, float] = field(default_factory=dict[str, float])
    rows: dict[str, int] = field(default_factory=dict[str, int])
    outputs: dict[str, float] = field(default_factory=dict[str, float])
    gradients: dict[str, float] = field(default_factory=dict[str, float])
    scale: float = 1.0
    where: tuple[str, int] = ("", 0)


def read_amaxes(tensors: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each tensor, NaN or inf where one value is."""
    return [] if not tensors else [float(x) for x in amaxes(tensors).tolist()]


@torch.no_grad()
def update_length(before: Sequence[Tensor], after: Iterable[Tensor]) -> float:
    """The Euclidean length of an update."""
    total = 0.0
    for old, new in zip(before, after):
        if old.is_floating_point() and old.shape == new.shape:
            total += float(torch.linalg.vector_norm((new.detach() - old).float())) ** 2
    return math.sqrt(total) if math.isfinite(total) else math.inf


@torch.no_grad()
def unmoved(before: Sequence[Tensor], after: Iterable[Tensor]) -> float:
    """The share of the 16-bit weights with a gradient that an update left as they were."""
    kept, all_of_them = 0, 0
    for old, new in zip(before, after):
        gradient = new.grad
        if gradient is None or old.dtype.itemsize != 2 or gradient.layout != torch.strided:
            continue
        if old.shape != new.shape or gradient.shape != new.shape:
            continue
        learning = gradient != 0
        kept += int((learning & (old == new)).sum())
        all_of_them += int(learning.sum())
    return kept / all_of_them if all_of_them else 0.0


@torch.no_grad()
def length(tensors: Sequence[Tensor]) -> float:
    """The Euclidean length of all of these together."""
    kept = [t for t in tensors if t.is_floating_point() and t.layout == torch.strided]
    return float(torch.stack([torch.linalg.vector_norm(t.float()) for t in kept]).norm()) if kept else 0.0


class Ledger:
    """The notes of a run, by step; `weights` holds each parameter's largest magnitude after every step."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.weights: dict[str, list[tuple[int, float]]] = {}
        self.now = Note(0)
        self._iteration = 0
        self._round: set[int] = set()
        self._next: dict[int, int] = {}
        self._last = 0

    def blame(self, what: str) -> None:
        """Note that something was not finite, if nothing was before in this step."""
        self.now.bad = self.now.bad or what

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
        """Number the step that is ending now: an iteration is over where an optimizer has its turn again."""
        self.now.number = self._iteration + (id(owner) in self._round)
        return self.now.number

    @property
    def iterations(self) -> int:
        """How many iterations the steps made: optimizers that take turns share one."""
        return len(set(self.numbers))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The iteration of each step."""
        return tuple(note.number for note in self.notes)

    def index_of(self, number: int) -> int:
        """The index of the last step of an iteration."""
        return max((i for i, own in enumerate(self.numbers) if own == number), default=number)

    @property
    def skips(self) -> list[int]:
        """Iterations in which a step was skipped."""
        return sorted({note.number for note in self.notes if note.skipped})

    def outlier(self, number: int) -> tuple[str, str]:
        """The input of a step that is far beyond what earlier batches held: its name, and that in words."""
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

    def settled(self) -> bool:
        """Whether skipped steps are no more than a scale finding its place: at the start, or few."""
        count = len(self.notes)
        if any(note.bad and not note.skipped for note in self.notes):
            return False
        start = next((i for i, note in enumerate(self.notes) if not note.skipped), count)
        later = self._skips_without_growth(self.notes[start:])
        return count - start >= min(3, count) and later <= max(2, (count - start) // 6)

    @staticmethod
    def _skips_without_growth(notes: Sequence[Note]) -> int:
        """Skips but those by which a scale that has just grown finds its place again."""
        count, least = 0, math.inf
        for note in notes:
            if not note.skipped:
                least = min(least, note.scale)
            elif note.scale > least:
                least = math.inf
            else:
                count += 1
        return count

    def since(self, name: str, step: int) -> int | None:
        """From which step on a parameter has been about as large as it was at `step`; None if always."""
        history = [(index, amax) for index, amax in self.weights.get(name, []) if index < len(self.notes)]
        history = [(self.notes[index].number, amax) for index, amax in history]
        now = max((amax for number, amax in history if number <= step and math.isfinite(amax)), default=0.0)
        large = [number for number, amax in history if amax >= now / 2]
        return large[0] if now and large[0] != history[0][0] else None

    def until(self, stop: int | None) -> Ledger:
        """The notes before the one with this index, and that one; all with None."""
        part = Ledger()
        part.notes, part.weights = self.notes if stop is None else self.notes[: stop + 1], self.weights
        return part

    def broken(self) -> int | None:
        """The index of the first step after which something lasting was not finite; None in a sound run."""
        wrong = (i for i, n in enumerate(self.notes) if n.spoiled or (n.bad and not n.skipped))
        return next(wrong, None)

    def spike(self) -> int | None:
        """The index of the first step whose update is out of all proportion to those before it."""
        most, seen = 0.0, 0
        for index, note in enumerate(self.notes):
            if not note.taken or note.bad not in ("", "parameter") or not note.update > 0:
                continue
            if seen >= 3 and note.update > SPIKE * most and note.update > _MOVED * note.size:
                return index
            most, seen = max(most, note.update), seen + 1
        return None

    def diverged(self) -> tuple[int, float, float] | None:
        """Where a loss began to grow out of all proportion, what it was at first and at last.

        The step is the one whose update the larger loss came of.
        """
        end = self.broken()
        notes = self.notes[:end]
        kept = [(i, abs(n.loss)) for i, n in enumerate(notes) if n.loss is not None and math.isfinite(n.loss)]
        if len(kept) < (8 if end is None else 2):
            return None
        first = max(loss for _, loss in kept[:3]) if end is None else next((x for _, x in kept if x > 0), 0.0)
        last = min(loss for _, loss in kept[-3:]) if end is None else kept[-1][1]
        if not (first > 0 and last > (DIVERGED if end is None else _BLOWN) * max(first, 1e-3)):
            return None
        at = next(place for place, (_, loss) in enumerate(kept) if loss > 10 * first)
        return kept[max(0, at - 1)][0], first, last

    def grown(self) -> float:
        """By how many times the weights have grown since the first step, before they were not finite."""
        sizes = [note.size for note in self.notes if note.size > 0 and math.isfinite(note.size)]
        return max(sizes) / sizes[0] if sizes else 1.0


def beside(ledger: Ledger, number: int) -> dict[str, Any]:
    """The largest magnitudes at a bad step beside those of the last good one: `good`, `bad`, `rows`."""
    bad = next((note for note in ledger.notes if note.number == number), None)
    before = [note for note in ledger.notes if note.number < number and not note.bad]
    if bad is None or not before:
        return {}
    good = before[-1]
    rows = [
        {"kind": kind, "path": path, "good": usual.get(path), "bad": value}
        for kind, now, usual in (
            ("input", bad.inputs, good.inputs),
            ("result", bad.outputs, good.outputs),
            ("gradient", bad.gradients, good.gradients),
        )
        for path, value in now.items()
    ]
    told = [
        *(("learning rate", f"group {i}", a, b) for i, (a, b) in enumerate(zip(good.rates, bad.rates))),
        ("update", "all weights", good.update, bad.update if bad.taken else None),
        ("loss", "loss", good.loss, bad.loss),
    ]
    rows += [{"kind": k, "path": p, "good": a, "bad": b} for k, p, a, b in told if b is not None]
    return {"good": good.number, "bad": number, "rows": rows}
