"""Callbacks of `Model`: they print, save, record, stop and change the learning rate."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.compat.mindspore._functions import load_param_into_net, save_checkpoint
from halfstep.compat.mindspore._tensor import Parameter, check_kind, check_whole
from halfstep.errors import ConfigError, warn

__all__ = [
    "Callback",
    "CallbackParam",
    "CheckpointConfig",
    "EarlyStopping",
    "History",
    "LearningRateScheduler",
    "LossMonitor",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "RunContext",
    "TimeMonitor",
]


class CallbackParam(dict[str, Any]):
    """What callbacks may know, as a dict and as attributes (None for what is missing)."""

    def __getattr__(self, key: str) -> Any:
        return self.get(key)

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


class RunContext:
    """Handed to every callback: the parameters, and a way to stop."""

    def __init__(self, original_args: CallbackParam) -> None:
        self._original_args, self._stop = original_args, False

    def original_args(self) -> CallbackParam:
        """Epoch and step numbers, networks, outputs ..."""
        return self._original_args

    def request_stop(self) -> None:
        """Stop training after this step."""
        self._stop = True

    def get_stop_requested(self) -> bool:
        """Whether somebody asked to stop."""
        return self._stop


class Callback:
    """Base of callbacks: override `on_train_...` or `on_eval_...`, or the short names for both.

    The events are begin, epoch_begin, step_begin, step_end, epoch_end and end.
    """

    def _nothing(self, run_context: RunContext) -> None:
        """Called at each event that a callback does not override."""

    begin = epoch_begin = step_begin = step_end = epoch_end = end = _nothing


def as_callbacks(callbacks: Callback | Iterable[Callback] | None) -> list[Callback]:
    """Callbacks given as one, several or none, as a list."""
    listed = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    for callback in listed:
        check_kind("Model", "callbacks", callback, Callback)
    return listed


def loss_of(net_outputs: Any) -> Any:
    """The loss, as a numpy float32, in what a training network returned."""
    first = net_outputs[0] if isinstance(net_outputs, tuple | list) else net_outputs
    return np.float32(first.detach().float().mean().item()) if isinstance(first, torch.Tensor) else first


class LossMonitor(Callback):
    """Prints `epoch: E step: S, loss is L` every so many steps, counted across epochs; 0 prints nothing.

    A loss that is NaN or inf raises ValueError, printed or not. In `fit` it prints the metrics too.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        check_whole("LossMonitor", "per_print_times", per_print_times, 0)
        self._every, self._last = per_print_times, 0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Count from the beginning."""
        self._last = 0

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Look at the loss."""
        now = run_context.original_args()
        loss = loss_of(now.net_outputs)
        step = (now.cur_step_num - 1) % now.batch_num + 1
        if not math.isfinite(loss):
            raise ValueError(
                f"In epoch: {now.cur_epoch_num} step: {step}, loss is NAN or INF, training process cannot "
                "continue, terminating training."
            )
        if self._every and now.cur_step_num - self._last >= self._every:
            self._last = now.cur_step_num
            print(f"epoch: {now.cur_epoch_num} step: {step}, loss is {loss!s}", flush=True)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Print what `fit` evaluated."""
        now = run_context.original_args()
        if now.metrics:
            print(f"Eval result: epoch {now.cur_epoch_num}, metrics: {now.metrics}", flush=True)


class TimeMonitor(Callback):
    """Prints the milliseconds of each epoch and of its steps."""

    def __init__(self, data_size: int | None = None) -> None:
        if data_size is not None:
            check_whole("TimeMonitor", "data_size", data_size)
        self.data_size = data_size
        self._began = time.perf_counter()

    def epoch_begin(self, run_context: RunContext) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def epoch_end(self, run_context: RunContext) -> None:
        """Print."""
        now = run_context.original_args()
        spent = (time.perf_counter() - self._began) * 1000
        steps: Any = now.batch_num or self.data_size
        mode = str(now.mode).title()
        print(f"{mode} epoch time: {spent:5.3f} ms, per step time: {spent / steps:5.3f} ms", flush=True)


@dataclass(frozen=True)
class CheckpointConfig:
    """When ModelCheckpoint saves, and how many files it keeps."""

    save_checkpoint_steps: int = 1
    keep_checkpoint_max: int = 5

    def __post_init__(self) -> None:
        check_whole("CheckpointConfig", "save_checkpoint_steps", self.save_checkpoint_steps)
        check_whole("CheckpointConfig", "keep_checkpoint_max", self.keep_checkpoint_max)


class ModelCheckpoint(Callback):
    """Saves the network as PREFIX-EPOCH_STEP.ckpt, every so many steps and at the end."""

    def __init__(
        self, prefix: str = "CKP", directory: str | Path | None = None, config: CheckpointConfig | None = None
    ) -> None:
        if not isinstance(prefix, str) or "/" in prefix:
            raise ConfigError(
                "For 'ModelCheckpoint', the argument 'prefix' for checkpoint file name is invalid, "
                f"it must be string that does not contain '/', but got {prefix}."
            )
        check_kind("ModelCheckpoint", "config", config, CheckpointConfig, type(None))
        self.directory = Path("." if directory is None else directory)
        self.config = config or CheckpointConfig()
        self.prefix, self.latest_ckpt_file_name = prefix, ""
        self._last, self._kept = 0, list[Path]()

    def on_train_begin(self, run_context: RunContext) -> None:
        """Take a prefix no earlier run used."""
        used_prefixes = {path.name.rpartition("-")[0] for path in self.directory.glob("*.ckpt")}
        base, number = self.prefix, 0
        while self.prefix in used_prefixes:
            number += 1
            self.prefix = f"{base}_{number}"

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Save where it is time."""
        now = run_context.original_args()
        if now.cur_step_num >= self._last + self.config.save_checkpoint_steps:
            self._save(now)

    def on_train_end(self, run_context: RunContext) -> None:
        """Save the last step."""
        now = run_context.original_args()
        if now.cur_step_num != self._last:
            self._save(now)

    def _save(self, now: CallbackParam) -> None:
        step = (now.cur_step_num - 1) % now.batch_num + 1
        path = self.directory / f"{self.prefix}-{now.cur_epoch_num}_{step}.ckpt"
        save_checkpoint(now.network, path)
        self._last, self.latest_ckpt_file_name = now.cur_step_num, str(path)
        self._kept.append(path)
        while len(self._kept) > self.config.keep_checkpoint_max:
            self._kept.pop(0).unlink(missing_ok=True)


_SMALLER_IS_BETTER = ("mae", "mse", "loss", "perplexity", "eval_loss")


class _Monitoring(Callback):
    """Watches a value at the end of each epoch: "loss", in `fit` also "eval_loss" or the name of a metric."""

    def __init__(self, monitor: str, min_delta: float, patience: int, verbose: bool, mode: str) -> None:
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"mode should be 'auto', 'min' or 'max', but got {mode}.")
        owner = type(self).__name__
        check_kind(owner, "monitor", monitor, str)
        check_kind(owner, "verbose", verbose, bool)
        check_kind(owner, "min_delta", min_delta, float, int)
        check_whole(owner, "patience", patience, 0)
        self.monitor, self.min_delta, self.verbose = monitor, abs(min_delta), verbose
        self.patience = patience
        self._sign = -1.0 if mode == "min" or (mode == "auto" and monitor in _SMALLER_IS_BETTER) else 1.0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Forget an earlier run."""
        self.best, self.wait = -self._sign * math.inf, 0

    def _better(self, value: float, than: float) -> bool:
        return self._sign * value > self._sign * than + self.min_delta

    def _value(self, now: CallbackParam) -> Any:
        """The value, or None with a warning."""
        values = {"loss": loss_of(now.net_outputs), **(now.eval_results or {})}
        if self.monitor not in values:
            warn(
                f"{type(self).__name__} is conditioned on {self.monitor}, which is not available. "
                f"Available choices are: {list(values)}"
            )
        return values.get(self.monitor)


class EarlyStopping(_Monitoring):
    """Stops when a value has not improved by `min_delta` for `patience` epochs.

    monitor: "loss" in `train`; in `fit` also "eval_loss" or the name of a metric.
    """

    def __init__(
        self,
        monitor: str = "eval_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: bool = False,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
    ) -> None:
        super().__init__(monitor, min_delta, patience, verbose, mode)
        self.baseline, self.restore_best_weights = baseline, restore_best_weights

    def on_train_begin(self, run_context: RunContext) -> None:
        """Forget an earlier run."""
        super().on_train_begin(run_context)
        self.stopped_epoch = 0
        self._best_weights: dict[str, Any] | None = None

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Look at the value, and stop or go on."""
        now = run_context.original_args()
        if (value := self._value(now)) is None:
            return
        self.wait += 1
        if self._better(value, self.best):
            self.best = value
            if self.restore_best_weights:
                self._best_weights = copy.deepcopy(now.network.state_dict())
            if self.baseline is None or self._better(value, self.baseline):
                self.wait = 0
        if self.wait >= self.patience and self.wait:
            self.stopped_epoch = now.cur_epoch_num
            run_context.request_stop()
            if self._best_weights is not None:
                load_param_into_net(now.network, self._best_weights)

    def on_train_end(self, run_context: RunContext) -> None:
        """Say that it stopped."""
        if self.stopped_epoch and self.verbose:
            print(f"Epoch {self.stopped_epoch:05d}: early stopping", flush=True)


def _one_rate(owner: str, optimizer: Any) -> Parameter:
    if not isinstance(optimizer.learning_rate, Parameter):
        raise ConfigError(
            f"{owner} needs an optimizer with one number as its learning rate, not a list, a schedule or "
            f"rates by group: got {optimizer.learning_rate!r}"
        )
    return optimizer.learning_rate


class ReduceLROnPlateau(_Monitoring):
    """Multiplies the learning rate by `factor` when a value has not improved for `patience` epochs.

    Args:
        monitor: "loss" in `train`; in `fit` also "eval_loss" or the name of a metric.
        factor: above 0 and below 1.
        patience: epochs without an improvement of more than `min_delta`.
        cooldown: epochs after a change in which none is counted.
        min_lr: the rate stays at least this.

    Raises ValueError for an optimizer whose learning rate is not one number.
    """

    def __init__(
        self,
        monitor: str = "eval_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: bool = False,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0,
    ) -> None:
        super().__init__(monitor, min_delta, patience, verbose, mode)
        check_kind("ReduceLROnPlateau", "factor", factor, float)
        if not 0.0 < factor < 1.0:
            raise ConfigError(
                f"For 'ReduceLROnPlateau', the 'factor' must be in range of (0, 1), got {factor}."
            )
        check_whole("ReduceLROnPlateau", "cooldown", cooldown, 0)
        check_kind("ReduceLROnPlateau", "min_lr", min_lr, float, int)
        self.factor, self.cooldown, self.min_lr = factor, cooldown, min_lr

    def on_train_begin(self, run_context: RunContext) -> None:
        """Forget an earlier run."""
        super().on_train_begin(run_context)
        self.cooldown_counter = 0

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Look at the value, and lower the rate or go on."""
        now = run_context.original_args()
        rate = _one_rate("ReduceLROnPlateau", now.optimizer)
        if (value := self._value(now)) is None:
            return
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._better(value, self.best):
            self.best, self.wait = value, 0
            return
        if self.cooldown_counter:
            return
        self.wait += 1
        if self.wait >= self.patience:
            if rate.item() > self.min_lr:
                rate.set_data(max(rate.item() * self.factor, self.min_lr))
                if self.verbose:
                    print(
                        f"Epoch {now.cur_epoch_num:05d}: ReduceLROnPlateau reducing learning rate to "
                        f"{rate.item()}.",
                        flush=True,
                    )
            self.cooldown_counter, self.wait = self.cooldown, 0


class LearningRateScheduler(Callback):
    """Sets the learning rate after each step to `learning_rate_function(rate, step number)`.

    Raises ValueError for an optimizer whose learning rate is not one number.
    """

    def __init__(self, learning_rate_function: Callable[[float, int], float]) -> None:
        self.learning_rate_function = learning_rate_function

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Ask for the rate of the next step."""
        now = run_context.original_args()
        rate = _one_rate("LearningRateScheduler", now.optimizer)
        rate.set_data(float(self.learning_rate_function(rate.item(), now.cur_step_num)))


class History(Callback):
    """Records the loss (`net_output`) and the metrics of every epoch."""

    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = {}
        self.epoch: dict[str, list[int]] = {"epoch": []}

    def on_train_begin(self, run_context: RunContext) -> None:
        """Count epochs anew."""
        self.epoch = {"epoch": []}

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Record."""
        now = run_context.original_args()
        self.epoch["epoch"].append(now.cur_epoch_num)
        for name, value in {"net_output": loss_of(now.net_outputs), **(now.metrics or {})}.items():
            self.history.setdefault(name, []).append(value)
