"""mindspore.train: Model, its callbacks and its metrics."""

from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore._loss_scale import (
    DynamicLossScaleManager as DynamicLossScaleManager,
)
from halfstep.compat.mindspore._loss_scale import FixedLossScaleManager as FixedLossScaleManager
from halfstep.compat.mindspore._loss_scale import LossScaleManager as LossScaleManager
from halfstep.compat.mindspore.train._callbacks import *
from halfstep.compat.mindspore.train._metrics import *
from halfstep.compat.mindspore.train._model import Model as Model

__getattr__ = absent("train")
