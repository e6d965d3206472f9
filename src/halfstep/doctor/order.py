"""What the process that runs a script is told, and what it tells back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from halfstep.doctor.document import Document, Fault


@dataclass(frozen=True)
class Order:
    """`steps`: iterations to run. `armed`: the step (an index) to tape, where the run cannot be copied;
    `cure`: the spec of one to try, from step `cure_at` on; `copies`: whether the run may be copied;
    `result`: the file for what was found; `forked`: whether the run's process is a copy of the first one's.
    """

    script: str
    args: tuple[str, ...]
    steps: int
    seed: int
    armed: int | None = None
    cure: tuple[Any, ...] | None = None
    cure_at: int = 1
    copies: bool = True
    forked: bool = False
    result: str = ""


@dataclass(frozen=True)
class Job:
    """What a copy of a run is asked: go on to step `at` with the cure `spec` in place (if any).

    `kind`: "trace" tapes that step; "trial" runs it and `more` steps after it and says whether all was well;
    "go_on" does the same and traces the first step that is not.
    """

    kind: str
    at: int
    spec: tuple[Any, ...] | None = None
    more: int = 0
    tape: bool = False
    seconds: float = 30.0


@dataclass
class Traced:
    """What a copy found. `well`: nothing was wrong, else it was at step `bad_at`; `applied`: the cure was."""

    faults: list[Fault] = field(default_factory=list[Fault])
    counts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    lint: list[Any] = field(default_factory=list[Any])
    well: bool = False
    bad_at: int | None = None
    applied: bool = True


@dataclass
class RunFindings:
    """What a run found. `steps`: its iterations; `numbers`: the iteration of each optimizer's step.

    `first_bad`: the index of the first bad step; `traced`: whether one was taped.
    """

    document: Document
    steps: int
    first_bad: int | None
    applied: bool
    traced: bool
    settled: bool
    error: str | None = None
    numbers: tuple[int, ...] = ()

    def number(self, index: int) -> int:
        """The iteration of the step with this index."""
        return self.numbers[index] if index < len(self.numbers) else index

    def index(self, number: int) -> int:
        """The index of the last step of an iteration."""
        return max((i for i, own in enumerate(self.numbers) if own == number), default=number)
