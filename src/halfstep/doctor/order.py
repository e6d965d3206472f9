"""What processes that run a script tell each other: what to run, what to run again, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from halfstep.doctor.document import Document, Fault
from halfstep.doctor.ledger import Ledger
from halfstep.doctor.quiet import RunNotes


@dataclass(frozen=True)
class Again:
    """What to run again: the step with index `at` and `more` steps after it.

    `cure`: what to put in place just before that step, or (`from_start`) at the start of the run. `taped`:
    the index of a step to tape. `seconds`: after how long a copy is ended.
    """

    at: int
    cure: tuple[Any, ...] | None = None
    more: int = 0
    taped: int | None = None
    from_start: bool = False
    seconds: float = 30.0


@dataclass
class Seen:
    """What running again showed. `bad_at`: the first step from `at` on that was bad; None if all were well.

    `applied`: whether the cure was put in place and met what it changes; `falls`: whether the loss scale goes
    down by itself. `faults`: what the tape showed; of a run that was cured from its start, all faults.
    """

    faults: list[Fault] = field(default_factory=list[Fault])
    counts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    lint: list[Any] = field(default_factory=list[Any])
    bad_at: int | None = None
    applied: bool = True
    falls: bool = False


@dataclass(frozen=True)
class Suspect:
    """A step to look at again: its index, its iteration, whether it was bad or only worth a look, and whether
    it left something lasting that is not finite."""

    index: int
    number: int
    bad: bool = False
    spoiled: bool = False


@dataclass(frozen=True)
class Order:
    """A script to run for `steps` iterations, or, with `again`, until that part of it has been run.

    `copies`: whether the run may be copied; `forked`: whether its process is a copy of the first one's;
    `result`: the file for what was found.
    """

    script: str
    args: tuple[str, ...]
    steps: int
    seed: int
    again: Again | None = None
    copies: bool = True
    forked: bool = False
    result: str = ""


@dataclass
class Found:
    """What a run found: a document without faults, the notes of the run, what its copies showed (`seen`), and
    the steps that could not be looked at."""

    document: Document
    notes: RunNotes
    seen: Seen = field(default_factory=Seen)
    suspects: list[Suspect] = field(default_factory=list[Suspect])

    @property
    def ledger(self) -> Ledger:
        """The notes by step."""
        return self.notes.ledger

    @property
    def first_bad(self) -> int | None:
        """The index of the first bad step."""
        return next((index for index, note in enumerate(self.ledger.notes) if note.bad), None)
