"""Reads a state dict for an optimizer without changing it: what fits is returned, the rest refused."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, is_tensor

from halfstep.distributed import local_of
from halfstep.errors import HalfstepWarning
from halfstep.kernels import codes as L
from halfstep.optim import arguments, checkpoints, saved_masters, shards, storage
from halfstep.optim.shards import PLAIN

if TYPE_CHECKING:
    from halfstep.optim.base import OnePassOptimizer

Group = dict[str, Any]


@dataclass(frozen=True)
class LoadedEntry:
    """This rank's state of a parameter and, where a master says so, its part of the weight."""

    state: Group
    weight: Tensor | None


@dataclass(frozen=True)
class LoadedState:
    """The options of each group, and what each parameter is given."""

    groups: list[Group]
    entries: dict[Tensor, LoadedEntry]


def read(optimizer: OnePassOptimizer, state_dict: Mapping[str, Any]) -> LoadedState:
    """What the optimizer shall hold after it loads `state_dict`; CheckpointError where that does not fit."""
    saved_groups = state_dict["param_groups"]
    sources = checkpoints.match_groups(optimizer.param_groups, saved_groups)
    for group, saved in zip(optimizer.param_groups, saved_groups):
        checkpoints.check_kind(saved, optimizer.algorithm(group).name)
    groups = [_options(group, saved) for group, saved in zip(optimizer.param_groups, saved_groups)]
    found: dict[Tensor, LoadedEntry] = {}
    for p, _, place in optimizer.places():
        saved, group = state_dict["state"].get(sources[place]), groups[place[0]]
        frozen = saved is None and not p.requires_grad  # which has no state but its master
        own = optimizer.settled_master(p) if frozen else None
        if saved is not None or own is not None:
            saved = dict(saved or {})
            if not PLAIN.issuperset(map(type, (p, *filter(is_tensor, saved.values())))):
                saved = {key: shards.cut(key, value, p) for key, value in saved.items()}
            weight = local_of(p)
            name, formats = arguments.name_of(group, place), optimizer.formats(weight, group)
            own = own if frozen or checkpoints.has_master(saved) else optimizer.settled_master(p)
            given = saved if own is None else {**saved, "master": local_of(own)}
            known = None if own is not None else _known(optimizer, name, saved, p, formats[1])
            found[p] = LoadedEntry(*checkpoints.restore(name, given, weight, formats, known))
    _mend_counts(optimizer, groups, found)
    return LoadedState([{k: v for k, v in group.items() if k != "params"} for group in groups], found)


def _mend_counts(
    optimizer: OnePassOptimizer, groups: list[Group], found: Mapping[Tensor, LoadedEntry]
) -> None:
    by_group: dict[int, list[tuple[str, Group]]] = {}
    for p, _, place in optimizer.places():
        if p in found and "step" in found[p].state:  # a frozen weight has none
            name = arguments.name_of(groups[place[0]], place)
            by_group.setdefault(place[0], []).append((name, found[p].state))
    for number, entries in by_group.items():
        _mend(entries, optimizer.algorithm(groups[number]).states)


def _mend(entries: Sequence[tuple[str, Group]], moments: Sequence[str]) -> None:
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


def _known(optimizer: OnePassOptimizer, name: str, saved: Group, p: Tensor, kind: int) -> Tensor | None:
    """What the optimizer knows of `p` beyond its 16 bits, where the saved entry asks for it.

    CheckpointError for a whole master whose weight is yet to come, where that weight would undo it: nothing
    beside `p` keeps the master, or only the bits of another rounding.
    """
    weight = local_of(p)
    if checkpoints.is_of_other_dtype(saved, weight):
        return local_of(optimizer.master_of(p)) if p.dtype in storage.LOW_DTYPES else None
    if not isinstance(saved.get("master"), Tensor) or kind not in (L.PLAIN, *storage.EXACT):
        return None
    value = saved["master"]
    fits = value.shape == weight.shape  # what does not is refused with its shape
    if fits and not (
        saved_masters.of_one_weight(weight, value)
        or saved_masters.of_one_weight(local_of(optimizer.master_of(p)), value)
    ):
        raise saved_masters.other_weight(name)
    return None


def _options(group: Group, saved: Mapping[str, Any]) -> Group:
    options = {**group, **{k: v for k, v in saved.items() if k not in checkpoints.OWN_OPTIONS}}
    if "param_names" in saved:
        options.setdefault("param_names", saved["param_names"])
    arguments.settle_group(options)
    return options
