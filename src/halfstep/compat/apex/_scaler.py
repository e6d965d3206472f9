"""`apex.amp.scaler.LossScaler`: one loss scale with Apex's bounds, around halfstep's immutable values."""

from __future__ import annotations

from halfstep.scaling.loss_scale import SMALLEST_SCALE, DynamicLossScale, LossScale, StaticLossScale
from halfstep.scaling.skips import SkipCount


class LossScaler:
    """One loss scale by Apex's rule: x2 after 2000 clean passes, halved on overflow, within bounds.

    Args:
        loss_scale: a number, its text, or "dynamic".
        init_scale: where a dynamic scale starts, as far as the bounds let it.
        scale_factor: how far it moves at a time. scale_window: clean passes before it grows.
        min_loss_scale, max_loss_scale: its bounds.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._skips = SkipCount()
        self._clean = 0
        if self.dynamic:
            low, factor = min_loss_scale or SMALLEST_SCALE, float(scale_factor)
            first = max(low, min(float(init_scale), max_loss_scale))
            self.value: LossScale = DynamicLossScale(
                first, factor, 1 / factor, int(scale_window), min=low, max=max_loss_scale
            )
        else:
            self.value = StaticLossScale(float(loss_scale))

    def loss_scale(self) -> float:
        """The present scale."""
        return self.value.read()

    @property
    def _loss_scale(self) -> float:
        """The present scale, which scripts set by hand under this name."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.set(value)

    def set(self, value: float) -> None:
        """Go on from another scale; a dynamic one stays dynamic."""
        self.value = self.value.with_value(value)

    @property
    def unskipped(self) -> int:
        """Clean backward passes since the last overflow or growth."""
        return int(self.value.clean) if isinstance(self.value, DynamicLossScale) else self._clean

    _unskipped = unskipped

    def update(self, found_inf: bool) -> bool:
        """Take in what a backward gave; whether the step must be skipped."""
        self.value = self.value.adjust(not found_inf)
        self._clean += 1
        if not self.dynamic:
            return False
        self._skips = self._skips.after(not found_inf, scale=self.loss_scale())
        return found_inf

    def load(self, loss_scale: float, unskipped: int) -> None:
        """Continue from saved numbers."""
        self._clean = int(unskipped)
        if isinstance(self.value, DynamicLossScale):
            bounded = min(max(float(loss_scale), self.value.min), self.value.max)
            state = self.value.state_dict()
            self.value = LossScale.from_state({**state, "current": bounded, "clean": int(unskipped)})
        else:
            self.value = StaticLossScale(float(loss_scale))
