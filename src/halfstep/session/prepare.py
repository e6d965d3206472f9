"""What `prepare` checks and sets up before a session exists: arguments, ownership, loss scale, masters.

Every function raises before it changes anything, or takes back what it changed. Nothing here runs in a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep import devices
from halfstep.convert.conversion import Conversion, convert
from halfstep.errors import CheckpointError, ConfigError, HalfstepWarning
from halfstep.formats import dtype_name, parse_dtype
from halfstep.optim.master_link import Master, narrow_state
from halfstep.optim.masters import MasterWeights
from halfstep.policy.levels import LOW_DTYPES, Level
from halfstep.policy.ops import TABLES
from halfstep.policy.plan import Plan
from halfstep.policy.policy import Policy
from halfstep.scaling.loss_scale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
)
from halfstep.session.steppers import parameters_of

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
    if len({id(one) for one in optimizers}) < len(optimizers):
        raise ConfigError("prepare got the same optimizer twice: pass each one once")
    return optimizers


def as_models(model: Any) -> list[nn.Module]:
    """Return the models as a list; ConfigError for anything that is none."""
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    for one in models:
        if not isinstance(one, nn.Module):
            raise ConfigError(
                f"prepare got {type(one).__name__} as a model: pass a torch.nn.Module or a list"
            )
    return models


def device_of(models: Sequence[nn.Module]) -> torch.device:
    """Return the device of the first parameter; ConfigError where there is none."""
    for model in models:
        for tensor in model.parameters():
            return tensor.device
    names = ", ".join(type(m).__name__ for m in models) or "nothing"
    raise ConfigError(f"prepare got a model without parameters ({names}): pass the module that is trained")


def policy_of(
    level: Level,
    dtype: str | torch.dtype | None,
    word_dtype: torch.dtype | None,
    policy: str | Policy | None,
    device: torch.device,
) -> Policy:
    """Return what ops run under; its compute dtype comes from argument, level's word, policy or device.

    Raises ConfigError where two of them disagree or the level has no such dtype, UnsupportedError where the
    device has not.
    """
    given = None if dtype is None else parse_dtype(dtype)
    if given is not None and word_dtype is not None and given != word_dtype:
        raise ConfigError(f"the level names {word_dtype} but dtype={given} was given: drop one of the two")
    asked = given or word_dtype
    if level.compute_role == "full":
        if policy is not None:
            raise ConfigError(
                f"level {level.name} is fp32 throughout, yet policy={policy!s} was given: drop it"
            )
        return level.policy(asked)
    if policy is None:
        chosen = level.policy(asked or devices.default_dtype(device))
    else:
        chosen = Policy.parse(policy)
        if asked is None and policy in TABLES:  # a table's name says nothing of dtypes
            asked = devices.default_dtype(device)
        chosen = chosen if asked is None else chosen.with_dtype(asked)
        _check_roles(level, chosen)
    devices.check_dtype(device, chosen.compute_dtype)
    return chosen


def _check_roles(level: Level, policy: Policy) -> None:
    own = level.policy(policy.compute_dtype)
    if policy.param_dtype not in (torch.float32, own.param_dtype):
        raise ConfigError(
            f"the policy stores parameters in {dtype_name(policy.param_dtype)}, level {level.name} in "
            f"{dtype_name(own.param_dtype)}: drop p=, or choose level O2 or O3"
        )
    if policy.output_dtype not in (None, torch.float32, policy.compute_dtype):
        raise ConfigError(
            f"the policy gives outputs in {dtype_name(policy.output_dtype)}: expected fp32 or the compute "
            f"dtype {dtype_name(policy.compute_dtype)}"
        )


def with_outputs_of(level: Level, policy: Policy) -> Level:
    """Return the level with model outputs in the policy's output dtype, where the policy names one."""
    if policy.output_dtype is None:
        return level
    return replace(level, output_role="full" if policy.output_dtype == torch.float32 else "low")


def check_ownership(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ConfigError where an optimizer holds parameters of another model."""
    mine = {id(p) for model in models for p in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        strangers = [p for p in parameters_of(optimizer) if id(p) not in mine]
        if any(isinstance(p, Master) for p in strangers):
            raise ConfigError(
                f"optimizer {index} ({type(optimizer).__name__}) already has master weights: "
                "revert() the earlier session or MasterWeights first"
            )
        if strangers:
            raise ConfigError(
                f"optimizer {index} ({type(optimizer).__name__}) holds {len(strangers)} parameters that are "
                f"not the model's, the first of shape {tuple(strangers[0].shape)}: "
                "build it from the model given to prepare"
            )


def warn_of_low_weights(level: Level, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn once where a level that means fp32 weights would update 16-bit ones without masters."""
    if not level.cast_ops or level.param_role != "full":
        return
    torches = [o for o in optimizers if not getattr(o, "one_pass", False)]
    low = [p for o in torches for p in parameters_of(o) if p.requires_grad and p.dtype in LOW_DTYPES]
    if low:
        warnings.warn(
            f"{level.name} keeps fp32 weights, but {len(low)} parameters are {dtype_name(low[0].dtype)} "
            "and would lose small updates: call model.float() first, or prepare at O2, which adds masters",
            HalfstepWarning,
            stacklevel=3,
        )


def loss_scale_of(given: LossScale | float | str | None, level: Level, compute: torch.dtype) -> LossScale:
    """Return the loss scale that an argument names, or the level's own."""
    if isinstance(given, LossScale):
        return given
    if isinstance(given, bool):
        raise ConfigError(
            f"loss_scale={given}: expected a number, 'dynamic', 'headroom', 'none' or a LossScale"
        )
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
    if not isinstance(given, int | float | torch.Tensor):
        raise ConfigError(
            f"loss_scale={given!r}: expected a number, 'dynamic', 'headroom', 'none' or a LossScale"
        )
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
    fit_states(level, optimizers)
    return conversions, masters


def check_clip(clip_norm: float | None) -> None:
    """Raise ConfigError unless it is None or a number of at least 0."""
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm >= 0):
        raise ConfigError(f"clip_norm={clip_norm!r}: expected a number of at least 0, or None")


def check_scheduler(scheduler: Any) -> None:
    """Raise ConfigError for what cannot be advanced by `step()` alone."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "step(scheduler=...) got a ReduceLROnPlateau, which wants a metric: "
            "call scheduler.step(metric) yourself, after an evaluation"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"step(scheduler=...) got {type(scheduler).__name__}: expected a scheduler with step()"
        )


def fit_states(level: Level, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give the states of torch optimizers without masters their weights' dtype, as torch's loading does."""
    if level.masters or level.param_role == "full":
        return
    for optimizer in (o for o in optimizers if not getattr(o, "one_pass", False)):
        for p, state in optimizer.state.items():
            if isinstance(p, Tensor) and p.is_floating_point():
                optimizer.state[p] = narrow_state(state, p.dtype)


def one_pass_masters(
    level: Level, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[Any, dict[Tensor, Tensor]]:
    """The exact fp32 weights that optimizers of `halfstep.optim` hold, by optimizer."""
    if not level.masters:
        return {}
    return {o: o.masters() for o in optimizers if getattr(o, "one_pass", False)}  # pyright: ignore


def fill_stand_ins(models: Sequence[nn.Module], held: Mapping[Any, Mapping[Tensor, Tensor]]) -> None:
    """Give the widened copies of a suspended conversion the masters' values."""
    exact = {p: value for masters in held.values() for p, value in masters.items()}
    for parameter in (p for model in models for p in model.parameters()):
        original: Tensor | None = getattr(parameter, "_stands_for", None)
        if original is not None and original in exact:
            parameter.data.copy_(exact[original])


def read_state(state: Any, level: Level, policy: Policy) -> tuple[LossScale, int, int, int]:
    """Return loss scale, steps, skips in a row and skips of a saved session; else CheckpointError."""
    if not isinstance(state, Mapping) or state.get("format") != 1:
        given = f"the keys {list(state)}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise CheckpointError(f"not a session state of format 1 but {given}: pass what state_dict() gave")
    for what, own in (("level", level.name), ("policy", str(policy))):
        if state.get(what) != own:
            raise CheckpointError(
                f"this state was saved with {what} {state.get(what)}, the session has {own}: "
                f"prepare with that {what} to resume"
            )
    try:
        scale = LossScale.from_state(state["loss_scale"])
        steps, in_row, total = (int(state[key]) for key in ("steps", "skips_in_row", "skips"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"a session state that cannot be read ({error}): save it again") from error
    return scale, steps, in_row, total
