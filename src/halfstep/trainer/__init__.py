"""A training loop that is short enough to read, its records and its position in the data."""

from halfstep.trainer.loop import Trainer
from halfstep.trainer.records import (
    Callback,
    EarlyStopping,
    History,
    Logger,
    Metric,
    ProgressBar,
    StepLog,
    accuracy,
)

__all__ = [
    "Callback",
    "EarlyStopping",
    "History",
    "Logger",
    "Metric",
    "ProgressBar",
    "StepLog",
    "Trainer",
    "accuracy",
]
