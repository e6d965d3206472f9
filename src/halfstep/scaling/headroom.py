"""The loss scale chosen from the bits that are left before overflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from halfstep.errors import ConfigError, show
from halfstep.formats import FP16
from halfstep.scaling.loss_scale import (
    LARGEST_SCALE,
    DynamicLossScale,
    LossScale,
    check_count,
    check_scale,
    is_number,
)
from halfstep.trees import home_device, move_to, scalar_on


@dataclass(frozen=True)
class HeadroomLossScale(LossScale):
    """The largest power of two that leaves `bits` of headroom under `overflow_at`, never above `limit`.

    The largest gradient magnitude of the last `window` finite steps says how far the scale may go. A step
    that overflows all the same (a jump, or an inf from inside the network) counts as a gradient that just
    reached `overflow_at`, so the scale drops by `bits`, for `window` steps. `limit` is run as the blind
    growth it replaces: where all that overflows is seen in the weight gradients, its scale is what a
    DynamicLossScale of the same settings would have, ours is never above, and so a step is skipped only where
    blind growth skips it too. A short `limit.interval` follows shrinking gradients closely at no price
    in skips. `history` is the state (magnitudes of unscaled gradients); leave it to `adjust`.
    """

    needs_amax: ClassVar[bool] = True

    bits: int = 2
    window: int = 20
    limit: DynamicLossScale = field(default_factory=DynamicLossScale)
    overflow_at: float = FP16.max
    history: tuple[float, ...] | Tensor = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        check_count("HeadroomLossScale", "bits", self.bits)
        check_count("HeadroomLossScale", "window", self.window)
        check_scale("HeadroomLossScale (overflow_at)", self.overflow_at, 1.0, LARGEST_SCALE * 2)
        if isinstance(self.limit, Mapping):
            object.__setattr__(self, "limit", LossScale.from_state(self.limit))
        if not isinstance(self.limit, DynamicLossScale):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"HeadroomLossScale: limit must be a DynamicLossScale, got {show(self.limit)}")
        if isinstance(self.history, list):
            object.__setattr__(self, "history", tuple(self.history))
        is_tensor = isinstance(self.history, Tensor)
        if not is_tensor and not (isinstance(self.history, tuple) and all(map(is_number, self.history))):
            raise ConfigError(
                f"HeadroomLossScale: history must be a tuple of numbers, got {show(self.history)}"
            )

    @property
    def value(self) -> float | Tensor:
        """The scale: a float on the host, a 0-d float32 tensor after `adjust(tensor)`."""
        past = self.history
        if not isinstance(past, Tensor) and not any(past):
            return self.limit.value
        peaks = past if isinstance(past, Tensor) else torch.tensor(past, dtype=torch.float32, device="cpu")
        room = _power_of_two_below(self.overflow_at / (peaks.max() * 2.0**self.bits))
        value = torch.minimum(room, self.limit.tensor(peaks.device)).clamp(min=self.limit.min)
        return value if isinstance(past, Tensor) else float(value)

    def with_value(self, value: float | Tensor) -> HeadroomLossScale:
        """Return this scale with its limit set to `value` and its memory of gradients emptied."""
        return replace(self, limit=self.limit.with_value(value), history=())

    @property
    def at_lowest(self) -> bool:
        """Whether it is down to the `min` of its limit (reads)."""
        return self.read() <= self.limit.min

    def adjust(self, finite: bool | Tensor, amax: float | Tensor | None = None) -> HeadroomLossScale:
        """Return the next scale; ConfigError without `amax`. Tensors in, state on their device."""
        if amax is None:
            raise ConfigError(
                "HeadroomLossScale.adjust(finite, amax) needs the largest magnitude of the unscaled "
                "gradients; halfstep's GradScaler and sessions measure it"
            )
        tensors = [x for x in (finite, amax, self.history) if isinstance(x, Tensor)]
        device = home_device(tensors) if tensors else torch.device("cpu")
        flag = scalar_on(finite, torch.bool, device)
        peak = scalar_on(amax, torch.float32, device)
        magnitude = torch.where(flag, peak, self.overflow_at / self.tensor(device))
        clean = flag & (self.limit.tensor(device) * magnitude <= self.overflow_at)
        if not tensors:
            past = (*cast("tuple[float, ...]", self.history), float(magnitude))
            return replace(self, limit=self.limit.adjust(bool(clean)), history=past[-self.window :])
        past = torch.zeros(self.window, device=device)
        if isinstance(self.history, Tensor):
            past = move_to(self.history, device)
        elif self.history:
            past = torch.tensor((0.0,) * (self.window - len(self.history)) + self.history, device=device)
        return replace(
            self, limit=self.limit.adjust(clean), history=torch.cat([past[1:], magnitude.reshape(1)])
        )


def _power_of_two_below(x: Tensor) -> Tensor:
    """Return the largest power of two not above a positive normal float32 (its exponent bits alone)."""
    return (x.float().clamp(max=LARGEST_SCALE).view(torch.int32) & 0x7F800000).view(torch.float32)
