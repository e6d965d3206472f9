"""What processes that run a script tell each other: what to run, what to run again, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfstep.doctor.document import Document
from halfstep.doctor.ledger import Ledger
from halfstep.doctor.quiet import RunNotes
from halfstep.numerics.judge import Again, Seen


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

    def run(self) -> Found | Seen | None:
        """Carries it out in this process."""
        from halfstep.doctor.in_script import run_order

        return run_order(self)


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
