"""mindspore.nn.wrap.loss_scale: the training cell with a loss scale, and what moves the scale."""

from halfstep.compat.mindspore.nn._training import TrainOneStepWithLossScaleCell
from halfstep.compat.mindspore.nn._update_cells import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell

__all__ = ["DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell", "TrainOneStepWithLossScaleCell"]
