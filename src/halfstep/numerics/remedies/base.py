"""What a remedy is: a change that may end a fault, tried on steps from outside and written into a script.

A subclass of `Remedy` is one kind, as a rule in a file of its own: when it is worth trying (`cases` and
`propose`), how it is put in place around steps (`apply`), how it is written into a script (`edit`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from halfstep.numerics.cause import Cause, out_of_domain
from halfstep.numerics.remedies.source import Script, with_edit
from halfstep.numerics.snapshot import StepParticipants
from halfstep.numerics.tape import Node, OpLocation

UNTRIED, WORKS, FAILS = "untried", "works", "does not help"

Met = Callable[[], bool]
"""Says, later, whether a remedy that was put in place has met what it is to change."""


def always() -> bool:
    """Return True: what the remedy changes is met in any step."""
    return True


def where(location: OpLocation) -> str:
    """Return the place of an op as it ends a text: ` at train.py:9`."""
    return f" at {location.where}" if location.where else ""


@contextmanager
def with_attributes(thing: Any, **values: Any) -> Generator[None]:
    """Set attributes of `thing` for the block."""
    before = {name: getattr(thing, name) for name in values}
    instance_names = {name for name in values if name in vars(thing)}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if name in instance_names or name not in vars(thing):  # else it was a class's, and is again
                setattr(thing, name, value)
            else:
                delattr(thing, name)


@dataclass(frozen=True)
class Evidence:
    """What the tape knows of a bad op: by it a remedy says whether it is worth trying.

    `root`: the loss, scaled; `culprit`: the earlier op at fault, where it is not this one; `later`: the ops
    that ran after it.
    """

    node: Node
    cause: Cause
    parts: StepParticipants
    root: float = 0.0
    culprit: Node | None = None
    later: Sequence[Node] = ()

    @property
    def case(self) -> str:
        """Return the kind of cause, or what says more of what can be done than that.

        These are "state" (of an optimizer, in 16 bits or fewer), "power" and "beyond" (one, or another value,
        beyond the range of fp32), "edge" (of an op's domain) and "advice" (the cause says what to do).
        """
        node, cause, low = self.node, self.cause, self.cause.format in ("fp16", "e4m3fn", "e5m2")
        if node.phase == "optimizer" and low and cause.kind != "learning rate":
            return "state"
        if cause.kind == "mathematics" and (node.base != "pow" or out_of_domain(node)):
            return "advice" if cause.advice is not None else "power" if node.op == "exp" else "edge"
        if cause.kind == "mathematics" or (cause.kind == "range" and not low):
            return "power" if self.power and node.phase != "backward" else "beyond"
        return cause.kind

    @property
    def power(self) -> float:
        """Return the base of a power that becomes too large; 0 for other ops."""
        node = self.node
        base = node.args[0] if node.op == "pow" else math.e if node.op == "exp" else 0.0
        return float(base) if isinstance(base, int | float) and base > 1 else 0.0

    @property
    def bits(self) -> int:
        """Return by how many powers of two a value has to become smaller."""
        return max(1, math.ceil(math.log2(self.cause.times or 2)) + 1)

    def name_of(self, t: Tensor | None) -> str:
        """Return the user's name for a tensor that the op read in forward; empty where it has none or two."""
        if t is None or self.node.phase != "forward":
            return ""
        known = self.node.names.items()
        names = [n for n, v in known if v.shape == t.shape and v.dtype == t.dtype and torch.equal(v, t)]
        return names[0] if len(names) == 1 else ""


@dataclass(frozen=True)
class Remedy:
    """One dose of a change, as plain values, so that any process can apply it; `text`, `code` describe it.

    `scope`: what it changes: one op, each step, or what may have to be so from the start of the run. `cases`:
    of which evidence `propose` is asked. `same_ops`: whether the step runs the very same ops with it, so that
    ranks that try it meet. `keeps_updates`: whether updates are those of fp32. `removes`: a dtype that no
    result may have once it works.
    """

    text: str = field(default="", kw_only=True, compare=False)
    code: str = field(default="", kw_only=True, compare=False)

    kind: ClassVar[str] = "advice"
    scope: ClassVar[Literal["op", "step", "run"]] = "step"
    cases: ClassVar[tuple[str, ...]] = ()
    same_ops: ClassVar[bool] = False
    keeps_updates: ClassVar[bool] = False
    removes: ClassVar[torch.dtype | None] = None

    @classmethod
    def propose(cls, evidence: Evidence) -> Iterable[Cure]:
        """Return the cures of this kind for a bad op."""
        return ()

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Apply the change to steps of these parts until the stack closes; None where that cannot be."""
        return None

    def replace_names(self, stack: ExitStack) -> bool:
        """Replace what names in a script mean until the stack closes; return whether any is replaced."""
        return False

    def edit(self, text: str, location: OpLocation) -> Iterator[str]:
        """Yield a script's text with the change, once for each way in which it may be written.

        `location`: the place of the op at fault.
        """
        yield with_edit(text, self.edit_script)

    def edit_script(self, script: Script) -> None:
        """Write the change, where there is one way to do so."""


@dataclass(frozen=True)
class Both(Remedy):
    """Two remedies of ops together, where neither works alone."""

    first: Remedy
    second: Remedy
    kind = "both"

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Apply both."""
        both = [dose.apply(parts, stack) for dose in (self.first, self.second)]
        return None if None in both else lambda: all(met is not None and met() for met in both)

    def edit(self, text: str, location: OpLocation) -> Iterator[str]:
        """Write the one of the lower line first: line numbers above it stay."""
        lower, upper = sorted((self.first, self.second), key=lambda dose: -getattr(dose, "line", 0))
        for half in lower.edit(text, location):
            yield from upper.edit(half, location)


@dataclass
class Cure:
    """What to change.

    `kind`: full, chain, scale, epsilon, clamp, shift, logsumexp, loss, loss_scale, bf16, masters, rate,
    clear, data or advice.
    `status`: "works" or "does not help" where the step was run again with it (over several ranks: on all of
    them together), else "untried"; `over`: in how many steps a run with it stayed well. `doses`: what can be
    tried and written into a script, the weakest first.
    """

    kind: str
    text: str
    code: str = ""
    status: str = UNTRIED
    doses: list[Remedy] = field(default_factory=list[Remedy])
    over: int = 0

    @classmethod
    def of(cls, *doses: Remedy) -> Cure:
        """Make a cure of doses, each stronger than the one before."""
        return cls(doses[0].kind, doses[0].text, doses[0].code, doses=[*doses])

    @property
    def verdict(self) -> str:
        """Return the result of its trial: `works over 4 steps`."""
        return self.status + (f" over {self.over} steps" if self.over > 1 else "")

    def mark_working(self, dose: Remedy, over: int) -> None:
        """Record that this dose works, in so many steps."""
        self.text, self.code = dose.text, dose.code
        self.status, self.doses, self.over = WORKS, [dose], over

    def as_dict(self) -> dict[str, Any]:
        """Return the cure as plain values."""
        specs = [(d.kind, *astuple(d)[2:]) for d in self.doses]  # without its text and its code
        return vars(self) | {"specs": specs, "doses": [(d.text, d.code) for d in self.doses]}

    def __str__(self) -> str:
        return f"cure ({self.verdict}): {self.text}{f': {self.code}' if self.code else ''}"
