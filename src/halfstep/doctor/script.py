"""Examine a script: run it watched in a process of its own, and rerun steps of it under the tape.

The script is not changed. Where a run can be copied (see `process.ForkPoint`), copies of it tape the steps
that matter and try the cures while it runs. What they could not do is done afterwards in runs from the start,
which do the same up to that step; where nothing can be copied, that is everything. Over ranks of torchrun
each runs the script in a process of its own, which meet at a new port in each run; all ranks get the same
findings, so all decide the same next run, and the findings of all become one verdict.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from halfstep.distributed import gather, rank, world_size
from halfstep.doctor.document import INTERRUPT, Document, keep_latest
from halfstep.doctor.edit import as_diff, mend_script, write_codes, write_plan
from halfstep.doctor.files import MUTED
from halfstep.doctor.in_script import run_order
from halfstep.doctor.ledger import Ledger, all_faults, beside, smaller_data
from halfstep.doctor.process import Interrupted, Order, RunFindings, run_in_process
from halfstep.errors import ConfigError
from halfstep.numerics.fault import Fault, Investigation, RerunRequest, RerunResult, SuspectStep

_PHASES = ("prepare", "forward", "backward", "optimizer")
#: What a rank says whose partner is gone: it is not where things went wrong.
_LEFT_ALONE = re.compile(
    r"gloo|nccl|DistBackendError|DistNetworkError|[Cc]onnection|peer|process group", re.I
)


def rendezvous_env() -> dict[str, str]:
    """Return the environment by which the script's processes find each other, the same on all ranks."""
    if world_size() == 1:
        return dict(os.environ)
    ports: list[Any] = [None]
    if rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            ports = [free.getsockname()[1]]
    dist.broadcast_object_list(ports, src=0)
    return {**os.environ, "MASTER_PORT": str(ports[0]), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def from_all(run_findings: RunFindings | str) -> list[RunFindings]:
    """Return the findings of all ranks, on each; ConfigError where a rank could not be run (a str)."""
    everyone: list[RunFindings | str] = gather(run_findings)
    errors = {number: entry for number, entry in enumerate(everyone) if isinstance(entry, str)}
    if errors:
        first = min(errors, key=lambda number: (_is_left_alone(errors[number]), number))
        raise ConfigError(_by_rank(first, errors[first]))
    return [entry for entry in everyone if isinstance(entry, RunFindings)]


def merge_results(rerun_result: RerunResult | None) -> RerunResult | None:
    """Merge the results of a rerun over ranks; None where one of them could not run."""
    everyone: list[RerunResult] = [entry for entry in gather(rerun_result) if entry is not None]
    if len(everyone) < world_size():
        return None
    return RerunResult(
        faults=origins([entry.faults for entry in everyone]),
        counts=everyone[0].counts,
        lint=list(dict.fromkeys(finding for entry in everyone for finding in entry.lint)),
        bad_at=min((entry.bad_at for entry in everyone if entry.bad_at is not None), default=None),
        applied=all(entry.applied for entry in everyone),
        falls=any(entry.falls for entry in everyone),
        recovers=all(entry.recovers or entry.bad_at is None for entry in everyone),
        steps=min(entry.steps for entry in everyone),
        low=any(entry.low for entry in everyone),
        error=next((entry.error for entry in everyone if entry.error), ""),
    )


def one_document(everyone: Sequence[Document]) -> Document:
    """Return rank 0's document with the mean loss and the faults of all ranks, each where it began."""
    first = everyone[0]
    if len(everyone) == 1:
        return first
    errors = [(_is_left_alone(d.error), d.steps, r, d.error) for r, d in enumerate(everyone) if d.error]
    first.error = _by_rank(min(errors)[2], min(errors)[3]) if errors else None
    first.steps = min(document.steps for document in everyone)
    first.losses = [
        sum(losses) / len(everyone) for losses in zip(*(document.losses for document in everyone))
    ]
    first.bad = origins([document.bad for document in everyone])
    first.lint = list(dict.fromkeys(finding for document in everyone for finding in document.lint))
    first.warnings = list(dict.fromkeys(text for document in everyone for text in document.warnings))
    first.lost = [row for document in everyone for row in document.lost]
    where = {fault.rank for fault in first.bad[:1]} - {None}
    first.beside = everyone[where.pop() or 0].beside if where else first.beside
    return first


def of_rank(faults: Sequence[Fault], number: int) -> list[Fault]:
    """Return faults with the rank that has them."""
    return [copy.deepcopy(fault) for fault in faults if fault.rank in (None, number)]


def origins(by_rank: Sequence[Sequence[Fault]]) -> list[Fault]:
    """Return the faults of each step where they began: a gradient from other ranks is bad on every rank."""
    if len(by_rank) == 1:
        return list(by_rank[0])
    first_faults: list[Fault] = []
    steps = sorted({fault.step for faults in by_rank for fault in faults})
    for step in steps:
        step_faults = [(r, f) for r, faults in enumerate(by_rank) for f in faults if f.step == step]
        earliest = min(_order(fault) for _, fault in step_faults)
        for number, fault in step_faults:
            if _order(fault) != earliest and fault.masked_by is None:
                continue
            twin = next((f for f in first_faults if f.step == step and f.same_as(fault)), None)
            if twin is None:
                fault.rank = number
                first_faults.append(fault)
            elif twin.rank != number:
                twin.rank = None  # of more ranks than one
    return first_faults


def _order(fault: Fault) -> tuple[int, bool]:
    phase = _PHASES.index(fault.phase) if fault.phase in _PHASES else len(_PHASES)
    return phase, not fault.origin


def _is_left_alone(error: str | None) -> bool:
    return bool(_LEFT_ALONE.search(error or ""))


def _by_rank(number: int, text: str | None) -> str:
    return f"rank {number}: {text}" if world_size() > 1 else str(text)


#: Lines of a script's warnings that are shown, and letters of each.
_WARNINGS, _LONGEST = 5, 300


def examine_script(
    path: Path,
    args: Sequence[str] = (),
    steps: int = 40,
    seed: int = 0,
    copies: bool = True,
    forked: bool = False,
    label: str = "",
    diff: bool = False,
    plan: bool = False,
    module: str = "",
) -> Document:
    """Run the script and return what was found; without `copies` each rerun starts the script again.

    `forked`: runs are copies of this process (see `process.can_copy`), which saves loading torch once more.
    `label`: what errors call it, in place of its path. `diff`, `plan`: write the cures that work into the
    script, or as a plan, and examine the script with these too. `module`: the name by which `python -m`
    starts the script.

    Over ranks every rank calls it, runs its own process of the script, and gets the findings of all as one.

    Raises:
        ConfigError: no such script, it is not Python, it fails before its first step, or never trains.
    """
    from halfstep.numerics.lint import lint_source

    if not path.is_file():
        raise ConfigError(f"no script {path}; expected a recipe or the path of a .py file")
    try:
        text = path.read_bytes().decode("utf-8")  # with its own line endings
        findings = lint_source(text, path.name)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a Python script: {error}") from error
    single_rank = world_size() == 1
    order = Order(
        str(path), tuple(args), steps, seed, copies=copies and single_rank, forked=forked and single_rank,
        module=module,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="halfstep-") as files:
        return _examine_and_mend(dataclasses.replace(order, files=files), text, label, findings, diff, plan)


def _examine_and_mend(
    order: Order, text: str, label: str, findings: Sequence[Any], diff: bool, plan: bool
) -> Document:
    """Examine the script, and write its cures as a diff or a plan if these are asked for."""
    path = Path(order.script)
    document = _examine(order, label or order.script)
    document.lint = [*dict.fromkeys(findings), *document.lint]
    write_codes(text, path, document.bad)
    attempt = partial(_examine_text, order, document)
    try:
        if document.ended_by == INTERRUPT:
            raise KeyboardInterrupt
        document.diff = as_diff(path, text, mend_script(text, document, attempt)) if diff else ""
        document.plan = write_plan(text, document, attempt) if plan else ""
    except KeyboardInterrupt:
        document.ended_by = INTERRUPT
    if (diff or plan) and document.ended_by == INTERRUPT:
        text = "was interrupted before it had written the cures; --steps takes fewer steps"
        document.notes.append(f"the doctor {text}")
    elif (diff or plan) and not document.faults:
        lint = "wrote no cure: what lint found stands with its cure above, and no step went wrong of it"
        document.notes.append(f"the doctor {lint if document.lint else 'found nothing to cure'}")
    return document


def _examine_text(order: Order, document: Document, text: str) -> Document | None:
    """Examine another text of the script; None where it does not run as far as the script itself."""
    try:
        result = _examine(dataclasses.replace(order, text=text), order.script)
    except ConfigError:
        return None
    if result.ended_by == INTERRUPT:
        raise KeyboardInterrupt
    through = result.error is None or result.error == document.error
    return result if through and result.steps >= document.steps else None


def _examine(order: Order, label: str) -> Document:
    everyone = from_all(_first_run(order, label))
    local_findings = everyone[rank()]
    rerun = FreshProcess(order, [note.loss for note in local_findings.ledger.notes])
    rerun.interrupted = any(entry.document.ended_by == INTERRUPT for entry in everyone)
    investigation = Investigation(
        rerun, order.steps or len(local_findings.ledger.notes), local_findings.rerun_result
    )
    unchecked_steps = sorted(
        (s for entry in everyone for s in entry.unchecked_steps),
        key=lambda s: (bool(s.bad), s.lasting_damage),
    )
    by_index = {suspect.index: suspect for suspect in unchecked_steps}  # the gravest of each step
    for index in sorted(by_index):
        investigation.rerun(by_index[index])
    count = len(local_findings.ledger.notes)
    bad = [entry.first_bad for entry in everyone if entry.first_bad is not None]
    if not (investigation.rerun_result.counts or bad) and count:
        index = min(1, count - 1)
        investigation.rerun(SuspectStep(index, local_findings.ledger.notes[index].number))
    documents = [
        _compose_document(entry, of_rank(investigation.rerun_result.faults, r))
        for r, entry in enumerate(everyone)
    ]
    document = one_document(documents)
    document.counts, document.notes = (
        investigation.rerun_result.counts,
        [] if rerun.interrupted else [rerun.differs] if rerun.differs else investigation.notes,
    )
    lint = {(f.rule, f.where): f for f in reversed(investigation.rerun_result.lint)}  # the first of a line
    document.lint = [*lint.values()][::-1]
    if document.steps == 0 and rerun.interrupted:
        raise KeyboardInterrupt
    if document.steps == 0 and not document.bad:
        why = document.error or "it ended without stepping an optimizer, GradScaler or Session"
        hint = "; a module of a package starts by its name: halfstep doctor -m package.module"
        why += hint if "attempted relative import" in why else ""
        raise ConfigError(f"{label} took no training step: {why}")
    index = min(bad, default=min(4, count - 1))
    for fault in document.bad:
        at = local_findings.ledger.index_of(fault.step)
        after = (
            0 if fault.masked_by else at
        )  # a step that did not come so in the run itself has none after it
        fault.harmless = fault.of_the_scale and all(entry.ledger.is_recovered(after) for entry in everyone)
        if not fault.harmless:
            investigation.try_from_start(fault, max(index, at), whole=not bad)
    document.ended_by = INTERRUPT if rerun.interrupted else document.ended_by
    return document


class FreshProcess:
    """Reruns the script from its start, on every rank in a process of its own."""

    def __init__(self, order: Order, losses: Sequence[float | None]) -> None:
        self._order, self._losses = order, losses
        self.interrupted = False
        self.differs = ""
        """Where another run went another way than the first, if one did."""

    def run(self, request: RerunRequest) -> RerunResult | None:
        """Return the result of the steps to run again, over all ranks; nothing runs any more after Ctrl-C."""
        if self.interrupted:
            return None
        order = dataclasses.replace(self._order, request=request)
        try:
            result: RerunResult | None = _in_process(order)[0]
        except KeyboardInterrupt:
            self.interrupted = True
            return None
        if result is not None and not request.from_start and self._goes_another_way(result.losses):
            result = None
        return merge_results(result)

    def _goes_another_way(self, losses: Sequence[float | None]) -> bool:
        """Whether the losses before the step are not the first run's, so that it shows nothing of that."""
        for step, (first, other) in enumerate(zip(self._losses, losses)):
            if first is None or other is None or not math.isfinite(first):
                continue
            if not math.isclose(first, other, rel_tol=1e-3, abs_tol=1e-6):
                both = f"the loss of step {step + 1} was {first:.6g} and, from the same seeds, {other:.6g}"
                what = "seed what it draws from elsewhere (the clock, the system)"
                self.differs = f"the script does not repeat, so no step was run again: {both}; {what}"
                return True
        return False


def _compose_document(run_findings: RunFindings, traced: Sequence[Fault]) -> Document:
    """Return the document of a run with its faults, those on the tape and those in the notes."""
    document, ledger = run_findings.document, run_findings.ledger
    document.bad = all_faults(ledger, traced)
    for fault in document.bad:
        _say_outlier(fault, ledger)
    until = document.bad[0].step if document.bad else None
    keep_latest(document, until)
    document.beside = {} if until is None else beside(ledger, until)
    return document


def _say_outlier(fault: Fault, ledger: Ledger) -> None:
    """Add the batch to a cause in forward or backward, where that batch is far too large."""
    drift = ledger.drift(fault.module, fault.step) if fault.cause.kind == "range" and fault.taped else ""
    if drift and not fault.harmless:
        fault.cause = fault.cause.and_also(drift)
    name, text = ledger.outlier(fault.step)
    if not text or fault.phase not in ("forward", "backward") or fault.cause.kind == "data" or fault.harmless:
        return
    fault.cause = fault.cause.and_also(text)
    fault.cures.append(smaller_data(name))


def _in_process(order: Order) -> tuple[Any, str]:
    run = partial(run_order, order)
    again = "" if order.is_first else order.files
    environment = rendezvous_env() | (MUTED if again else {})
    return run_in_process(run, environment, order.forked, order.request is None, again)


def _first_run(order: Order, label: str) -> RunFindings | str:
    """Run the script on this rank. A str says why there is no result."""
    try:
        run_findings, stderr = _in_process(order)
    except Interrupted as ended:  # also where the script went on, or ended well
        run_findings, stderr = ended.args
        run_findings.document.ended_by = INTERRUPT
    if run_findings is None:
        last = (stderr.strip().splitlines() or ["no message"])[-1]
        return f"{label} could not be run: {last}"
    run_findings.document.warnings = _warnings(stderr)
    last = stderr.strip().rpartition("\n")[2]
    error = run_findings.document.error or SystemExit.__name__
    if run_findings.document.steps == 0 and error.startswith(SystemExit.__name__) and "error" in last:
        run_findings.document.error = (
            f"it said {last!r}; its own options go after --: halfstep doctor {label} -- ..."
        )
    return run_findings


def _warnings(text: str) -> list[str]:
    """Return the script's own warnings on standard error, each once."""
    lines = [line.strip() for line in text.splitlines() if "Warning" in line or "WARNING" in line]
    lines = [re.sub(r"^\S*/(?:in_script\.py:\d+: |(?=[^/\s]+:\d+: ))", "", line) for line in lines]
    short = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..." for line in dict.fromkeys(lines)]
    more = len(short) - _WARNINGS
    return short[:_WARNINGS] + ([f"and {more} other things"] if more > 0 else [])
