"""Loss scales of the front doors, which are neither a session's nor a GradScaler's."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


class ApexScale:
    """The first loss scale of `halfstep.compat.apex.amp`, as a GradScaler shows its own."""

    door = "apex"

    def __init__(self, amp: Any) -> None:
        self._amp = amp

    def is_enabled(self) -> bool:
        """Always, once amp.initialize has run."""
        return True

    def get_scale(self) -> float:
        """The present scale."""
        return float(self._amp.state_dict()["loss_scaler0"]["loss_scale"])

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the present scale."""
        return loss * self.get_scale()

    def update(self, new_scale: float) -> None:
        """Go on with another scale."""
        state = self._amp.state_dict()
        state["loss_scaler0"]["loss_scale"] = new_scale
        self._amp.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """What amp.state_dict() holds."""
        return self._amp.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self._amp.load_state_dict(state)


def scale_of_a_door() -> ApexScale | None:
    """The scale of Apex's names, where the script has initialised them."""
    amp = sys.modules.get("halfstep.compat.apex.amp")
    return ApexScale(amp) if amp is not None and amp.state_dict() else None
