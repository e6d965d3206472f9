"""mindspore.train.loss_scale_manager: where older scripts take loss scale managers from."""

from halfstep.compat.mindspore._loss_scale import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)

__all__ = ["DynamicLossScaleManager", "FixedLossScaleManager", "LossScaleManager"]
