"""Checkpoints of a Trainer over ranks: rank 0 writes and cleans, each rank's own part travels with it.

A rank's own part is its random generators and its place in its loader; all else is the same on every rank.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from halfstep.background import Background
from halfstep.checkpoint import CheckpointFolder
from halfstep.distributed import gather, global_max, is_sharded, rank, started_by_torchrun, world_size
from halfstep.errors import ConfigError, HalfstepError, HalfstepWarning

OWN = ("random", "position")


def check_parallel(model: nn.Module, wrapped: bool) -> None:
    """Raise ConfigError where several ranks would each train a model of their own."""
    started = started_by_torchrun()
    if world_size() == 1 and started > 1 and not dist.is_initialized():
        raise ConfigError(
            f"torchrun started {started} ranks and torch.distributed is not initialised, so that each would "
            "train alone: call torch.distributed.init_process_group() first"
        )
    inside = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    if world_size() > 1 and not (wrapped or inside or is_sharded(model)):
        raise ConfigError(
            f"{world_size()} ranks would each train a model of their own: pass "
            "wrap=torch.nn.parallel.DistributedDataParallel, or shard the model first"
        )
    if is_sharded(model):
        raise ConfigError("the Trainer saves whole models: for a sharded one use hs.prepare and Session.save")


def everyones(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with every rank's own part in it; every rank must call this."""
    if world_size() == 1:
        return dict(state)
    return {**state, "ranks": gather({name: state[name] for name in OWN})}


def mine_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's view of a state; of another number of ranks' without what each had of its own."""
    saved = state.get("ranks")
    count = 1 if saved is None else len(saved)
    if count != world_size():
        warnings.warn(
            f"the checkpoint was written by {count} ranks and is read by {world_size()}: model, optimizer, "
            "scheduler and counts are exact; random generators, and the pass over the data that was under "
            "way, begin anew",
            HalfstepWarning,
            stacklevel=4,
        )
        return {**state, **dict.fromkeys(OWN)}
    return dict(state) if saved is None else {**state, **saved[rank()]}


def on_rank_0(work: Callable[[], Any]) -> Any:
    """What `work` gives on rank 0, on all ranks; an error there is raised on all of them."""
    if world_size() == 1:
        return work()
    told: list[Any] = [None, None]
    if rank() == 0:
        try:
            told[0] = work()
        except HalfstepError as error:
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    return told[0]


def save(
    folder: CheckpointFolder, step: int, state: Mapping[str, Any], background: Background | None = None
) -> Path:
    """Write the checkpoint of `step`, in the background from a copy where asked; every rank calls."""
    whole = everyones(state)
    if background is None:
        return on_rank_0(lambda: folder.save(step, whole))
    settle(background)
    if rank() == 0:
        copied = pytree.tree_map(_copied, whole)
        background.start(lambda: folder.save(step, copied))
    return folder.path_of(step)


def settle(background: Background) -> None:
    """Wait for what is written in the background; its error is raised on all ranks, which all must call."""
    on_rank_0(background.wait)


def _copied(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def load_latest(folder: CheckpointFolder) -> dict[str, Any] | None:
    """The newest good checkpoint as rank 0 finds it, read by all; None where there is none."""
    newest: Path | None = on_rank_0(lambda: folder.load_latest() and folder.paths()[-1])
    if newest is None:
        return None
    return mine_of(folder.load_latest() or {})


def ranks_max(number: int) -> int:
    """The largest number that any rank says; every rank must ask."""
    return number if world_size() == 1 else int(global_max(torch.tensor(float(number))))
