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

from halfstep.gradients.per_parameter import largest

#: An update that is so many times the largest one before it is no training step.
SPIKE = 1e3
#: A loss that grew so many times is not training.
DIVERGED = 1e4


@dataclass
class Note:
    """One step: `number` counts the script's iterations, from 0; `bad` says what was first not finite.

    Large because it is a record: a field for each thing that is noted of a step.
    """

    number: int
    loss: float | None = None
    rates: tuple[float, ...] = ()
    bad: str = ""
    skipped: bool = False
    taken: bool = False
    spoiled: bool = False
    update: float = 0.0
    gradient: float = 0.0
    silent: str = ""
    inputs: dict[str, float] = field(default_factory=dict[str, float])
    outputs: dict[str, float] = field(default_factory=dict[str, float])
    gradients: dict[str, float] = field(default_factory=dict[str, float])
    scale: float = 1.0
    where: tuple[str, int] = ("", 0)


def tops(tensors: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each tensor, NaN or inf where one value is."""
    return [] if not tensors else [float(x) for x in largest(tensors).tolist()]


@torch.no_grad()
def distance(before: Sequence[Tensor], after: Iterable[Tensor]) -> float:
    """The Euclidean length of an update."""
    total = 0.0
    for old, new in zip(before, after):
        if old.is_floating_point() and old.shape == new.shape:
            total += float(torch.linalg.vector_norm((new.detach() - old).float())) ** 2
    return math.sqrt(total) if math.isfinite(total) else math.inf


class Ledger:
    """The notes of a run, by step; `weights` holds each parameter's largest magnitude after every step."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.weights: dict[str, list[tuple[int, float]]] = {}
        self.now = Note(0)
        self._counts: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._last = 0

    def blame(self, what: str) -> None:
        """Note that something was not finite, if nothing was before in this step."""
        self.now.bad = self.now.bad or what

    def close(self, owner: object) -> Note:
        """End the step that `owner` (an optimizer, as a rule) made."""
        self.number(owner)
        self._counts[id(owner)] = self._counts.get(id(owner), 0) + 1
        self._next[self._last], self._last = id(owner), id(owner)
        self.notes.append(self.now)
        follows = self._next.get(id(owner), id(owner))  # whoever took a turn after this one before
        self.now = Note(max(self._counts.get(follows, 0), self.now.number))
        return self.notes[-1]

    def number(self, owner: object) -> int:
        """Number the step that is ending now: optimizers that take turns share one iteration."""
        counts = self._counts | {id(owner): self._counts.get(id(owner), 0) + 1}
        self.now.number = max(counts.values()) - 1
        return self.now.number

    @property
    def skips(self) -> list[int]:
        """Which steps were skipped."""
        return [note.number for note in self.notes if note.skipped]

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
        history = [(index, top) for index, top in self.weights.get(name, []) if index < len(self.notes)]
        history = [(self.notes[index].number, top) for index, top in history]
        now = max((top for number, top in history if number <= step and math.isfinite(top)), default=0.0)
        large = [number for number, top in history if top >= now / 2]
        return large[0] if now and large[0] != history[0][0] else None

    def spike(self) -> int | None:
        """The index of the first step whose update is out of all proportion to those before it."""
        most, seen = 0.0, 0
        for index, note in enumerate(self.notes):
            if not note.taken or note.bad or not note.update > 0:
                continue
            if seen >= 3 and note.update > SPIKE * most:
                return index
            most, seen = max(most, note.update), seen + 1
        return None

    def diverged(self) -> tuple[float, float] | None:
        """First and last loss of a run whose loss grew out of all proportion."""
        losses = [abs(n.loss) for n in self.notes if n.loss is not None and math.isfinite(n.loss)]
        if len(losses) < 8:
            return None
        first, last = max(losses[:3]), min(losses[-3:])
        return (first, last) if first > 0 and last > DIVERGED * max(first, 1e-3) else None


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
    return {"good": good.number, "bad": number, "rows": rows}
