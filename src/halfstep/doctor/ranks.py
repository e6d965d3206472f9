"""One verdict over the ranks of torchrun: each rank's process runs the script, what all found is made one.

The processes that torchrun started join each other; the script's own processes meet apart from them, at a
port that is chosen anew for each run. All ranks get the same findings, so all decide the same next run.
"""

from __future__ import annotations

import copy
import os
import re
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from halfstep.distributed import gather, rank, world_size
from halfstep.doctor.document import Document
from halfstep.doctor.order import Found, Suspect
from halfstep.errors import ConfigError
from halfstep.numerics.fault import Fault
from halfstep.numerics.judge import Seen

_PHASES = ("prepare", "forward", "backward", "optimizer")
#: What a rank says whose partner is gone: it is not where things went wrong.
_LEFT_ALONE = re.compile(
    r"gloo|nccl|DistBackendError|DistNetworkError|[Cc]onnection|peer|process group", re.I
)


def meeting_place() -> dict[str, str]:
    """The environment in which the script's processes find each other, the same on all ranks."""
    if world_size() == 1:
        return dict(os.environ)
    told: list[Any] = [None]
    if rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            told = [free.getsockname()[1]]
    dist.broadcast_object_list(told, src=0)
    return {**os.environ, "MASTER_PORT": str(told[0]), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def from_all(found: Found | str) -> list[Found]:
    """What all ranks found, the same on each; ConfigError where one could not be run (a str)."""
    everyone: list[Found | str] = gather(found)
    wrong = {number: one for number, one in enumerate(everyone) if isinstance(one, str)}
    if wrong:
        first = min(wrong, key=lambda number: (_is_left_alone(wrong[number]), number))
        raise ConfigError(_by_rank(first, wrong[first]))
    return [one for one in everyone if isinstance(one, Found)]


def suspects(everyone: Sequence[Found]) -> list[Suspect]:
    """The steps that a rank would have looked at, in their order."""
    found: dict[int, Suspect] = {}
    for one in sorted((s for found in everyone for s in found.suspects), key=lambda s: (s.bad, s.spoiled)):
        found[one.index] = one
    return [found[index] for index in sorted(found)]


def seen_by_all(seen: Seen | None) -> Seen | None:
    """What running again showed on any rank; None where one of them could not."""
    everyone: list[Seen] = [one for one in gather(seen) if one is not None]
    if len(everyone) < world_size():
        return None
    return Seen(
        faults=origins([one.faults for one in everyone]),
        counts=everyone[0].counts,
        lint=list(dict.fromkeys(finding for one in everyone for finding in one.lint)),
        bad_at=min((one.bad_at for one in everyone if one.bad_at is not None), default=None),
        applied=all(one.applied for one in everyone),
        falls=any(one.falls for one in everyone),
    )


def one_document(everyone: Sequence[Document]) -> Document:
    """Rank 0's numbers with the faults of all, each where it began, and the mean of the losses."""
    first = everyone[0]
    if len(everyone) == 1:
        return first
    errors = [(_is_left_alone(d.error), d.steps, r, d.error) for r, d in enumerate(everyone) if d.error]
    first.error = _by_rank(min(errors)[2], min(errors)[3]) if errors else None
    first.steps = min(one.steps for one in everyone)
    first.losses = [sum(losses) / len(everyone) for losses in zip(*(one.losses for one in everyone))]
    first.bad = origins([one.bad for one in everyone])
    first.lint = list(dict.fromkeys(finding for one in everyone for finding in one.lint))
    first.warnings = list(dict.fromkeys(text for one in everyone for text in one.warnings))
    first.lost = [row for one in everyone for row in one.lost]
    where = {fault.rank for fault in first.bad[:1]} - {None}
    first.beside = everyone[where.pop() or 0].beside if where else first.beside
    return first


def of_rank(faults: Sequence[Fault], number: int) -> list[Fault]:
    """The faults that a rank has, as its own."""
    return [copy.deepcopy(fault) for fault in faults if fault.rank in (None, number)]


def origins(by_rank: Sequence[Sequence[Fault]]) -> list[Fault]:
    """The faults of each step where they came first: a gradient that others sent is bad on every rank."""
    if len(by_rank) == 1:
        return list(by_rank[0])
    kept: list[Fault] = []
    steps = sorted({fault.step for faults in by_rank for fault in faults})
    for step in steps:
        here = [(r, f) for r, faults in enumerate(by_rank) for f in faults if f.step == step]
        earliest = min(_order(fault) for _, fault in here)
        for number, fault in here:
            if _order(fault) != earliest and not fault.behind:
                continue
            twin = next((f for f in kept if f.step == step and f.same_as(fault)), None)
            if twin is None:
                fault.rank = number
                kept.append(fault)
            elif twin.rank != number:
                twin.rank = None  # of more ranks than one
    return kept


def _order(fault: Fault) -> tuple[int, bool]:
    phase = _PHASES.index(fault.phase) if fault.phase in _PHASES else len(_PHASES)
    return phase, not fault.origin


def _is_left_alone(error: str | None) -> bool:
    return bool(_LEFT_ALONE.search(error or ""))


def _by_rank(number: int, text: str | None) -> str:
    return f"rank {number}: {text}" if world_size() > 1 else str(text)
