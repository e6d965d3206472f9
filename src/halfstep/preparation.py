"""What `prepare` checks and sets up before a session exists: arguments, ownership, loss scale, masters.

Every function raises before it changes anything, or takes back what it changed. Nothing here runs in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from halfstep import devices
from halfstep.convert import Conversion, convert
from halfstep.errors import ConfigError
from halfstep.formats import parse_dtype
from halfstep.levels import Level
from halfstep.optim.masters import MasterWeights
from halfstep.plan import Plan
from halfstep.policy import Policy
from halfstep.scaling import DynamicLossScale, HeadroomLossScale, LossScale, NoLossScale, StaticLossScale
from halfstep.steppers import parameters_of

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def as_optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list; ConfigError for anything that is none."""
    if optimizer is None:
        return []
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(
                f"prepare got {type(one).__name__} as an optimizer: pass a torch.optim.Optimizer"
            )
    return optimizers


def device_of(models: Sequence[nn.Module]) -> torch.device:
    """Return the device of the first parameter; ConfigError where there is none."""
    for model in models:
        for tensor in model.parameters():
            return tensor.device
    names = ", ".join(type(m).__name__ for m in models) or "nothing"
    raise ConfigError(f"prepare got a model without parameters ({names}): pass the module that is trained")


def compute_dtype(
    level: Level,
    dtype: str | torch.dtype | None,
    word_dtype: torch.dtype | None,
    policy: str | Policy | None,
    device: torch.device,
) -> torch.dtype:
    """Return what LOW ops run in, from argument, level's word, policy or device; checked on the device."""
    given = None if dtype is None else parse_dtype(dtype)
    if given is not None and word_dtype is not None and given != word_dtype:
        raise ConfigError(f"the level names {word_dtype} but dtype={given} was given: drop one of the two")
    if level.name == "O0":
        return torch.float32
    if policy is not None:
        compute = Policy.parse(policy).compute_dtype
    else:
        compute = given or word_dtype or devices.default_dtype(device)
    devices.check_dtype(device, compute)
    return compute


def check_ownership(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ConfigError where an optimizer holds parameters of another model."""
    mine = {id(p) for model in models for p in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        strangers = [p for p in parameters_of(optimizer) if id(p) not in mine]
        if strangers:
            raise ConfigError(
                f"optimizer {index} ({type(optimizer).__name__}) holds {len(strangers)} parameters that are "
                f"not the model's, the first of shape {tuple(strangers[0].shape)}: "
                "build it from the model given to prepare"
            )


def loss_scale_of(given: LossScale | float | str | None, level: Level, compute: torch.dtype) -> LossScale:
    """Return the loss scale that an argument names, or the level's own."""
    if isinstance(given, LossScale):
        return given
    if given is None:
        return DynamicLossScale() if level.needs_scale(compute) else NoLossScale()
    if isinstance(given, str):
        named: dict[str, Callable[[], LossScale]] = {
            "none": NoLossScale,
            "dynamic": DynamicLossScale,
            "headroom": HeadroomLossScale,
        }
        if given in named:
            return named[given]()
        try:
            given = float(given)
        except ValueError:
            raise ConfigError(
                f"unknown loss scale {given!r}: expected a number, 'dynamic', 'headroom', 'none' "
                "or a LossScale"
            ) from None
    return NoLossScale() if given == 1.0 else StaticLossScale(float(given))


def apply_level(
    level: Level,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    plan: Plan | None,
    compute: torch.dtype,
) -> tuple[list[Conversion], dict[int, MasterWeights]]:
    """Convert the models; give fp32 masters to the optimizers of a level that has them."""
    conversions: list[Conversion] = []
    masters: dict[int, MasterWeights] = {}
    try:
        for model in models:
            conversions.append(convert(model, level, compute, plan=plan))
        if level.masters:
            originals = {p: value for c in conversions for p, value in c.originals.items()}
            for index, optimizer in enumerate(optimizers):
                if getattr(optimizer, "one_pass", False):
                    optimizer.seed_masters(originals)  # pyright: ignore[reportAttributeAccessIssue]
                else:
                    masters[index] = MasterWeights(optimizer, list(models), initial=originals)
    except Exception:
        for one in masters.values():
            one.revert()
        for conversion in conversions:
            conversion.revert()
        raise
    for conversion in conversions:
        conversion.forget_originals()
    return conversions, masters
