"""Loss scales, the scaler with torch's interface, and what a step's outcome was."""

from halfstep.outcome import Outcome
from halfstep.scaling.grad_scaler import GradScaler
from halfstep.scaling.headroom import HeadroomLossScale
from halfstep.scaling.loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
)
from halfstep.scaling.skips import SkipCount

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "DynamicLossScale",
    "GradScaler",
    "HeadroomLossScale",
    "LossScale",
    "NoLossScale",
    "Outcome",
    "SkipCount",
    "StaticLossScale",
]
