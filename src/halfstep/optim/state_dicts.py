"""Reads a state dict for an optimizer without changing it: what fits is returned, the rest refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from halfstep.kernels import codes as L
from halfstep.optim import arguments, checkpoints, counts, saved_masters, storage

if TYPE_CHECKING:
    from halfstep.optim.base import OnePassOptimizer

Group = dict[str, Any]


@dataclass(frozen=True)
class LoadedEntry:
    """The state of a parameter and, where a master says so, its weight.

    `kept`: the checkpoint has no master, as torch's have none, and the parameter keeps its own.
    """

    state: Group
    weight: Tensor | None
    kept: bool


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
            saved = {} if saved is None else saved
            name, formats = optimizer.name_of(group, place), optimizer.formats(p, group)
            own = own if frozen or checkpoints.has_master(saved) else optimizer.settled_master(p)
            given = saved if own is None else {**saved, "master": own}
            known = None if own is not None else _known(optimizer, name, saved, p, formats[1])
            found[p] = LoadedEntry(*checkpoints.restore(name, given, p, formats, known), kept=own is not None)
    _mend_counts(optimizer, groups, found)
    return LoadedState([{k: v for k, v in group.items() if k != "params"} for group in groups], found)


def _mend_counts(
    optimizer: OnePassOptimizer, groups: list[Group], found: Mapping[Tensor, LoadedEntry]
) -> None:
    by_group: dict[int, list[tuple[str, Group]]] = {}
    for p, _, place in optimizer.places():
        if p in found and "step" in found[p].state:  # a frozen weight has none
            name = optimizer.name_of(groups[place[0]], place)
            by_group.setdefault(place[0], []).append((name, found[p].state))
    for number, entries in by_group.items():
        counts.mend(entries, optimizer.algorithm(groups[number]).states)


def _known(optimizer: OnePassOptimizer, name: str, saved: Group, p: Tensor, kind: int) -> Tensor | None:
    """What the optimizer knows of `p` beyond its 16 bits, where the saved entry asks for it.

    CheckpointError for a whole master whose weight is yet to come, where that weight would undo it: nothing
    beside `p` keeps the master, or only the bits of another rounding.
    """
    if checkpoints.is_of_other_dtype(saved, p):
        return optimizer.master_of(p) if p.dtype in storage.LOW_DTYPES else None
    if not isinstance(saved.get("master"), Tensor) or kind not in (L.PLAIN, *storage.EXACT):
        return None
    value = saved["master"]
    fits = value.shape == p.shape  # what does not is refused with its shape
    if fits and not (
        saved_masters.of_one_weight(p, value) or saved_masters.of_one_weight(optimizer.master_of(p), value)
    ):
        raise saved_masters.other_weight(name)
    return None


def _options(group: Group, saved: Mapping[str, Any]) -> Group:
    options = {**group, **{k: v for k, v in saved.items() if k not in checkpoints.OWN_OPTIONS}}
    if "param_names" in saved:
        options.setdefault("param_names", saved["param_names"])
    arguments.settle_group(options)
    return options
