"""mindspore.train.callback: where older scripts take callbacks from."""

from halfstep.compat.mindspore.train._callbacks import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    History,
    LossMonitor,
    ModelCheckpoint,
    RunContext,
    TimeMonitor,
)

__all__ = [
    "Callback",
    "CheckpointConfig",
    "EarlyStopping",
    "History",
    "LossMonitor",
    "ModelCheckpoint",
    "RunContext",
    "TimeMonitor",
]
