"""GradScaler: torch's class whose next scale a LossScale decides, with an outcome for every step.

torch's own attributes are the state, so that what others read there, write there or override works as it does
on torch's. What loss scales do is decided in `loss_scale.py`. Private names of torch that are used here:

- `_scale`, `_growth_tracker`, `_lazy_init_scale_growth_tracker`: the scale and the count on their device;
- `_per_optimizer_states`: what torch's methods know of each optimizer until `update`;
- `_enabled`, `_device`: set apart, as torch's `__init__` disables itself where CUDA is absent;
- `_unscale_grads_`, `_check_inf_per_device`, `_check_scale_growth_tracker`: overridden, torch's methods and
  subclasses call them; `_maybe_opt_step`: a subclass that has its own gets it called.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler as torchs

from halfstep import devices, distributed
from halfstep.devices import refuse_capture
from halfstep.errors import CheckpointError, ConfigError, ScalerStateError, UnsupportedError, show, warn
from halfstep.gradients.stats import GradStats, measure_whole
from halfstep.gradients.unscale import any_of, unscale_
from halfstep.outcome import Outcome, OutcomeQueue, StepRecord
from halfstep.scaling.headroom import HeadroomLossScale
from halfstep.scaling.loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicLossScale,
    LossScale,
    NoLossScale,
)
from halfstep.scaling.skips import SkipCount
from halfstep.torch_private import pytree
from halfstep.trees import (
    gradients_of,
    home_device,
    move_to,
    multiply,
    parameters_of,
    reciprocal,
    scalar_on,
)

_OURS = "halfstep"
_CONSTANT = DynamicLossScale(growth=1.0, backoff=1.0)


class GradScaler(torchs.GradScaler):
    """torch.amp.GradScaler with bounds, outcomes and found-inf flags that ranks share.

    Found-inf flags are shared by all ranks, so that no sharded scaler is needed.

    Args:
        device: torch's; it may stay None, since the scale lives where the losses are.
        init_scale: the first scale, as in torch.
        growth_factor: what the scale is multiplied by after `growth_interval` clean steps, as in torch.
        backoff_factor: what the scale is multiplied by after inf or NaN, as in torch.
        growth_interval: clean steps in a row before the scale grows, as in torch.
        enabled: False passes losses through and steps the optimizer, as in torch.
        loss_scale: any LossScale instead of the four numbers. One that is neither dynamic nor by headroom
            makes torch's factors 1, and setting them changes nothing.
        min_scale: the least scale; by default the smallest power of two that float32 can hold and invert.
        max_scale: the largest scale; by default the largest such power of two.
        hysteresis: overflows before the scale backs off, as in DynamicLossScale.
        max_skips: skipped iterations in a row that raise LossScaleCollapsed in `update`.
        group: the ranks that share the flag, None for all; each of them must use its scaler in the step.
        across_ranks: False lets each rank decide alone.
        norm_group: as in `prepare`: over stages of a pipeline the outcome has the norm of all of them.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        loss_scale: LossScale | None = None,
        min_scale: float = SMALLEST_SCALE,
        max_scale: float = LARGEST_SCALE,
        hysteresis: int = 1,
        max_skips: int = 50,
        group: Any = None,
        across_ranks: bool = True,
        norm_group: Any = None,
    ) -> None:
        try:
            kind = devices.resolve(None) if device is None else torch.device(str(device))
        except RuntimeError as error:
            raise ConfigError(f"GradScaler: unknown device {show(device)}: give cpu or cuda") from error
        if loss_scale is None:
            rates = (growth_factor, backoff_factor, growth_interval)
            loss_scale = DynamicLossScale(init_scale, *rates, hysteresis, min_scale, max_scale)
        elif not isinstance(loss_scale, LossScale):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"loss_scale must be a LossScale such as NoLossScale(), got {show(loss_scale)}")
        super().__init__("cpu")
        self._device = kind.type
        self._begin_with(loss_scale)
        self._enabled = enabled and not isinstance(loss_scale, NoLossScale)
        self._skips = SkipCount(limit=max_skips)
        self._group = group
        self._across_ranks = across_ranks
        self._norm_group = norm_group
        self._same_gradients = distributed.SameGradients()
        self._warned = False
        self._queue = OutcomeQueue()

    @property
    def loss_scale(self) -> LossScale:
        """The current loss scale as a value, with the numbers that torch's attributes hold."""
        if not self._enabled:
            return NoLossScale()
        rule, scale, clean = self._rule, self._scale, self._growth_tracker
        numbers: dict[str, Any] = {
            "growth": self.get_growth_factor(),
            "backoff": self.get_backoff_factor(),
            "interval": self.get_growth_interval(),
            "clean": self._get_growth_tracker() if clean is None or clean.is_cpu else clean.clone(),
        }
        if not isinstance(rule, DynamicLossScale):
            return _with_numbers(rule, **numbers)
        if scale is None or scale.is_cpu:
            return replace(rule, current=min(max(self.get_scale(), rule.min), rule.max), **numbers)
        return replace(rule, current=scale.clamp(rule.min, rule.max), **numbers)

    @property
    def skips(self) -> SkipCount:
        """How many iterations were skipped, as far as known (on an accelerator at most 2 steps late)."""
        return self._skips

    def scale(self, outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a tensor, or a nest or iterable of tensors, times the scale; 16-bit ones become fp32."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Iterable) and not isinstance(outputs, Tensor | Mapping | list | tuple | str):
            return map(self.scale, outputs)
        leaves, nest = pytree.tree_flatten(outputs)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise ConfigError(f"outputs must be a Tensor or an iterable of Tensors, got {show(outputs)}")
        if self._scale is None and leaves:
            self._lazy_init_scale_growth_tracker(leaves[0].device)
        return pytree.tree_unflatten([multiply(t, self._scale_on(t.device)) for t in leaves], nest)

    def unscale_(self, optimizer: Any) -> None:
        """Divide the scale out of the optimizer's gradients in place, once an iteration, e.g. to clip them.

        Computed in fp32 and stored in each gradient's dtype; fp16 gradients are accepted (values that fall
        below 2^-25 become 0 there). Raises ScalerStateError where it was called before in this iteration, or
        before any loss was scaled.
        """
        if not self._enabled:
            return
        refuse_capture(self._check_scale_growth_tracker("unscale_")[0].device, "scaler.unscale_()")
        stage = self._optimizer_state(optimizer)["stage"]
        if stage is torchs.OptState.UNSCALED:
            raise ScalerStateError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if stage is torchs.OptState.STEPPED:
            raise ScalerStateError("unscale_() is being called after step().")
        super().unscale_(optimizer)
        self._store_stats(self._optimizer_state(optimizer), self._measure(gradients_of(optimizer)))

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients by `inv_scale` in place, fp16 ones too; a flag for each device."""
        grads = gradients_of(optimizer)
        if not grads:
            return {}
        flag = unscale_(grads, inv_scale.to(home_device(grads))).to(found_inf.device, found_inf.dtype)
        any_inf = torch.maximum(found_inf, flag)
        return {device: any_inf.to(device) for device in dict.fromkeys(grad.device for grad in grads)}

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        """Look for inf and NaN in the gradients as they are, for an optimizer that divides by itself."""
        row, grads = self._optimizer_state(optimizer), gradients_of(optimizer)
        stats = self._measure(grads, self._inverse(grads))
        if self._is_changed():
            super()._check_inf_per_device(optimizer)
        else:  # torch's would multiply every gradient by 1 to see the same
            found_inf = (~stats.finite).float()
            row["found_inf_per_device"] = {d: found_inf.to(d) for d in dict.fromkeys(g.device for g in grads)}
        self._store_stats(row, stats)
        return row["found_inf_per_device"]

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        try:
            return super()._check_scale_growth_tracker(funcname)
        except AssertionError as error:
            raise ScalerStateError(str(error)) from None

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Outcome:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Unscale unless done, then call `optimizer.step(*args, **kwargs)` if every gradient is finite.

        Returns the Outcome; what the optimizer's own step returned is `outcome.result`. On an accelerator an
        optimizer with `one_pass` (halfstep.optim) or torch's fused kernels gets the flag as a device scalar
        and nothing is read back: `optimizer.step` is called on skips too, and the `outcome` of an optimizer
        of halfstep.optim says whether it was one. For any other the flag is read, as torch does. Closures
        are refused: they would run backward unscaled. Raises ScalerStateError for a second step before
        `update` and for one without gradients, ConfigError where ranks of `fully_shard` have gradients of
        different parameters.
        """
        if self._shares_flag():
            self._same_gradients.check(parameters_of(optimizer), partial(name_in, optimizer))
        if not self._enabled:
            return self._plain_step(optimizer, args, kwargs)
        if kwargs.pop("closure", None) is not None or any(callable(arg) for arg in args):
            raise UnsupportedError(
                "Closure use is not currently supported if GradScaler is enabled: the closure would run "
                "backward on an unscaled loss. Run forward and backward yourself, then step(optimizer)."
            )
        scale, _ = self._check_scale_growth_tracker("step")
        refuse_capture(scale.device, "scaler.step()")
        row = self._optimizer_state(optimizer)
        if row["stage"] is torchs.OptState.STEPPED:
            raise ScalerStateError("step() has already been called since the last update().")
        if not (row["found_inf_per_device"] or gradients_of(optimizer) or self._shares_flag()):
            cure = "Call scaler.scale(loss).backward() before step."
            if getattr(optimizer, "release_gradients", False):
                cure = (
                    "release_gradients=True applied them during backward, with the loss scale in them: go "
                    "back to the weights of before, and use Session.step, or no release_gradients."
                )
            raise ScalerStateError(
                "No inf checks were recorded for this optimizer: none of its parameters has a gradient. "
                + cure
            )
        one_pass = getattr(optimizer, "one_pass", False) and not self._is_changed()
        if one_pass:
            result = self._one_pass_step(optimizer, args, kwargs)
        elif not scale.is_cpu and any(g.is_cpu for g in gradients_of(optimizer)):
            # torch's fused steps use their copy of the flag on the host before it has arrived
            if row["stage"] is torchs.OptState.READY:
                self.unscale_(optimizer)
            result = self._maybe_opt_step(optimizer, row, *args, **kwargs)
            row["stage"] = torchs.OptState.STEPPED
        else:
            with attributes_kept(optimizer):
                result = super().step(optimizer, *args, **kwargs)
        row = self._optimizer_state(optimizer)
        taken, norm, amax = ~is_found_inf(row), row.get("norm"), row.get("amax")
        outcome = Outcome(
            taken=taken, finite=taken, scale=scale.clone(), grad_norm=norm, amax=amax, result=result
        )
        if one_pass:
            optimizer.outcome = outcome
        return outcome

    def _is_changed(self) -> bool:
        """Whether a subclass, or somebody on this instance, unscales or steps in a way of their own."""
        names = ("unscale_", "_unscale_grads_", "_maybe_opt_step")
        return any(getattr(getattr(self, n), "__func__", None) is not getattr(GradScaler, n) for n in names)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale once an iteration, after all steps; or set it to `new_scale`.

        Raises LossScaleCollapsed after `max_skips` skipped iterations in a row (on an accelerator at most 2
        iterations late), ScalerStateError where no gradients were checked.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        refuse_capture(scale.device, "scaler.update()")
        rule = self.loss_scale
        rows = [row for row in self._per_optimizer_states.values() if row["found_inf_per_device"]]
        self._per_optimizer_states.clear()
        if new_scale is not None:
            self._go_on_with(rule.with_value(new_scale))
            return
        if not rows:
            raise ScalerStateError("No inf checks were recorded prior to update.")
        found_inf = any_of([is_found_inf(row) for row in rows]).to(scale.device)
        amax = torch.stack([row["amax"].to(scale) for row in rows]).amax() if rule.needs_amax else None
        outcome = Outcome(taken=~found_inf, finite=~found_inf, scale=scale.clone())
        self._go_on_with(_adjusted_scale(rule, found_inf, amax))
        self._count(self._queue.push(outcome))

    def _begin_with(self, rule: LossScale) -> None:
        """Take over all numbers of a loss scale, where `scale` was called before or not."""
        self._rule, numbers = rule, _dynamic_part(rule) or _CONSTANT
        state = (rule.read(), numbers.growth, numbers.backoff, numbers.interval, int(numbers.clean))
        super().load_state_dict(dict(zip(_TORCH_KEYS, state, strict=True)))

    @torch.no_grad()
    def _go_on_with(self, rule: LossScale) -> None:
        """Write the next scale into torch's tensors, which others may hold; nothing is read."""
        self._rule, numbers = rule, _dynamic_part(rule) or _CONSTANT
        scale, clean = self._check_scale_growth_tracker("update")
        for tensor, number in ((scale, rule.value), (clean, numbers.clean)):
            tensor.copy_(scalar_on(number, tensor.dtype, tensor.device))

    def _scale_on(self, device: torch.device) -> Tensor:
        return move_to(self._check_scale_growth_tracker("scale")[0], device)

    def _inverse(self, grads: list[Tensor]) -> Tensor:
        return reciprocal(self._scale_on(home_device(grads) if grads else torch.device("cpu")))

    def _optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return torch's state of an optimizer, which is kept alive until `update` so that its id stays."""
        row = self._per_optimizer_states[id(optimizer)]
        row["optimizer"] = optimizer
        return row

    def _plain_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """Step without scaling: never skip, but measure the gradients."""
        closure = kwargs.get("closure") is not None or any(callable(a) for a in args)
        stats = None if closure else measure_whole(gradients_of(optimizer), stages=self._norm_group)
        result = optimizer.step(*args, **kwargs)
        if isinstance(step_outcome := getattr(optimizer, "outcome", None), Outcome):  # it skips by itself
            step_outcome.result = result
            return step_outcome
        stats = stats or measure_whole(gradients_of(optimizer), stages=self._norm_group)
        outcome = Outcome(
            taken=True, finite=stats.finite, grad_norm=stats.norm, amax=stats.amax, result=result
        )
        if devices.capturing(stats.norm.device):
            return outcome
        if not all(record.finite for record in self._queue.push(outcome)) and not self._warned:
            self._warned = True
            warn(
                "gradients hold inf or NaN and the step was taken, since this GradScaler is disabled; "
                "only the outcomes of later steps say so again"
            )
        return outcome

    def _measure(
        self, grads: list[Tensor], inv_scale: Tensor | None = None
    ) -> GradStats[Tensor, Tensor, Tensor | None]:
        """Return finite flag, norm and, where the loss scale wants it, largest magnitude."""
        needs_amax = self._rule.needs_amax
        return measure_whole(grads, inv_scale, needs_amax=needs_amax, stages=self._norm_group)

    def _one_pass_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row, inv_scale = self._optimizer_state(optimizer), None
        if row["stage"] is torchs.OptState.READY:
            grads = gradients_of(optimizer)
            inv_scale = self._inverse(grads)
            one_stage = self._norm_group is None
            stats = optimizer.measure(inv_scale=inv_scale) if one_stage else self._measure(grads, inv_scale)
            row["found_inf_per_device"] = {stats.finite.device: (~stats.finite).float()}
            self._store_stats(row, stats)
        found_inf = is_found_inf(row)
        skip = found_inf.is_cpu and bool(found_inf)  # hosts see a skip by `step` not being called
        result = None if skip else optimizer.step(*args, inv_scale=inv_scale, found_inf=found_inf, **kwargs)
        row["stage"] = torchs.OptState.STEPPED
        return result

    def _store_stats(self, row: dict[str, Any], stats: GradStats[Tensor, Tensor, Tensor | None]) -> None:
        """Keep norm and largest magnitude, and make the flags those of all ranks."""
        row.update(norm=stats.norm, amax=stats.amax)
        if self._shares_flag():
            found_inf = distributed.all_ranks(is_found_inf(row), self._group).float()
            places = row["found_inf_per_device"] or [found_inf.device]
            row["found_inf_per_device"] = {device: found_inf.to(device) for device in places}

    def _shares_flag(self) -> bool:
        return self._across_ranks and distributed.world_size(self._group) > 1

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries, and one more where they do not say all; empty when disabled.

        What those five cannot say (another kind of loss scale, bounds, hysteresis, a run of skips) goes under
        the key "halfstep", which torch's scaler ignores. Call after `update`.
        """
        state = super().state_dict()
        if not self._enabled:
            return state
        self._count(self._queue.drain())
        rule = self.loss_scale
        bounds = isinstance(rule, DynamicLossScale) and (rule.hysteresis, rule.min, rule.max)
        if self._skips.in_row or bounds != (1, SMALLEST_SCALE, LARGEST_SCALE):
            state[_OURS] = {"loss_scale": rule.state_dict(), "skips_in_row": self._skips.in_row}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take up a state saved by this scaler or by torch's; ignored when disabled.

        Raises ScalerStateError for the empty state of a disabled scaler and CheckpointError for one that is
        neither.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ScalerStateError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of "
                "GradScaler."
            )
        try:
            if _OURS in state_dict:
                ours = state_dict[_OURS]
                rule, in_row = LossScale.from_state(ours["loss_scale"]), int(ours["skips_in_row"])
            else:
                scale, growth, backoff, interval, clean = (state_dict[key] for key in _TORCH_KEYS)
                numbers = {"growth": growth, "backoff": backoff, "interval": interval, "clean": int(clean)}
                rule, in_row = _with_numbers(self._rule, **numbers, overflows=0).with_value(float(scale)), 0
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"a GradScaler state that cannot be read: {error!r}") from error
        self._begin_with(rule)
        self._skips = replace(self._skips, in_row=in_row)

    def _count(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            self._skips = self._skips.after_steps(record.taken)
            self._skips.check(scale=record.scale)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise ScalerStateError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end "
                "after scaler.update()."
            )
        self._count(self._queue.drain())
        rule = self.loss_scale if self._enabled else self._rule
        return super().__getstate__() | {"_rule": LossScale.from_state(rule.state_dict())}

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        """Return a copy with tensors of its own; its state of an optimizer follows the optimizer's copy."""
        self._count(self._queue.drain())
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(vars(self))
        twin._queue = OutcomeQueue()
        twin._scale, twin._growth_tracker = copy.deepcopy((self._scale, self._growth_tracker), memo)
        twin._per_optimizer_states = copy.copy(self._per_optimizer_states)
        twin._per_optimizer_states.clear()
        for row in self._per_optimizer_states.values():
            optimizer = memo.get(id(row["optimizer"]), row["optimizer"])
            flags = {"found_inf_per_device": copy.deepcopy(row["found_inf_per_device"])}
            twin._optimizer_state(optimizer).update(row | flags | {"optimizer": optimizer})
        return twin

    def __repr__(self) -> str:
        return f"GradScaler({self.loss_scale})"


_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def name_in(optimizer: Any, p: Tensor) -> str:
    """Describe one of an optimizer's parameters, which have no names there."""
    number = next(number for number, parameter in enumerate(parameters_of(optimizer)) if parameter is p)
    return f"parameter {number} of this {type(optimizer).__name__}, of shape {list(p.shape)},"


def is_found_inf(row: dict[str, Any]) -> Tensor:
    """Whether any of an optimizer's gradients was found not to be finite, on any device."""
    return any_of(list(row["found_inf_per_device"].values()))


def _dynamic_part(rule: LossScale) -> DynamicLossScale | None:
    """Return the part of a loss scale that grows and backs off."""
    scale = rule.limit if isinstance(rule, HeadroomLossScale) else rule
    return scale if isinstance(scale, DynamicLossScale) else None


def _with_numbers(rule: LossScale, **numbers: Any) -> LossScale:
    """Return the same loss scale with other numbers, where it has such."""
    if isinstance(rule, HeadroomLossScale):
        return replace(rule, limit=replace(rule.limit, **numbers))
    return replace(rule, **numbers) if isinstance(rule, DynamicLossScale) else rule


def _adjusted_scale(rule: LossScale, found_inf: Tensor, amax: Tensor | None) -> LossScale:
    if found_inf.is_cpu:
        return rule.adjust(not found_inf, None if amax is None else float(amax))
    update = devices.declared(found_inf.device.type).update_scale
    if update is not None and type(rule) is DynamicLossScale:
        return rule.adjust_by_kernel(update, found_inf)
    return rule.adjust(~found_inf, amax)


@contextmanager
def attributes_kept(optimizer: Any) -> Generator[None]:
    """Give a fused optimizer its attributes back that torch's step writes, also after an error."""
    names = ("grad_scale", "found_inf")
    before = {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}
    try:
        yield
    finally:
        for name in names:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(before)
