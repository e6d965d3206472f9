"""What a parameter group may hold: torch's keys, and numbers in any form that Python, numpy or torch has."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from halfstep.errors import ConfigError, UnsupportedError, show
from halfstep.gradients.stats import check_clip
from halfstep.optim import storage

HARMLESS: dict[str, Any] = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""torch's arguments about how a step runs, with its defaults. Here each is fused and, on CUDA, capturable."""
_NUMBERS = ("lr", "eps", "weight_decay", "momentum")
_PLAIN = frozenset({float, int, bool, str, type(None), list, tuple})


def settle_group(group: dict[str, Any]) -> None:
    """Complete a group with torch's keys and make numpy's numbers Python's, in place.

    Raises:
        ConfigError: values no optimizer here can mean. UnsupportedError: differentiable=True.
    """
    for name, default in HARMLESS.items():
        group.setdefault(name, default)
    for name, value in group.items():
        if name not in ("params", "param_names"):
            group[name] = _without_numpy(value)
    check_storage(group)
    if group["differentiable"]:
        raise UnsupportedError(
            "differentiable=True: a step here is no part of a graph; use torch.optim for it"
        )
    if group["foreach"] and group["fused"]:
        raise ConfigError(
            "foreach=True and fused=True contradict each other: leave both out, steps are fused here"
        )
    check_hyperparameters(group)


def check_storage(group: Mapping[str, Any]) -> None:
    """Raise ConfigError for a master or state format that does not exist or does not go with the rest."""
    storage.check_options(group["master"], group["state_dtype"])
    if group.get("amsgrad") and group["state_dtype"] != "fp32":
        raise ConfigError(
            f"amsgrad=True keeps its states in fp32: leave state_dtype={group['state_dtype']!r} out"
        )


def numbers_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group with every number a Python one; 0-d tensors are read."""
    betas = group.get("betas", ())
    if _PLAIN.issuperset(map(type, group.values())) and all(type(beta) is float for beta in betas):
        return group
    return {key: _as_number(value) for key, value in group.items() if key != "params"}


def check_clipping(clip_norm: float, clip_coef: Any, released: bool) -> None:
    """Raise for what a step cannot clip by: no norm, one beside a coefficient, or too late."""
    check_clip(clip_norm)
    if clip_coef is not None:
        raise ConfigError(f"step(clip_norm={clip_norm}, clip_coef={show(clip_coef)}): give one of the two")
    if released:
        raise UnsupportedError(
            f"step(clip_norm={clip_norm}): gradients were released and applied during backward; give it to "
            "Session.step, which clips them as they come, or build the optimizer without release_gradients"
        )


def _as_number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, tuple | list):
        return tuple(map(_as_number, value))
    return _without_numpy(value)


def _without_numpy(value: Any) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
        return value.item()
    if isinstance(value, tuple | list) and any(isinstance(one, np.generic | np.ndarray) for one in value):
        return tuple(map(_without_numpy, value))
    return value


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raise ConfigError for values no optimizer here can mean."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of shape {list(lr.shape)}; it must have one element")
    for name in _NUMBERS:
        value = group.get(name, 0.0)
        if not isinstance(value, Tensor) and not (isinstance(value, int | float) and value >= 0):
            raise ConfigError(f"{name}={show(value)}: must be a number of at least 0")
    betas = group.get("betas", ())
    if not isinstance(betas, list | tuple) or ("betas" in group and len(betas) != 2):
        raise ConfigError(f"betas={show(betas)}: must be a pair of numbers in [0, 1)")
    for i, beta in enumerate(betas):
        value = float(beta) if isinstance(beta, Tensor) and beta.numel() == 1 else beta
        if not (isinstance(value, int | float) and 0 <= value < 1):
            raise ConfigError(f"betas[{i}]={show(beta)}: must be a number in [0, 1)")
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ConfigError("nesterov=True needs momentum > 0 and dampening 0")
