"""The doctor's way with a script: run it watched in a process of its own, with copies that are traced.

The script is not changed. Where a run can be copied (see `checkpoints`), one run is enough: copies of it tape
the steps that matter and try the cures. Elsewhere the script is run again with the tape armed at the first
bad step, and again with each cure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from halfstep.distributed import world_size
from halfstep.doctor.document import CureFound, Document, Fault
from halfstep.doctor.order import Order, RunFindings
from halfstep.doctor.process import run_in_process
from halfstep.doctor.ranks import agreed, meeting_place
from halfstep.errors import ConfigError

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
    found = _child(order)
    if found.steps == 0 and not found.document.bad:
        why = found.error or "it ended without stepping an optimizer, GradScaler or Session"
        raise ConfigError(f"{path} took no training step: {why}")
    if found.first_bad is not None and not found.traced:
        _trace_again(order, found)
    elif found.first_bad is None and not found.document.counts:
        _trace_again(order, found, min(1, len(found.numbers) - 1))
    document = found.document
    for fault in document.bad:
        fault.harmless = _is_harmless(fault, found)
        if not fault.harmless:
            _try_untried(order, found, fault)
    document.lint = [*dict.fromkeys(findings), *document.lint]
    return document


def _trace_again(order: Order, found: RunFindings, armed: int | None = None) -> None:
    """A run of its own with the tape armed, where no copy could do it."""
    document = found.document
    index = found.first_bad if armed is None else armed
    assert index is not None
    traced = _child(dataclasses.replace(order, steps=found.number(index) + 1, armed=index, copies=False))
    document.counts, document.lint = traced.document.counts, traced.document.lint
    if not traced.document.counts:
        document.notes.append("the traced run did not reach that step: the script is not deterministic")
    elif found.first_bad is not None and not traced.document.bad:
        document.notes.append(
            f"step {found.number(index) + 1} was bad in the first run and not when it was traced: "
            "nondeterminism, or a compiled region that differs from eager"
        )
    document.bad = [*traced.document.bad, *document.bad]
    for fault in traced.document.bad:
        for cure in fault.cures:
            _try_from_start(order, found, fault, cure, index)


def _try_untried(order: Order, found: RunFindings, fault: Fault) -> None:
    """Cures that need a run of their own: another dtype of the weights, an earlier rate."""
    index = found.first_bad if found.first_bad is not None else min(4, len(found.numbers) - 1)
    for cure in fault.cures:
        if cure.status == "untried" and cure.specs and cure.specs[0][0] in ("bf16", "masters", "rate"):
            _try_from_start(order, found, fault, cure, max(index, found.index(fault.step)))


def _try_from_start(order: Order, found: RunFindings, fault: Fault, cure: CureFound, index: int) -> None:
    """Runs the script with each dose of a cure in place, and writes down whether it helped."""
    quiet = found.first_bad is None
    number = found.number(index)
    steps = found.steps if quiet else min(number + 4, found.steps)
    lower = [("lowest scale", *spec) for spec in cure.specs if fault.phase == "forward"]
    for spec in (*cure.specs, *(spec for spec in lower if spec[1] not in ("bf16", "rate", "masters"))):
        taped = fault.underflow or bool(fault.hidden)
        steps = number + 1 if taped else steps
        armed = index if taped else None
        from_step = 1 if quiet or spec[0] == "rate" else index
        cured = _child(
            dataclasses.replace(order, steps=steps, armed=armed, cure=spec, cure_at=from_step, copies=False)
        )
        if not cured.applied:
            continue
        faults = [f for f in cured.document.bad if not _is_harmless(f, cured)]
        gone = not any(_alike(f, fault) for f in faults)
        early = cured.first_bad is not None and cured.first_bad < index and cured.settled
        well = gone and not cured.error and (cured.first_bad is None or early)
        cure.status = "does not help"
        if well:
            cure.settle(spec[1:] if spec in lower else spec)
            return


def _alike(one: Fault, other: Fault) -> bool:
    """Whether a fault is still there; the next op of a line may have taken over from the first."""
    return (one.phase, one.module, one.cause.kind) == (other.phase, other.module, other.cause.kind)


def _is_harmless(fault: Fault, found: RunFindings) -> bool:
    """A backward overflow that a dynamic scale skipped while it found its place; nothing lasting spoiled."""
    lowered = any(c.kind == "loss_scale" and c.status != "does not help" for c in fault.cures)
    return fault.phase == "backward" and lowered and found.settled and not (
        fault.spoiled_lasting or fault.underflow or fault.hidden
    )  # fmt: skip


def _child(order: Order) -> RunFindings:
    """One run of the script, on every rank in a process of its own; what all found, as one."""
    return agreed(_own_child(order, meeting_place()))


def _own_child(order: Order, environment: Mapping[str, str]) -> RunFindings | str:
    """This rank's run. A str says why there is nothing."""
    found, said = run_in_process(order, environment)
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
