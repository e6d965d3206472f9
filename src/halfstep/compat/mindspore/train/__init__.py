"""mindspore.train: Model, its callbacks and its metrics."""

from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore._loss_scale import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from halfstep.compat.mindspore.train._callbacks import (
    Callback,
    CallbackParam,
    CheckpointConfig,
    EarlyStopping,
    History,
    LossMonitor,
    ModelCheckpoint,
    RunContext,
    TimeMonitor,
)
from halfstep.compat.mindspore.train._metrics import (
    F1,
    MAE,
    MSE,
    Accuracy,
    ConfusionMatrix,
    Loss,
    Metric,
    Perplexity,
    Precision,
    Recall,
    Top1CategoricalAccuracy,
    Top5CategoricalAccuracy,
    TopKCategoricalAccuracy,
    get_metric_fn,
    names,
)
from halfstep.compat.mindspore.train._model import Model

__all__ = [
    "F1",
    "MAE",
    "MSE",
    "Accuracy",
    "Callback",
    "CallbackParam",
    "CheckpointConfig",
    "ConfusionMatrix",
    "DynamicLossScaleManager",
    "EarlyStopping",
    "FixedLossScaleManager",
    "History",
    "Loss",
    "LossMonitor",
    "LossScaleManager",
    "Metric",
    "Model",
    "ModelCheckpoint",
    "Perplexity",
    "Precision",
    "Recall",
    "RunContext",
    "TimeMonitor",
    "Top1CategoricalAccuracy",
    "Top5CategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "get_metric_fn",
    "names",
]

__getattr__ = absent("train")
