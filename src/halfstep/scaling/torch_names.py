"""The names with an underscore that public code uses on torch's GradScaler, doing what they do there.

Trainers, pipelines and sharded optimizers read `_scale` and `_per_optimizer_states`, or call
`_unscale_grads_` with a scale of their own. Nothing of ours uses these names.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep.errors import ConfigError, ScalerStateError
from halfstep.gradients.unscale import unscale_
from halfstep.scaling.headroom import HeadroomLossScale
from halfstep.scaling.loss_scale import DynamicLossScale, LossScale, NoLossScale
from halfstep.trees import home_device


def _fresh() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class TorchNames:
    """Base of `GradScaler`: torch's private attributes as views of an immutable loss scale."""

    _loss_scale: LossScale
    _device: str | torch.device | None
    _has_scaled: bool
    _checked: Any

    def _numbers(self) -> DynamicLossScale | None:
        scale = self._loss_scale
        scale = scale.limit if isinstance(scale, HeadroomLossScale) else scale
        return scale if isinstance(scale, DynamicLossScale) else None

    @property
    def _enabled(self) -> bool:
        return not isinstance(self._loss_scale, NoLossScale)

    @_enabled.setter
    def _enabled(self, value: bool) -> None:
        if not value:
            self._loss_scale = NoLossScale()
        elif not self._enabled:
            raise ConfigError("a disabled GradScaler has no scale to go back to: make a new one")

    @property
    def _scale(self) -> Tensor | None:
        """The scale as a tensor; None before the first `scale()`, as in torch."""
        return self._loss_scale.tensor(self._home()) if self._has_scaled and self._enabled else None

    @_scale.setter
    def _scale(self, value: float | Tensor) -> None:
        self._loss_scale = self._loss_scale.with_value(value)
        self._has_scaled = True

    @property
    def _growth_tracker(self) -> Tensor | None:
        numbers = self._numbers()
        if numbers is None or not self._has_scaled:
            return None
        return torch.as_tensor(numbers.clean, dtype=torch.int32, device=self._home())

    @property
    def _init_scale(self) -> float:
        return self._loss_scale.read()

    @property
    def _growth_factor(self) -> float | None:
        numbers = self._numbers()
        return None if numbers is None else numbers.growth

    @property
    def _backoff_factor(self) -> float | None:
        numbers = self._numbers()
        return None if numbers is None else numbers.backoff

    @property
    def _growth_interval(self) -> int | None:
        numbers = self._numbers()
        return None if numbers is None else numbers.interval

    @property
    def _per_optimizer_states(self) -> dict[int, dict[str, Any]]:
        """What is known in this iteration by `id(optimizer)`; a copy: to change it, call the methods."""
        states: dict[int, dict[str, Any]] = defaultdict(_fresh)
        for optimizer, entry in self._checked.items():
            states[id(optimizer)] = {
                "stage": OptState[entry.stage.name],
                "found_inf_per_device": {entry.found_inf.device: entry.found_inf.float()},
            }
        return states

    def _home(self) -> torch.device:
        where = getattr(self._loss_scale.value, "device", None)
        if where is not None:
            return cast("torch.device", where)
        device = torch.device(self._device or "cpu")
        return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device

    def _found_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients by `inv_scale` in place; a flag for each device: one was not finite.

        Raises ValueError for fp16 gradients unless `allow_fp16`, as torch.
        """
        held = (p.grad for group in optimizer.param_groups for p in group["params"])
        grads = [grad for grad in held if grad is not None]
        if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("Attempting to unscale FP16 gradients.")
        if not grads:
            return {}
        flag = unscale_(grads, inv_scale.to(home_device(grads))).to(found_inf.device, found_inf.dtype)
        found = torch.maximum(found_inf, flag)
        return {device: found.to(device) for device in dict.fromkeys(grad.device for grad in grads)}

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        """Look for inf and NaN in the gradients as they are; `_found_inf_per_device` then knows."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        zero, one = torch.zeros((), device=scale.device), torch.ones((), device=scale.device)
        by_device = self._unscale_grads_(optimizer, one, zero, True)
        found = next(iter(by_device.values()), zero).bool()
        entry = self._checked.get(optimizer) or self._checked.entry_of(found)
        self._checked.put(optimizer, replace(entry, found_inf=found))
        return by_device

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale, tracker = self._scale, self._growth_tracker
        if scale is None or tracker is None:
            raise ScalerStateError(
                f"Attempted {funcname} but _scale is None.  This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )
        return scale, tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._has_scaled = True

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        numbers = self._numbers()
        return 0 if numbers is None else int(numbers.clean)
