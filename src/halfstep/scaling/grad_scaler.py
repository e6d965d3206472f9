"""GradScaler: torch's interface around an immutable loss scale, with an outcome for every step.

Differences from torch's, each on purpose: a skipped step is told; found-inf is an OR over tensors, devices
and ranks; the scale stays inside bounds and a run of skips is an error; fp16 gradients can be unscaled; state
is kept neither by `id()` nor on the optimizer. What loss scales do is decided in `loss_scale.py`.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep import distributed
from halfstep.errors import (
    CheckpointError,
    ConfigError,
    HalfstepWarning,
    ScalerStateError,
    UnsupportedError,
    show,
)
from halfstep.gradients.stats import GradStats, finite_and_norm, measure, measure_shards, measure_whole
from halfstep.gradients.unscale import any_of, kernels_of
from halfstep.scaling.headroom import HeadroomLossScale
from halfstep.scaling.loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicLossScale,
    LossScale,
    NoLossScale,
)
from halfstep.scaling.outcome import Outcome, OutcomeQueue, StepRecord
from halfstep.scaling.per_optimizer import PerOptimizer, State, flags_of
from halfstep.scaling.skips import SkipCount
from halfstep.scaling.torch_names import TorchNames, gradients, name_in, parameters
from halfstep.trees import home_device, multiply

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_OURS = "halfstep"
_ASKING: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
_PER_RUN = ("_queue", "_states", "_lent_scale", "_lent_tracker")


class GradScaler(TorchNames):
    """Scale losses, unscale and check gradients, skip bad steps, adjust the scale.

    Arguments up to `enabled` are torch's; `device` may stay None (the scale lives where the losses are).
    `loss_scale` takes any LossScale instead of the four numbers. `min_scale` and `max_scale` bound the scale
    (by default the powers of two that float32 can hold and invert); `hysteresis` as in DynamicLossScale.
    `max_skips` skipped iterations in a row raise LossScaleCollapsed in `update`. Where torch.distributed is
    initialised, every rank of `group` must use its scaler in step, since the found-inf flag is shared
    (`across_ranks=False`: each rank decides alone). `norm_group` is that of `prepare`: over stages of a
    pipeline the outcome tells the norm of all of them.
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
        if device is not None and not isinstance(device, str | torch.device):
            raise ConfigError(f"GradScaler: device must be a name such as 'cpu', got {show(device)}")
        try:
            torch.device("cpu" if device is None else device)
        except RuntimeError as error:
            raise ConfigError(
                f"GradScaler: unknown device {show(device)}; expected cpu, cuda, ..."
            ) from error
        self._device = device
        if loss_scale is None:
            if growth_factor == 1.0 or backoff_factor == 1.0:
                raise ConfigError(
                    f"growth_factor must be above 1, got {growth_factor!r}, backoff_factor below, got "
                    f"{backoff_factor!r}: for a scale that stays give loss_scale=StaticLossScale(...)"
                )
            rates = (growth_factor, backoff_factor, growth_interval)
            loss_scale = DynamicLossScale(init_scale, *rates, hysteresis, min_scale, max_scale)
        elif not isinstance(loss_scale, LossScale):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"loss_scale must be a LossScale such as NoLossScale(), got {show(loss_scale)}")
        self._value = loss_scale if enabled else NoLossScale()
        self._skips = SkipCount(limit=max_skips)
        self._group = group
        self._across_ranks = across_ranks
        self._norm_group = norm_group
        self._same_gradients = distributed.SameGradients()
        self._warned = False
        self._states = PerOptimizer()
        self._queue = OutcomeQueue()

    @property
    def loss_scale(self) -> LossScale:
        """The current loss scale value."""
        return self._loss_scale

    @property
    def skips(self) -> SkipCount:
        """How many iterations were skipped, as far as known (on an accelerator at most 2 steps late)."""
        return self._skips

    def is_enabled(self) -> bool:
        """Whether losses are scaled and bad steps skipped."""
        return not isinstance(self._loss_scale, NoLossScale)

    def scale(self, outputs: Any) -> Any:
        """Return a tensor, or a nest or iterable of tensors, times the scale; 16-bit ones become fp32."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, Tensor):
            if self._first_device is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            return multiply(outputs, self._loss_scale.tensor(outputs.device))
        if isinstance(outputs, Mapping):
            return {key: self.scale(item) for key, item in outputs.items()}
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*map(self.scale, outputs))
        if isinstance(outputs, list | tuple):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
            return map(self.scale, outputs)
        raise ConfigError(f"outputs must be a Tensor or an iterable of Tensors, got {show(outputs)}")

    def unscale_(self, optimizer: Any) -> None:
        """Divide the scale out of the optimizer's gradients in place, once an iteration, e.g. to clip them.

        Computed in fp32 and stored in each gradient's dtype; fp16 gradients are accepted (values that fall
        below 2^-25 become 0 there). Raises ScalerStateError out of turn.
        """
        if not self.is_enabled():
            return
        self._require_scaled("unscale_")
        state = self._states.of(optimizer)
        _refuse_out_of_turn(state)
        inv_scale = self._loss_scale.inverse(_home(gradients(optimizer)))
        found_inf = torch.zeros((), device=inv_scale.device)
        flags = self._unscale_grads_(optimizer, inv_scale, found_inf, True)
        _, norm, amax = self._look(gradients(optimizer))
        self._note(state, flags or {found_inf.device: found_inf}, norm, amax)
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Outcome:
        """Unscale unless done, then call `optimizer.step(*args, **kwargs)` if every gradient is finite.

        Returns the Outcome; what the optimizer's own step returned is `outcome.result`. An optimizer with
        `one_pass` (halfstep.optim) or torch's fused kernels gets the flag as a device scalar and nothing is
        read back; for any other the flag is read, as torch does. Closures are refused: they would run
        backward unscaled. Raises ScalerStateError out of turn, ConfigError where ranks of `fully_shard` have
        gradients of different parameters.
        """
        if self._shares_flag():
            self._same_gradients.check(parameters(optimizer), partial(name_in, optimizer))
        if not self.is_enabled():
            return self._plain_step(optimizer, args, kwargs)
        _refuse_closure(args, kwargs)
        self._require_scaled("step")
        state = self._states.of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise ScalerStateError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY and not gradients(optimizer) and not self._shares_flag():
            raise ScalerStateError(
                "No inf checks were recorded for this optimizer: none of its parameters has a gradient. "
                "Call scaler.scale(loss).backward() before step."
            )
        result = self._step_of(optimizer)(optimizer, args, kwargs)
        state = self._states.of(optimizer)
        state["stage"] = OptState.STEPPED
        return self._outcome(state, result)

    def _step_of(self, optimizer: Any) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
        """How to step this optimizer: what a subclass replaced is always called."""
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._handed_step if _asks_for_scaler(optimizer) else self._fused_step
        own = self._replaced("unscale_", "_unscale_grads_", "_maybe_opt_step")
        return (
            self._one_pass_step if getattr(optimizer, "one_pass", False) and not own else self._checked_step
        )

    def _replaced(self, *names: str) -> bool:
        """Whether a subclass, or somebody on this instance, put a method in place of ours."""
        return any(getattr(getattr(self, n), "__func__", None) is not getattr(GradScaler, n) for n in names)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale once an iteration, after all steps; or set it to `new_scale`.

        Raises LossScaleCollapsed after `max_skips` skipped iterations in a row (on an accelerator at most 2
        iterations late), ScalerStateError where no gradients were checked.
        """
        if not self.is_enabled():
            return
        self._require_scaled("update")
        checked, self._states = self._states.looked_at(), PerOptimizer()
        if new_scale is not None:
            self._loss_scale = self._loss_scale.with_value(new_scale)
            return
        if not checked:
            raise ScalerStateError("No inf checks were recorded prior to update.")
        found = any_of([flag for state in checked for flag in flags_of(state)])
        amax = _largest([state.get("amax") for state in checked], found.device)
        outcome = Outcome(taken=~found, finite=~found, scale=self._loss_scale.value)
        self._loss_scale = self._next(found, amax)
        for record in self._queue.push(outcome):
            self._skips = self._skips.counted(record.taken)
            self._skips.check(scale=record.scale)

    def _next(self, found: Tensor, amax: Tensor | None) -> LossScale:
        if found.device.type == "cpu":
            return self._loss_scale.adjust(not found, None if amax is None else float(amax))
        update = kernels_of(found.device.type).update_scale
        if update is not None and type(self._loss_scale) is DynamicLossScale:
            return self._loss_scale.adjust_by_kernel(update, found)
        return self._loss_scale.adjust(~found, amax)

    def _plain_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """Step without scaling: never skips, but says what the gradients were."""
        closure = kwargs.get("closure") is not None or any(callable(a) for a in args)
        stats = None if closure else measure_whole(gradients(optimizer), stages=self._norm_group)
        result = optimizer.step(*args, **kwargs)
        stats = stats or measure_whole(gradients(optimizer), stages=self._norm_group)
        outcome = Outcome(
            taken=True, finite=stats.finite, grad_norm=stats.norm, amax=stats.amax, result=result
        )
        for record in self._queue.push(outcome):
            self._tell(record)
        return outcome

    def _tell(self, record: StepRecord) -> None:
        if not record.finite and not self._warned:
            self._warned = True
            warnings.warn(
                "gradients hold inf or NaN and the step was taken, since this GradScaler is disabled; "
                "later such steps are told by their outcomes only",
                HalfstepWarning,
                stacklevel=4,
            )

    def _look(
        self, grads: list[Tensor], inv_scale: Tensor | None = None
    ) -> GradStats[Tensor, Tensor, Tensor | None]:
        """Finite flag, norm and, where the loss scale wants it, largest magnitude."""
        if self._norm_group is not None or any(distributed.local_of(g) is not g for g in grads):
            return measure_shards(grads, inv_scale, stages=self._norm_group)
        if not self._loss_scale.needs_amax:
            return finite_and_norm(grads, inv_scale)
        return measure(grads, inv_scale)

    def _one_pass_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, inv_scale = self._states.of(optimizer), None
        if state["stage"] is OptState.READY:
            grads = gradients(optimizer)
            inv_scale = self._loss_scale.inverse(_home(grads))
            alone = self._norm_group is None
            stats = optimizer.measure(inv_scale=inv_scale) if alone else self._look(grads, inv_scale)
            self._note(state, {stats.finite.device: ~stats.finite}, stats.norm, stats.amax)
        found = any_of(flags_of(state))
        return optimizer.step(*args, inv_scale=inv_scale, found_inf=found, **kwargs)

    def _fused_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand scale and flag to torch's fused kernels, which look for them on the optimizer.

        A `grad_scale` that its owner put there is divided out as well, as torch does.
        """
        state, scale = self._states.of(optimizer), getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            grads = gradients(optimizer)
            ours = self._loss_scale.tensor(_home(grads))
            finite, norm, amax = self._look(grads, self._loss_scale.inverse(_home(grads)))
            own = self._replaced("_check_inf_per_device", "_unscale_grads_")
            flags = self._check_inf_per_device(optimizer) if own else {finite.device: ~finite}
            self._note(state, flags, norm, amax)
            scale = ours if scale is None else ours * scale
        before = {
            name: vars(optimizer)[name] for name in ("grad_scale", "found_inf") if name in vars(optimizer)
        }
        try:
            optimizer.grad_scale, optimizer.found_inf = scale, any_of(flags_of(state)).float()
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
            vars(optimizer).update(before)

    def _handed_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand this scaler to an optimizer whose `step` asks for it and does all of the checking itself."""
        return optimizer.step(*args, **kwargs, grad_scaler=self)

    def _checked_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._states.of(optimizer)["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return self._maybe_opt_step(optimizer, self._states.of(optimizer), *args, **kwargs)

    def _note(
        self, state: State, flags: Mapping[torch.device, Tensor], norm: Tensor, amax: Tensor | None
    ) -> None:
        """Keep what a look at gradients found, the flags as all ranks see them."""
        if self._shares_flag():
            found = self._over_ranks(any_of(list(flags.values())))
            flags = {device: found.to(device, non_blocking=True) for device in flags}
        floats = {device: flag.float() for device, flag in flags.items()}
        state.update(found_inf_per_device=floats, norm=norm, amax=amax)

    def _outcome(self, state: State, result: Any) -> Outcome:
        finite = ~any_of(flags_of(state))
        return Outcome(
            taken=finite,
            finite=finite,
            scale=self._loss_scale.value,
            grad_norm=state.get("norm"),
            amax=state.get("amax"),
            result=result,
        )

    def _shares_flag(self) -> bool:
        return self._across_ranks and distributed.world_size(self._group) > 1

    def _over_ranks(self, found: Tensor) -> Tensor:
        return distributed.all_ranks(found, self._group) if self._across_ranks else found

    def _require_scaled(self, method: str) -> None:
        if self._first_device is None:
            raise ScalerStateError(
                f"Attempted {method} but no loss was scaled yet.  This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )

    def get_scale(self) -> float:
        """Return the scale as a float, 1.0 when disabled (synchronises on an accelerator)."""
        return self._loss_scale.read()

    def get_growth_factor(self) -> float:
        """Return the factor of growth."""
        return self._dynamic().growth

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor of growth."""
        self._edit(growth=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor applied on overflow."""
        return self._dynamic().backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor applied on overflow."""
        self._edit(backoff=new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of clean steps in a row before growth."""
        return self._dynamic().interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of clean steps in a row before growth."""
        self._edit(interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries; empty when disabled.

        What those five cannot say (another kind of loss scale, bounds, hysteresis, a run of skips) goes under
        the key "halfstep", which torch's scaler ignores. Call after `update`.
        """
        if not self.is_enabled():
            return {}
        state: dict[str, Any] = {}
        plain = False
        if isinstance(self._loss_scale, DynamicLossScale | HeadroomLossScale):
            d = self._dynamic()
            numbers = (self.get_scale(), d.growth, d.backoff, d.interval, int(d.clean))
            state = dict(zip(_TORCH_KEYS, numbers, strict=True))
            usual = (1, SMALLEST_SCALE, LARGEST_SCALE)
            plain = d is self._loss_scale and (d.hysteresis, d.min, d.max) == usual
        self._count_skips()
        if not plain or self._skips.in_row:
            state[_OURS] = {"loss_scale": self._loss_scale.state_dict(), "skips_in_row": self._skips.in_row}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a state saved by this scaler or by torch's; ignored when disabled.

        Raises ScalerStateError for the empty state of a disabled scaler and CheckpointError for one that is
        neither.
        """
        if not self.is_enabled():
            return
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(f"not a GradScaler state but a {type(state_dict).__name__}")
        if not state_dict:
            raise ScalerStateError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of "
                "GradScaler."
            )
        ours = state_dict.get(_OURS)
        if ours is not None:
            try:
                scale, in_row = LossScale.from_state(ours["loss_scale"]), int(ours["skips_in_row"])
            except (TypeError, KeyError, ValueError) as error:
                raise CheckpointError(f"a GradScaler state that cannot be read: {error}") from error
            self._loss_scale, self._skips = scale, replace(self._skips, in_row=in_row)
            return
        missing = [key for key in _TORCH_KEYS if key not in state_dict]
        if missing:
            raise CheckpointError(f"not a GradScaler state: {', '.join(missing)} missing")
        scale, growth, backoff, interval, clean = (state_dict[key] for key in _TORCH_KEYS)
        try:
            state = {"current": float(scale), "clean": int(clean), "overflows": 0}
            self._edit(growth=growth, backoff=backoff, interval=interval, **state)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"a GradScaler state that cannot be read: {error}") from error
        self._skips = replace(self._skips, in_row=0)

    def _count_skips(self) -> None:
        for record in self._queue.drain():
            self._skips = self._skips.counted(record.taken)
            self._skips.check(scale=record.scale)

    def __getstate__(self) -> dict[str, Any]:
        if self._states.looked_at():
            raise ScalerStateError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end "
                "after scaler.update()."
            )
        self._count_skips()
        kept = {k: v for k, v in vars(self).items() if k not in _PER_RUN}
        return kept | {"_value": LossScale.from_state(self._loss_scale.state_dict())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._states, self._queue = PerOptimizer(), OutcomeQueue()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        self._count_skips()
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update({k: v for k, v in vars(self).items() if k not in _PER_RUN})
        twin._value = self._loss_scale
        twin._states, twin._queue = copy.deepcopy(self._states, memo), OutcomeQueue()
        return twin

    def __repr__(self) -> str:
        return f"GradScaler({self._loss_scale})"


def _home(grads: list[Tensor]) -> torch.device:
    return home_device(grads) if grads else torch.device("cpu")


def _largest(peaks: list[Tensor | None], device: torch.device) -> Tensor | None:
    """Return the largest of the magnitudes, None unless all were measured."""
    known = [peak.to(device, torch.float32, non_blocking=True) for peak in peaks if peak is not None]
    return torch.stack(known).amax() if len(known) == len(peaks) else None


def _refuse_out_of_turn(state: State) -> None:
    if state["stage"] is OptState.UNSCALED:
        raise ScalerStateError(
            "unscale_() has already been called on this optimizer since the last update()."
        )
    if state["stage"] is OptState.STEPPED:
        raise ScalerStateError("unscale_() is being called after step().")


def _asks_for_scaler(optimizer: Any) -> bool:
    """Whether its `step` has an argument `grad_scaler`; looked up once a class."""
    kind = type(optimizer)
    found = _ASKING.get(kind)
    if found is None:
        parameters = inspect.signature(getattr(kind, "step", optimizer.step)).parameters
        found = _ASKING[kind] = "grad_scaler" in parameters
    return found


def _refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("closure") is not None or any(callable(arg) for arg in args):
        raise UnsupportedError(
            "Closure use is not currently supported if GradScaler is enabled: the closure would run backward "
            "on an unscaled loss. Run forward and backward yourself, then step(optimizer) without a closure."
        )
