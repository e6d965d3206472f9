"""What a step and a saved state are checked for, before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep.errors import CheckpointError, ConfigError, show
from halfstep.policy.levels import Level
from halfstep.policy.policy import Policy


def refuse_arguments(more: Sequence[Any], unknown: Mapping[str, Any]) -> Never:
    """Raise ConfigError for what `step` was given and does not take."""
    given = f"{show(more[0])} after the optimizer" if more else ""
    given = given or " and ".join(f"{name}={show(value)}" for name, value in unknown.items())
    raise ConfigError(
        f"step() got {given}: expected an optimizer and, by name, clip_norm=, scheduler= or zero_grad=. To "
        "clip gradients to a norm of 1 write step(clip_norm=1.0)"
    )


def check_scheduler(scheduler: Any) -> None:
    """Raise ConfigError for what cannot be advanced by `step()` alone."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "step(scheduler=...) got a ReduceLROnPlateau, which wants a metric: "
            "call scheduler.step(metric) yourself, after an evaluation"
        )
    if isinstance(scheduler, type):
        raise ConfigError(
            f"step(scheduler={scheduler.__name__}) got the class: expected a scheduler made of it and the "
            f"optimizer, {scheduler.__name__}(optimizer, ...)"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"step(scheduler=...) got {type(scheduler).__name__}: expected a scheduler with step()"
        )


def check_state(state: Any, level: Level, policy: Policy) -> None:
    """Raise CheckpointError unless it is the state of a session of this level and policy."""
    if not isinstance(state, Mapping) or state.get("format") != 1:
        given = f"the keys {list(state)}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise CheckpointError(f"not a session state of format 1 but {given}: pass what state_dict() gave")
    for what, own in (("level", level.name), ("policy", str(policy))):
        if state.get(what) != own:
            raise CheckpointError(
                f"this state was saved with {what} {state.get(what)}, the session has {own}: "
                f"prepare with that {what} to resume"
            )


def indices_of(
    optimizers: Sequence[torch.optim.Optimizer],
    named: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[int]:
    """The numbers of the named optimizers, all for None; ConfigError for one that is not of the session."""
    if named is None:
        return list(range(len(optimizers)))
    listed = list(named) if isinstance(named, list | tuple) else [named]
    return [index_of(optimizers, one) for one in listed]


def index_of(optimizers: Sequence[torch.optim.Optimizer], optimizer: Any) -> int:
    """The number of an optimizer, None being the only one; ConfigError where that is not clear."""
    if optimizer is None:
        if not optimizers:
            raise ConfigError(
                "this session has no optimizer, it only evaluates: give prepare(model, optimizer) one"
            )
        if len(optimizers) != 1:
            raise ConfigError(f"this session has {len(optimizers)} optimizers: name the one to step")
        return 0
    for index, mine in enumerate(optimizers):
        if mine is optimizer:
            return index
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"got {show(optimizer)} as the optimizer: expected one that was given to prepare(). Other "
            "arguments go by name: amp.step(clip_norm=1.0)"
        )
    raise ConfigError(f"this {type(optimizer).__name__} was not given to prepare()")
