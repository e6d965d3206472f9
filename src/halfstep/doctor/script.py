"""The doctor's way with a script: run it watched in a process of its own, and look at steps of it again.

The script is not changed. Where a run can be copied (see `copies`), copies of it tape the steps that matter
and try the cures while it runs. What they could not do is done afterwards in runs of their own, which go the
same way up to that step; where nothing can be copied, that is everything.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from halfstep.distributed import rank, world_size
from halfstep.doctor.document import Document, keep_latest
from halfstep.doctor.inquiry import Inquiry
from halfstep.doctor.ledger import Ledger, beside
from halfstep.doctor.order import Found, Order, Suspect
from halfstep.doctor.process import run_in_process
from halfstep.doctor.quiet import all_faults
from halfstep.doctor.ranks import from_all, meeting_place, of_rank, one_document, seen_by_all, suspects
from halfstep.errors import ConfigError
from halfstep.numerics.fault import Cure, Fault
from halfstep.numerics.judge import Again, Seen

#: Lines of a script's warnings that are shown.
_WARNINGS = 5


def examine_script(
    path: Path,
    args: Sequence[str] = (),
    steps: int = 40,
    seed: int = 0,
    copies: bool = True,
    forked: bool = False,
) -> Document:
    """Runs the script and returns what was found; without `copies` each look is a run of its own.

    `forked`: runs are copies of this process (see `process.can_copy`), which saves loading torch once more.

    Over ranks every rank calls it, runs its own process of the script, and gets the findings of all as one.

    Raises:
        ConfigError: no such script, it is not Python, it fails before its first step, or never trains.
    """
    from halfstep.numerics.lint import lint_source

    if not path.is_file():
        raise ConfigError(f"no script {path}; expected a recipe or the path of a .py file")
    try:
        findings = lint_source(path.read_text(encoding="utf-8"), path.name)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a Python script: {error}") from error
    alone = world_size() == 1
    order = Order(str(path), tuple(args), steps, seed, copies=copies and alone, forked=forked and alone)
    document = _examined(order)
    document.lint = [*dict.fromkeys(findings), *document.lint]
    return document


def _examined(order: Order) -> Document:
    everyone = from_all(_first_run(order))
    own = everyone[rank()]
    inquiry = Inquiry(Anew(order), order.steps, own.seen)
    for suspect in suspects(everyone):
        inquiry.look(suspect)
    count = len(own.ledger.notes)
    bad = [one.first_bad for one in everyone if one.first_bad is not None]
    if not (inquiry.seen.counts or bad) and count:
        index = min(1, count - 1)
        inquiry.look(Suspect(index, own.ledger.notes[index].number))
    documents = [_composed(one, of_rank(inquiry.seen.faults, r)) for r, one in enumerate(everyone)]
    document = one_document(documents)
    document.counts, document.notes = inquiry.seen.counts, inquiry.notes
    document.lint = list(dict.fromkeys(inquiry.seen.lint))
    if document.steps == 0 and not document.bad:
        why = document.error or "it ended without stepping an optimizer, GradScaler or Session"
        raise ConfigError(f"{order.script} took no training step: {why}")
    settled = all(one.ledger.settled() for one in everyone)
    index = min(bad, default=min(4, count - 1))
    for fault in document.bad:
        fault.harmless = fault.of_the_scale and settled
        if not fault.harmless:
            inquiry.try_from_start(fault, max(index, own.ledger.index_of(fault.step)), whole=not bad)
    return document


class Anew:
    """Runs the script again from its start, on every rank in a process of its own."""

    def __init__(self, order: Order) -> None:
        self._order = dataclasses.replace(order, copies=False)

    def run(self, again: Again) -> Seen | None:
        """What the steps to run again showed, on all ranks."""
        order = dataclasses.replace(self._order, again=again)
        return seen_by_all(run_in_process(order, meeting_place())[0])


def _composed(found: Found, traced: Sequence[Fault]) -> Document:
    """The document of a run with its faults: what the tape showed of it and what its notes tell."""
    document, ledger = found.document, found.ledger
    document.bad = all_faults(found.notes, traced)
    for fault in document.bad:
        _say_since(fault, ledger)
        _say_outlier(fault, ledger)
    until = document.bad[0].step if document.bad else None
    keep_latest(document, until)
    document.beside = {} if until is None else beside(ledger, until)
    return document


def _say_since(fault: Fault, ledger: Ledger) -> None:
    """Adds to a cause that lies in a weight the step from which on it was so."""
    since = ledger.since(fault.cause.weight, fault.step) if fault.cause.weight else None
    if since is not None:
        fault.cause = dataclasses.replace(fault.cause, text=f"{fault.cause.text}, since step {since + 1}")


def _say_outlier(fault: Fault, ledger: Ledger) -> None:
    """Adds to a cause within forward or backward the batch it came of, where that is out of proportion."""
    name, told = ledger.outlier(fault.step)
    if not told or fault.phase not in ("forward", "backward") or fault.cause.kind == "data" or fault.harmless:
        return
    fault.cause = dataclasses.replace(fault.cause, text=f"{fault.cause.text}; {told}")
    words = "drop or clamp such batches where they are loaded"
    fault.cures.append(Cure("data", words, f"{name}.clamp(-k, k)"))


def _first_run(order: Order) -> Found | str:
    """This rank's run. A str says why there is nothing."""
    found, said = run_in_process(order, meeting_place())
    if found is None:
        last = (said.strip().splitlines() or ["no message"])[-1]
        return f"{order.script} could not be run: {last}"
    found.document.warnings = _warnings(said)
    return found


def _warnings(text: str) -> list[str]:
    """The script's own warnings on standard error, each once."""
    lines = [line.strip() for line in text.splitlines() if "Warning" in line or "WARNING" in line]
    lines = [re.sub(r"^\S*/(?:in_script\.py:\d+: |(?=[^/\s]+:\d+: ))", "", line) for line in lines]
    return [line[:300] for line in dict.fromkeys(lines)][:_WARNINGS]
