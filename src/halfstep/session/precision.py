"""What a level, a dtype, a policy and a device come to: one frozen `Precision`, with its refusals.

`prepare` asks for it once, before anything is changed. It knows no models and no optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch

from halfstep import devices
from halfstep.errors import ConfigError, show
from halfstep.formats import dtype_name
from halfstep.policy.levels import Level, dtype_of, level_of
from halfstep.policy.plan import Plan
from halfstep.policy.policy import Policy, names_dtype
from halfstep.scaling.headroom import HeadroomLossScale
from halfstep.scaling.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale

LossScales = LossScale | float | str | Sequence[LossScale | float | str | None] | None


@dataclass(frozen=True)
class Precision:
    """What a training computes in, and by which loss scales.

    `level` is the row with the policy's outputs, `policy` what ops run under, `plan` the rules by module on
    top of the level, `scales` the loss scale of each loss.
    """

    level: Level
    policy: Policy
    plan: Plan | None
    scales: tuple[LossScale, ...]

    @property
    def masters(self) -> bool:
        """Whether optimizers update fp32 copies of 16-bit weights."""
        return self.level.masters

    @property
    def stores_low(self) -> bool:
        """Whether weights are stored in 16 bits."""
        return self.level.param_role != "full"

    @property
    def scaled(self) -> bool:
        """Whether gradients carry a scale."""
        return not all(isinstance(scale, NoLossScale) for scale in self.scales)


def lower(
    level: str | Level,
    dtype: str | torch.dtype | None,
    policy: str | Policy | None,
    plan: Plan | None,
    device: torch.device,
    loss_scale: LossScales = None,
) -> Precision:
    """Return what these come to; the dtype is that of argument, level's word, policy or device.

    Raises:
        ConfigError: two of them disagree, or the level has no such dtype, policy or loss scale.
        UnsupportedError: the device cannot compute in the dtype.
    """
    row, word_dtype = level_of(level)
    chosen = _policy_of(row, dtype, word_dtype, policy, device)
    if chosen.output_dtype is not None:
        row = replace(row, output_role="full" if chosen.output_dtype == torch.float32 else "low")
    loss_scales = loss_scale if isinstance(loss_scale, list | tuple) else [loss_scale]
    if not loss_scales:
        raise ConfigError("loss_scale=[]: expected one loss scale for each loss, or a single one")
    scales = [_loss_scale_of(choice, row, chosen.compute_dtype) for choice in loss_scales]
    return Precision(row, chosen, plan, tuple(scales))


def _policy_of(
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
    argument_dtype = None if dtype is None else dtype_of(dtype)
    if argument_dtype is not None and word_dtype is not None and argument_dtype != word_dtype:
        raise ConfigError(
            f"the level names {word_dtype} but dtype={argument_dtype} was given: drop one of the two"
        )
    compute_dtype = argument_dtype or word_dtype
    if level.compute_role == "full":
        if policy is not None:
            raise ConfigError(
                f"level {level.name} is fp32 throughout, yet policy={policy!s} was given: drop it"
            )
        return level.policy(compute_dtype)
    if policy is None:
        chosen = level.policy(compute_dtype or devices.default_dtype(device))
    else:
        chosen = Policy.parse(policy)
        if compute_dtype is None and not names_dtype(policy):
            compute_dtype = devices.default_dtype(device)
        chosen = chosen if compute_dtype is None else chosen.with_dtype(compute_dtype)
        _check_roles(level, chosen)
    devices.check_dtype(device, chosen.compute_dtype)
    return chosen


def _check_roles(level: Level, policy: Policy) -> None:
    level_policy = level.policy(policy.compute_dtype)
    if policy.param_dtype not in (torch.float32, level_policy.param_dtype):
        raise ConfigError(
            f"the policy stores parameters in {dtype_name(policy.param_dtype)}, level {level.name} in "
            f"{dtype_name(level_policy.param_dtype)}: drop p=, or choose level O2 or O3"
        )
    if policy.output_dtype not in (None, torch.float32, policy.compute_dtype):
        raise ConfigError(
            f"the policy gives outputs in {dtype_name(policy.output_dtype)}: expected fp32 or the compute "
            f"dtype {dtype_name(policy.compute_dtype)}"
        )


def _loss_scale_of(choice: Any, level: Level, compute: torch.dtype) -> LossScale:
    """Return the loss scale that an argument names, or the level's own."""
    if isinstance(choice, LossScale):
        choice.check_serializable()
        return choice
    if choice is None:
        return DynamicLossScale() if level.needs_scale(compute) else NoLossScale()
    if isinstance(choice, str):
        named: dict[str, Callable[[], LossScale]] = {
            "none": NoLossScale,
            "dynamic": DynamicLossScale,
            "headroom": HeadroomLossScale,
        }
        if choice in named:
            return named[choice]()
        try:
            choice = float(choice)
        except ValueError:
            raise ConfigError(
                f"unknown loss scale {show(choice)}: expected a number, 'dynamic', 'headroom', 'none' "
                "or a LossScale"
            ) from None
    if isinstance(choice, bool) or not isinstance(choice, Real | torch.Tensor):
        raise ConfigError(
            f"loss_scale={show(choice)}: expected a number, 'dynamic', 'headroom', 'none' or a LossScale"
        )
    return NoLossScale() if choice == 1.0 else StaticLossScale(float(choice))
