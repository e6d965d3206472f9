"""A fault of a training step as data: where, why, what it spoiled, and what cures it.

What finds faults (the tape, the notes of a run) and what tells of them (warnings, the doctor's document and
report) share these values; they can be pickled. Words are made of them here, last of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from halfstep.formats import dtype_name
from halfstep.numerics.histogram import amax
from halfstep.numerics.tape import OpLocation, within

Spec = tuple[Any, ...]

UNTRIED, WORKS, FAILS = "untried", "works", "does not help"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in words: dtype, shape, largest magnitude (inf or NaN where it is not finite)."""

    dtype: str
    shape: tuple[int, ...]
    amax: float

    @classmethod
    def of(cls, t: Tensor) -> TensorInfo:
        """Describes `t`."""
        largest = abs(float(amax(t))) if t.is_floating_point() or t.is_complex() else 0.0
        return cls(dtype_name(t.dtype), tuple(t.shape), largest)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Spoiled:
    """What is not finite after the step and was before it, by name."""

    gradients: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    optimizer_state: tuple[str, ...] = ()

    @property
    def lasting(self) -> tuple[str, ...]:
        """What stays spoiled when the step is skipped or over: everything but the gradients."""
        return (*self.parameters, *self.buffers, *self.optimizer_state)

    def __str__(self) -> str:
        parts = [
            f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for kind, names in (
                ("gradients", self.gradients),
                ("parameters", self.parameters),
                ("buffers", self.buffers),
                ("optimizer states", self.optimizer_state),
            )
            if names
        ]
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Cause:
    """Why: `kind` is range, precision, mathematics, data, weights, learning rate, rounding, divergence,
    machine, rank (another rank's step) or unknown; `text` says it in words, and `more` what else was found.

    `times`: by how many times the largest value leaves the range. `format`: what could not hold it. `weight`:
    the parameter that holds what is too large, if one does, and `since` which step, from 0. `scalar`: a
    constant that the format rounds to zero, as it does an epsilon.
    """

    kind: str
    text: str
    times: float | None = None
    format: str = ""
    weight: str = ""
    scalar: float | None = None
    more: tuple[str, ...] = ()
    since: int | None = None

    @property
    def words(self) -> str:
        """All that is known of it, in a line."""
        parts = [self.text, *self.more]
        if self.since is not None:
            parts[min(1, len(parts) - 1)] += f", since step {self.since + 1}"  # beside what the weight holds
        return "; ".join(parts)

    def and_also(self, text: str) -> Cause:
        """The same with one more thing found."""
        return replace(self, more=(*self.more, text))


@dataclass
class Cure:
    """What to change.

    `kind`: full, scale, epsilon, clamp, loss, loss_scale, bf16, masters, rate, data or advice.
    `status`: "works" or "does not help" where the step was run again with it (over several ranks: on all of
    them together), else "untried"; `over`: in how many steps a run with it stayed well. `specs`: its doses as
    plain values, of which `cures.placed` puts each in place in any process, the weakest first; `doses`: text
    and code of each.
    """

    kind: str
    text: str
    code: str = ""
    status: str = UNTRIED
    specs: list[Spec] = field(default_factory=list[Spec])
    doses: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    over: int = 0

    @property
    def verdict(self) -> str:
        """What became of it: `works over 4 steps`."""
        return self.status + (f" over {self.over} steps" if self.over > 1 else "")

    def settle(self, spec: Spec, over: int) -> None:
        """This dose is the one that works, in so many steps."""
        place = self.specs.index(spec)
        if self.doses:
            self.text, self.code = self.doses[place]
            self.doses = [self.doses[place]]
        self.status, self.specs, self.over = WORKS, [spec], over

    def __str__(self) -> str:
        return f"cure ({self.verdict}): {self.text}"


@dataclass
class Fault:
    """A fault: the op at which values stopped being finite (or, `underflow`, became zero), or a step at which
    the notes of a run show that it went wrong (no `aten` then).

    `step`: from 0. `phase`: prepare, forward, backward, recompute or optimizer. `op`: as the op table names
    it; `aten`: the kernel. `origin`: finite in, not finite out (False: it read a value that was not finite
    before the step). `passed_on`: ops that carried it further, first ones first. `hidden`: every gradient is
    finite, because a later op made finite (and wrong) values of it. `harmless`: only the present loss scale
    was too large, and it goes down by itself. `behind`: found only with the cure of the fault before it in
    place. `led_to`: what came of it at a later step. `rank`: where, of several.
    """

    phase: str
    op: str
    location: OpLocation
    cause: Cause
    cures: list[Cure] = field(default_factory=list[Cure])
    step: int = 0
    aten: str = ""
    origin: bool = True
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    spoiled: Spoiled = Spoiled()
    reached: tuple[str, ...] = ()
    passed_on: tuple[str, ...] = ()
    underflow: bool = False
    hidden: str = ""
    harmless: bool = False
    behind: bool = False
    led_to: Fault | None = None
    rank: int | None = None
    taped: bool = True

    @property
    def module(self) -> str:
        """Path in the model; empty for the root and outside."""
        return self.location.module

    @property
    def module_class(self) -> str:
        """The module's class."""
        return self.location.module_class

    @property
    def where(self) -> str:
        """The user's source line: `train.py:9`."""
        return self.location.where

    @property
    def code(self) -> str:
        """The text of that line."""
        return self.location.code

    @property
    def placed(self) -> str:
        """The place as it follows an op: `in 2, train.py:9` or `outside any module, train.py:7`."""
        return within(self.module, self.module_class) + (f", {self.where}" if self.where else "")

    @property
    def place(self) -> str:
        """Rank (of several), module and source line in one phrase."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        kind = f" ({self.module_class})" if self.module_class else ""
        module = f"{self.module}{kind}" if self.module else ""
        return ", ".join(part for part in (rank, module, self.where) if part) or "the script"

    @property
    def damage(self) -> str:
        """What is not finite after the step and was before it, the loss if nothing else is."""
        return "the loss" if self.spoiled == Spoiled() and "loss" in self.reached else str(self.spoiled)

    @property
    def of_the_scale(self) -> bool:
        """Whether only the present loss scale is too large for it, and nothing spoiled outlives the step.

        True where a run with a lower scale was finite, or could not be tried.
        """
        lowered = any(c.kind == "loss_scale" and c.status != FAILS for c in self.cures)
        told = self.underflow or self.hidden or self.spoiled.lasting
        return self.phase == "backward" and lowered and not told

    @property
    def best(self) -> Cure | None:
        """The first cure that works, else the first that was not tried."""
        works = (c for c in self.cures if c.status == WORKS)
        return next(works, next((c for c in self.cures if c.status == UNTRIED), None))

    def same_as(self, other: Fault | None) -> bool:
        """Whether both have one origin: phase, module, op, source line and kind of cause."""
        return other is not None and self._origin() == other._origin()

    def _origin(self) -> tuple[Any, ...]:
        return self.phase, self.module, self.op, self.where, self.cause.kind

    def story(self) -> str:
        """The verdict in a few lines of plain text, without the cures."""
        if not self.taped:
            return "\n".join(self._told_by_notes())
        verb = "flushes to zero" if self.underflow else "is the first op that is not finite"
        lines = [f"{self.phase}: {self.op} {self.placed} {verb}", *self._code()]
        lines += [f"  inputs: {', '.join(map(str, self.inputs))}"]
        lines += [f"  cause: {self.cause.words}", f"  spoiled: {self.damage}"]
        lines += [f"  hidden: {self.hidden}"] if self.hidden else []
        return "\n".join(lines)

    def _told_by_notes(self) -> Sequence[str]:
        place = f" in {self.where}" if self.where else ""
        lines = [
            f"{self.phase}: {self.op or 'the update'}{place}",
            *self._code(),
            f"  cause: {self.cause.words}",
        ]
        last = self.led_to
        if last is not None:
            lines += [f"  then: step {last.step + 1}: {last.phase}: {last.op} in {last.place} is not finite"]
        return lines

    def _code(self) -> list[str]:
        return [f"  {self.code}"] if self.code else []

    def summary(self) -> str:
        """The verdict in a few lines of plain text."""
        return "\n".join([self.story(), *(f"  {cure}" for cure in self.cures)])

    def __str__(self) -> str:
        return self.summary()

    def as_dict(self) -> dict[str, Any]:
        """The fault as plain values: a row of the doctor's JSON."""
        plain = (
            "step",
            "phase",
            "module",
            "op",
            "where",
            "code",
            "module_class",
            "aten",
            "harmless",
            "behind",
        )
        plain += ("origin", "underflow", "hidden", "rank")
        return {name: getattr(self, name) for name in plain} | {
            "cause": {"kind": self.cause.kind, "text": self.cause.words, "times": self.cause.times},
            "cures": [dict(vars(cure)) for cure in self.cures],
            "summary": self.story(),
            "inputs": [{"what": str(t), "amax": t.amax} for t in self.inputs],
            "outputs": [{"what": str(t), "amax": t.amax} for t in self.outputs],
            "spoiled": self.damage,
            "spoiled_lasting": list(self.spoiled.lasting),
            "reached": list(self.reached),
            "passed_on": list(self.passed_on),
            "weight": self.cause.weight,
        }
