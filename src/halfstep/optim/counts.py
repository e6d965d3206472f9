"""Step counts of shards: one without elements counts as the others do, and takes over what they know.

No arithmetic reads the count of an empty shard, but a checkpoint holds one count for all ranks, and that
may be the one of the rank that has no elements.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.distributed.reduce import all_parts
from halfstep.errors import HalfstepWarning
from halfstep.optim.backends import foreach_add_

Entry = Mapping[str, Any]


def advance(steps: Sequence[Tensor], found_inf: bool | Tensor | None) -> None:
    """Count a step, unless it was skipped; a flag on an accelerator is not read back."""
    if isinstance(found_inf, Tensor) and not all(step.is_cpu for step in steps):
        for step in steps:
            step.add_((found_inf == 0).to(step.device, step.dtype))
    elif not found_inf:
        foreach_add_(list(steps), 1)


def agree(groups: Sequence[Any], counts: Sequence[Tensor | None], own: Sequence[bool]) -> None:
    """Give the counts that are not this rank's `own` the largest over `groups`; every rank must call it."""
    if not counts:
        return
    largest = torch.tensor([0.0 if count is None else float(count) for count in counts])
    for group in groups:
        largest = torch.stack(all_parts(largest, group)).amax(0)
    for count, most, mine in zip(counts, largest.tolist(), own):
        if count is not None and not mine:
            count.fill_(most)


def mend(entries: Sequence[tuple[str, Entry]], moments: Sequence[str]) -> None:
    """Give a count of 0 beside moments that are not 0 the largest of its group, in place, with a warning.

    Files written from shards held such a 0 where the rank that wrote the count had no elements.
    """
    counts = [float(entry["step"]) for _, entry in entries]
    most = max(counts, default=0.0)
    if most == 0 or 0 not in counts:
        return
    lost = [
        (name, entry)
        for (name, entry), count in zip(entries, counts)
        if count == 0 and any(bool(entry[key].any()) for key in moments)
    ]
    for _, entry in lost:
        entry["step"].fill_(most)
    if lost:
        warnings.warn(
            f"the checkpoint counts 0 steps for {', '.join(name for name, _ in lost[:3])}, whose moments are "
            f"not 0 (saved from shards of which one rank had no elements): {most:.0f} is taken, the most of "
            "its parameter group",
            HalfstepWarning,
            stacklevel=4,
        )
