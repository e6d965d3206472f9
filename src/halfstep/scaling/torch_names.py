"""The names with an underscore that public code uses on torch's GradScaler, doing what they do there.

Trainers, pipelines and sharded optimizers read and write `_scale` and `_per_optimizer_states`, override
`_unscale_grads_` and `_maybe_opt_step`, or call them with values of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.errors import ConfigError, ScalerStateError, UnsupportedError
from halfstep.gradients.unscale import unscale_
from halfstep.scaling.headroom import HeadroomLossScale
from halfstep.scaling.loss_scale import DynamicLossScale, LossScale, NoLossScale
from halfstep.scaling.per_optimizer import PerOptimizer, State, flags_of
from halfstep.trees import home_device


class Lent:
    """A tensor that others hold under torch's name: what they write counts, and they see what we write.

    Reductions over ranks and torch's own kernels write without a new `_version`, so on a CPU values are
    compared; elsewhere nothing is read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._known: float | int = -1

    @classmethod
    def new(cls, dtype: torch.dtype, device: torch.device) -> Lent:
        """One of our own making."""
        with torch.inference_mode(False):
            return cls(torch.zeros((), dtype=dtype, device=device))

    @classmethod
    def taken(cls, value: object) -> Lent | None:
        """The tensor that somebody put in the name's place; None for a number."""
        return cls(value) if isinstance(value, Tensor) and not value.is_inference() else None

    def write(self, value: float | Tensor) -> None:
        """Put in what the scaler now has."""
        with torch.no_grad():
            self.tensor.copy_(torch.as_tensor(value), non_blocking=not self.tensor.is_cpu)
        self._known = self.tensor.item() if self.tensor.is_cpu else self.tensor._version

    def written(self, sure: bool) -> bool:
        """Whether somebody else wrote since; off the CPU always, or if `sure` where `_version` tells."""
        if self.tensor.is_cpu:
            return self.tensor.item() != self._known
        return not sure or self.tensor._version != self._known


class TorchNames:
    """Base of `GradScaler`: torch's private attributes over an immutable loss scale."""

    _device: str | torch.device | None
    _states: PerOptimizer
    _value: LossScale
    _first_device: torch.device | None = None
    _set_aside: LossScale | None = None
    _lent_scale: Lent | None = None
    _lent_tracker: Lent | None = None

    @property
    def _loss_scale(self) -> LossScale:
        if self._enabled and (self._lent_scale is not None or self._lent_tracker is not None):
            self._take_up()
        return self._value

    @_loss_scale.setter
    def _loss_scale(self, value: LossScale) -> None:
        self._value = value
        self._write_lent()

    def _take_up(self) -> None:
        """Obey what was written into the tensors that were handed out."""
        before, sure = self._value, not isinstance(self._value, DynamicLossScale)
        scale, tracker = self._lent_scale, self._lent_tracker
        if scale is not None and scale.written(sure):
            self._value = self._value.with_value(scale.tensor)
        if tracker is not None and tracker.written(sure):
            clean = tracker.tensor.reshape(())
            self._value = self._edited(clean=int(clean) if clean.is_cpu else clean.clone())
        if self._value is not before:
            self._write_lent()

    def _write_lent(self) -> None:
        if not self._enabled:
            return
        if self._lent_scale is not None:
            self._lent_scale.write(self._value.value)
        if self._lent_tracker is not None:
            numbers = self._numbers()
            self._lent_tracker.write(0 if numbers is None else numbers.clean)

    def _numbers(self) -> DynamicLossScale | None:
        scale = self._value
        scale = scale.limit if isinstance(scale, HeadroomLossScale) else scale
        return scale if isinstance(scale, DynamicLossScale) else None

    def _dynamic(self) -> DynamicLossScale:
        numbers = self._numbers()
        if numbers is None:
            raise UnsupportedError(f"{type(self._value).__name__} neither grows nor backs off")
        return numbers

    def _edited(self, **changes: Any) -> LossScale:
        edited, scale = replace(self._dynamic(), **changes), self._value
        return replace(scale, limit=edited) if isinstance(scale, HeadroomLossScale) else edited

    def _edit(self, **changes: Any) -> None:
        if self._enabled:  # no method of a disabled scaler does anything
            self._value = self._loss_scale  # with what was written into it
            self._loss_scale = self._edited(**changes)

    @property
    def _enabled(self) -> bool:
        return not isinstance(self._value, NoLossScale)

    @_enabled.setter
    def _enabled(self, value: bool) -> None:
        if bool(value) is self._enabled:
            return
        if value and self._set_aside is None:
            raise ConfigError("a disabled GradScaler has no scale to go back to: make a new one")
        aside, self._set_aside = self._set_aside, None if value else self._loss_scale
        self._loss_scale = cast(LossScale, aside) if value else NoLossScale()

    @property
    def _scale(self) -> Tensor | None:
        """The scale as a tensor, to read and to write into; None before the first `scale()`, as in torch."""
        if self._first_device is None or not self._enabled:
            return None
        value = self._loss_scale.value
        if self._lent_scale is None:
            self._lent_scale = Lent.new(torch.float32, self._home())
            self._lent_scale.write(value)
        return self._lent_scale.tensor

    @_scale.setter
    def _scale(self, value: float | Tensor | None) -> None:
        self._lent_scale = None
        if not self._enabled:
            return
        if value is None:
            self._first_device = None
            self._loss_scale = self._loss_scale.with_value(self._init_scale)
            return
        self._first_device = value.device if isinstance(value, Tensor) else self._home()
        changed = self._loss_scale.with_value(value)
        self._lent_scale = Lent.taken(value)
        self._loss_scale = changed

    @property
    def _growth_tracker(self) -> Tensor | None:
        """Clean steps in a row, to read and to write into; None before the first `scale()`."""
        if self._first_device is None or not self._enabled:
            return None
        clean = self._clean()
        if self._lent_tracker is None:
            self._lent_tracker = Lent.new(torch.int32, self._home())
            self._lent_tracker.write(clean)
        return self._lent_tracker.tensor

    @_growth_tracker.setter
    def _growth_tracker(self, value: int | Tensor | None) -> None:
        self._lent_tracker = None
        clean = value.clone() if isinstance(value, Tensor) and not value.is_cpu else int(value or 0)
        self._edit(clean=clean)
        self._lent_tracker = Lent.taken(value)
        self._write_lent()

    def _clean(self) -> int | Tensor:
        self._value = self._loss_scale  # with what was written into it
        numbers = self._numbers()
        return 0 if numbers is None else numbers.clean

    @property
    def _init_scale(self) -> float:
        numbers = self._numbers()
        return self._loss_scale.read() if numbers is None else numbers.init

    @_init_scale.setter
    def _init_scale(self, value: float) -> None:
        if self._first_device is None and self._enabled:
            self._loss_scale = self._loss_scale.with_value(value)
        if self._numbers() is not None:
            self._edit(init=value)

    @property
    def _init_growth_tracker(self) -> int:
        return self._get_growth_tracker() if self._first_device is None else 0

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: int) -> None:
        if self._first_device is None:
            self._edit(clean=value)

    @property
    def _growth_factor(self) -> float | None:
        numbers = self._numbers()
        return None if numbers is None else numbers.growth

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self._edit(growth=value)

    @property
    def _backoff_factor(self) -> float | None:
        numbers = self._numbers()
        return None if numbers is None else numbers.backoff

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self._edit(backoff=value)

    @property
    def _growth_interval(self) -> int | None:
        numbers = self._numbers()
        return None if numbers is None else numbers.interval

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self._edit(interval=value)

    @property
    def _per_optimizer_states(self) -> PerOptimizer:
        """What is known in this iteration by `id(optimizer)`: the scaler's own table, to read and write."""
        return self._states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, rows: Mapping[int, State]) -> None:
        self._states = PerOptimizer(rows)

    def _home(self) -> torch.device:
        where = getattr(self._value.value, "device", None) or self._first_device
        device = torch.device(where or self._device or "cpu")
        return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device

    def _found_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return self._states.of(optimizer)["found_inf_per_device"]

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients by `inv_scale` in place; a flag for each device: one was not finite.

        `unscale_` and `step` call it, so a subclass may unscale otherwise. Raises ValueError for fp16
        gradients unless `allow_fp16`, as torch.
        """
        grads = gradients(optimizer)
        if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("Attempting to unscale FP16 gradients.")
        if not grads:
            return {}
        flag = unscale_(grads, inv_scale.to(home_device(grads))).to(found_inf.device, found_inf.dtype)
        found = torch.maximum(found_inf, flag)
        return {device: found.to(device) for device in dict.fromkeys(grad.device for grad in grads)}

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: State, *args: Any, **kwargs: Any) -> Any:
        """Step unless a flag says that a gradient was not finite; what the optimizer's step returned."""
        bad = any(bool(flag) for flag in flags_of(optimizer_state))
        return None if bad else optimizer.step(*args, **kwargs)

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        """Look for inf and NaN in the gradients as they are; `_found_inf_per_device` then knows."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        zero, one = torch.zeros((), device=scale.device), torch.ones((), device=scale.device)
        state = self._states.of(optimizer)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, one, zero, True)
        return state["found_inf_per_device"]

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale, tracker = self._scale, self._growth_tracker
        if scale is None or tracker is None:
            raise ScalerStateError(
                f"Attempted {funcname} but _scale is None.  This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )
        return scale, tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._first_device = torch.device(dev)

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return int(self._clean())


def gradients(optimizer: Any) -> list[Tensor]:
    """The gradients that an optimizer's parameters have."""
    return [p.grad for p in parameters(optimizer) if p.grad is not None]


def parameters(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer, one group after the other."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def name_in(optimizer: Any, p: Tensor) -> str:
    """How to speak of one of an optimizer's parameters, which have no names there."""
    number = next(number for number, own in enumerate(parameters(optimizer)) if own is p)
    return f"parameter {number} of this {type(optimizer).__name__}, of shape {list(p.shape)},"
