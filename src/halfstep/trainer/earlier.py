"""Checkpoints as earlier versions of the Trainer wrote them: one file, read here and written nowhere."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from halfstep import checkpoint, rng
from halfstep.distributed import rank, world_size
from halfstep.errors import CheckpointError, HalfstepWarning
from halfstep.names import fqns
from halfstep.session.saving import optimizer_names

if TYPE_CHECKING:
    from halfstep.trainer.loop import Trainer

_PARTS = {"threads", "model", "optimizer", "amp", "step", "epoch", "scheduler", "random", "position"}


def load(trainer: Trainer, path: Path) -> None:
    """Go on from a file; CheckpointError, with nothing changed, where it is of another model or optimizer."""
    state = checkpoint.load(path)
    if state.get("format") != 1 or not state.keys() >= _PARTS:
        raise CheckpointError(f"{path} is not what a Trainer of an earlier version wrote")
    schedulers = [] if state["scheduler"] is None else [state["scheduler"]]
    checkpoint.check_schedulers(len(schedulers), len(trainer.schedulers))
    present = trainer.model.state_dict()
    short = fqns(present)
    here = {short[name]: value for name, value in present.items()}
    checkpoint.check_shapes(_shapes(state["model"]), _shapes(here))
    optimizer = _by_number(trainer, state["optimizer"])
    trainer.amp.load_state_dict(state["amp"])
    trainer.model.load_state_dict({name: state["model"][short[name]] for name in present})
    trainer.optimizer.load_state_dict(optimizer)
    for scheduler, its_state in zip(trainer.schedulers, schedulers):
        scheduler.load_state_dict(its_state)
    checkpoint.warn_if_threads_differ(state["threads"])
    ranks = state.get("ranks") or [state]
    if len(ranks) == world_size():
        own = ranks[rank()]
        trainer.go_on(state, own["position"])
        rng.load_random_state(own["random"])
        return
    trainer.go_on(state, None)
    warnings.warn(
        f"the checkpoint was written by {len(ranks)} ranks and is read by {world_size()}: random "
        "generators, and the pass over the data that was under way, begin anew",
        HalfstepWarning,
        stacklevel=3,
    )


def _shapes(values: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in values.items() if isinstance(value, Tensor)}


def _by_number(trainer: Trainer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state, which the file has by the parameters' names, as `load_state_dict` takes it."""
    (names,) = optimizer_names(trainer.amp)
    groups: list[Any] = trainer.optimizer.state_dict()["param_groups"]
    mine = [{names[number] for number in group["params"]} for group in groups]
    kind = checkpoint.algorithm_of(trainer.optimizer)
    if saved.get("algorithm", kind) != kind or [set(g["params"]) for g in saved["param_groups"]] != mine:
        raise CheckpointError(f"the checkpoint is of another optimizer than this {kind}, or of other groups")
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers.get(key, key): value for key, value in saved["state"].items()}
    # torch pairs saved and present parameters by place, so the numbers must stand in the present order.
    pairs = [dict(old, params=new["params"]) for old, new in zip(saved["param_groups"], groups)]
    return {**{k: v for k, v in saved.items() if k != "algorithm"}, "state": state, "param_groups": pairs}
