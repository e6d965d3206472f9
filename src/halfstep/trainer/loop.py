"""A training loop that is short enough to read: fit, evaluate, checkpoints, resume, callbacks, loggers.

Precision is `hs.prepare`'s; the loop only calls it. Losses, metrics and outcomes stay on the device and are
read together every `read_every` steps, so that the steady step waits for nothing.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import checkpoint as _checkpoint
from halfstep import rng
from halfstep.background import Background
from halfstep.devices import resolve
from halfstep.distributed import watchdog, world_size
from halfstep.errors import CheckpointError, ConfigError, DataError, HalfstepError, HalfstepWarning, show
from halfstep.numerics.replayable import Replayable
from halfstep.numerics.trace import Trace
from halfstep.scaling.outcome import Outcome
from halfstep.session.prepare import prepare
from halfstep.trainer import ranks, saving
from halfstep.trainer.position import MicroBatches, Position
from halfstep.trainer.records import Callback, History, Logger, Metric, ProgressBar, StepLog
from halfstep.trainer.stopping import EarlyStopping, Terminated

_PARTS = {"step", "epoch", "threads", "model", "optimizer", "amp", "scheduler", "random", "position"}


class _StopBetweenSteps(Exception):
    """A callback stopped the training when no further batch of a pass came, before the next step."""


class _Step:
    """One step of a Trainer: forward and backward of each of its batches, then the update."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, batches: Iterable[Any]) -> tuple[Tensor, Outcome]:
        """Returns the step's loss, unscaled and detached, and its outcome."""
        own = self._trainer
        total: Tensor | None = None
        for number, (x, y) in enumerate(batches, 1):
            apart = number < own.accumulate and hasattr(own.forward, "no_sync")
            with cast(Any, own.forward).no_sync() if apart else nullcontext():
                with own.amp.autocast():
                    loss = own.loss_fn(own.forward(x), y) / own.accumulate
                own.amp.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total, own.amp.step(clip_norm=own.clip_norm, scheduler=own.scheduler)


class Trainer:
    """Trains `model` with `optimizer` on batches (input, target) at a precision level.

    `level`, `dtype`, `policy`, `plan`, `loss_scale`, `kernels` go to `hs.prepare`; `plan=hs.tune(...).plan`
    brings what was measured, a Trainer measures nothing. `accumulate` batches make one step. `metrics` maps
    names to functions (output, target) -> 0-d mean. With `checkpoints` (a folder) and `checkpoint_every` n,
    every n-th step is saved and `fit(..., resume=True)` goes on from the newest;
    with `background_saves` from a copy, in a thread; what fails there is raised by the next save or at the
    end. A progress bar is drawn when standard error is a terminal (`progress=None`), always or never.

    Over ranks: `wrap` (DistributedDataParallel, say) is called with the prepared model, and each rank brings
    a loader of its own share; `history` has its own losses, `evaluate` gives the means of all. Rank 0 writes
    and cleans the folder. SIGTERM during `fit` with a folder ends the step under way, saves and exits with
    status 0. A rank that fails, is killed, or does not answer for `rank_timeout` seconds is named by the
    others in a RankError. `on_nonfinite` is `hs.prepare`'s.

    With `trace` a step that is skipped, or whose loss is not finite, is replayed: the op at which it began is
    told in a warning (once for each cause), in the message of LossScaleCollapsed, and kept in `traces`.
    Training goes on as if nothing had been replayed; a range that only a dynamic loss scale's present value
    exceeds is kept without a warning. A run that goes well pays for noting random state and buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        level: str = "O1",
        dtype: str | torch.dtype | None = None,
        policy: Any = None,
        plan: Any = None,
        loss_scale: Any = None,
        kernels: Any = None,
        device: str | torch.device | None = None,
        clip_norm: float | None = None,
        scheduler: Any = None,
        accumulate: int = 1,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        checkpoints: str | Path | None = None,
        checkpoint_every: int = 0,
        keep: int = 3,
        background_saves: bool = False,
        read_every: int = 50,
        progress: bool | None = None,
        trace: bool = False,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        rank_timeout: float | None = None,
        on_nonfinite: str | None = None,
    ) -> None:
        counts = {"accumulate": accumulate, "checkpoint_every": checkpoint_every, "read_every": read_every}
        _check_options({**counts, "keep": keep}, checkpoints)
        _check_level(level)
        _check_callables(loss_fn, metrics, callbacks, loggers)
        saving.check_parallel(model, wrap is not None)
        if device is not None:
            model.to(resolve(device))
        self.names = _checkpoint.parameter_names(model, optimizer)
        options: dict[str, Any] = {"dtype": dtype, "policy": policy, "plan": plan, "kernels": kernels}
        options |= {"loss_scale": loss_scale, "on_nonfinite": on_nonfinite}
        self.amp = prepare(model, optimizer, level=level, **options)
        self.forward = model if wrap is None else wrap(model)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.clip_norm, self.scheduler, self.accumulate = clip_norm, scheduler, accumulate
        self.metrics, self.loggers = dict(metrics or {}), tuple(loggers)
        self.callbacks = (*callbacks, *_progress_bar(progress))
        self.folder = None if checkpoints is None else _checkpoint.CheckpointFolder(checkpoints, keep)
        self.checkpoint_every, self.read_every = checkpoint_every, read_every
        self._background = Background() if background_saves else None
        self.step, self.epoch, self.history = 0, 0, History()
        self._step = _Step(self)
        others = () if scheduler is None else (scheduler,)
        self._replayable = Replayable(self.amp, others=others) if trace else None
        self._pending: list[tuple[int, Tensor, Any]] = []
        self._position: Position | None = None
        self.rank_timeout = rank_timeout
        self._terminated, self._stop, self._between, self._asks = Terminated(), "", False, False

    def stop(self, reason: str = "stopped by a callback") -> None:
        """End `fit` after the present step (of any rank); `history.stopped` says why. For callbacks.

        Asked at the end of a pass, no further step is trained.
        """
        self._stop = reason

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next(self.model.parameters()).device

    @property
    def traces(self) -> Sequence[tuple[int, Trace]]:
        """Step number and trace of each bad step that was replayed and had a cause of its own."""
        return [] if self._replayable is None else self._replayable.traces

    def fit(
        self,
        loader: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        resume: bool = False,
    ) -> History:
        """Train until step number `steps`, or for `epochs` passes of a loader with a length.

        Raises DataError for a batch with inf or NaN (before it touches the weights), an empty loader, or (on
        every rank, before the first step) ranks with batches for different numbers of steps; and
        CheckpointError when `resume` finds a corrupt checkpoint or one of another model.
        """
        last = self._last_step(loader, steps, epochs)
        ranks.check_even(last)
        if any(isinstance(one, EarlyStopping) and one.every is None for one in self.callbacks):
            ranks.check_passes(loader)
        self._position = Position(loader, self._end_epoch)
        self.history, self._stop = History(), ""
        unsized = saving.ranks_max(0 if hasattr(loader, "__len__") else 1)
        self._asks = bool(unsized) and self.device.type == "cpu"  # asking makes an accelerator wait
        if resume:
            self._resume()
        elif self.folder is not None:
            saving.on_rank_0(self.folder.claim)
        guard = watchdog(lambda: self.step + 1, self.rank_timeout)
        with self._terminated.watched(self.folder is not None), guard:
            self._fit(last, epochs or 0)
        if self._terminated.arrived:
            sys.exit(0)
        return self.history

    def _fit(self, last: int, epochs: int) -> None:
        started = time.perf_counter()
        self._tell("on_fit_start", last)
        try:
            self.model.train()
            batches = iter(cast(Position, self._position))
            while self.step < last and not self._stopped():
                try:
                    self._train_step(batches)
                except _StopBetweenSteps:
                    continue
                if len(self._pending) >= self.read_every:
                    self._read()
                if self.checkpoint_every and self.step % self.checkpoint_every == 0:
                    self.save()
            if self._replayable is not None:
                self._replayable.settle()
            if self.epoch < epochs and not self.history.stopped:
                cast(Position, self._position).end()  # fewer batches are left than make a step
            self._read()
            self.wait_until_saved()
        except HalfstepError:
            with suppress(HalfstepError):
                self._read()
            raise
        finally:
            self.history.seconds = time.perf_counter() - started
            self._tell("on_fit_end")

    def wait_until_saved(self) -> None:
        """Return when no save in the background is under way; CheckpointError where the last one failed."""
        if self._background is not None:
            saving.settle(self._background)

    def _stopped(self) -> bool:
        """Whether some rank was told to stop; saves first where SIGTERM told it."""
        if self.device.type != "cpu" and self.step % self.read_every and world_size() > 1:
            return False  # asking makes an accelerator wait
        told = saving.ranks_max(2 if self._terminated.arrived else 1 if self._stop else 0)
        if not told:
            return False
        terminated = told == 2
        self._terminated.arrived = terminated
        if terminated and self.folder is not None:
            self.wait_until_saved()
            if not saving.ranks_max(self.folder.has(self.step)):
                self.save()
        self.history.stopped = "SIGTERM" if terminated else self._stop or "another rank stopped"
        return True

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Mean loss and metrics over `loader`, weighted by batch size; summed on the device, read once.

        Over ranks the mean over the samples of all, the same on each: every rank calls it, at the same step,
        with a loader of its own share (of any length, empty too).
        """
        with watchdog(lambda: self.step, self.rank_timeout):
            means = ranks.means(*self._sums(loader))
        self._log(means, prefix="test ")
        return means

    def _sums(self, loader: Iterable[Any]) -> tuple[dict[str, float], int]:
        """Sums of loss and metrics over this rank's samples, and how many they are."""
        sums: dict[str, Tensor] = {}
        count = 0
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                for x, y in map(self._move, loader):
                    with self.amp.autocast():
                        output = self.model(x)
                        values = {"loss": self.loss_fn(output, y)}
                    values |= {name: metric(output, y) for name, metric in self.metrics.items()}
                    for name, value in values.items():
                        sums[name] = sums.get(name, 0.0) + value.double() * len(x)
                    count += len(x)
        finally:
            for module, training in modes:
                module.training = training
        return (dict(zip(sums, torch.stack(list(sums.values())).tolist())) if sums else {}), count

    def save(self) -> Path:
        """Write a checkpoint of this moment into the folder; returns its path."""
        if self.folder is None:
            raise ConfigError("this Trainer has no checkpoint folder; pass checkpoints='runs/mine'")
        return saving.save(self.folder, self.step, self.state_dict(), self._background)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: model, optimizer, precision, scheduler, generators, position."""
        return {
            "format": _checkpoint.FORMAT,
            "step": self.step,
            "epoch": self.epoch,
            "threads": torch.get_num_threads(),
            "model": _checkpoint.model_state(self.model),
            "optimizer": _checkpoint.optimizer_state(self.optimizer, self.names),
            "amp": self.amp.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "random": rng.random_state(),
            "position": None if self._position is None else self._position.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a `state_dict` over; CheckpointError when it is of another model or layout."""
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CheckpointError(f"got {show(state)}: expected what a Trainer's state_dict() gave")
        if state.get("format") != _checkpoint.FORMAT:
            raise CheckpointError(
                f"checkpoint layout {state.get('format')!r}; this version reads {_checkpoint.FORMAT}"
            )
        missing = sorted(_PARTS - state.keys())
        if missing:
            raise CheckpointError(f"not a Trainer's checkpoint: {', '.join(missing)} missing")
        _checkpoint.warn_if_threads_differ(state["threads"])
        if (self.scheduler is None) != (state["scheduler"] is None):
            with_it, without = (
                ("checkpoint", "Trainer") if self.scheduler is None else ("Trainer", "checkpoint")
            )
            raise CheckpointError(
                f"the {with_it} has a scheduler, the {without} has none: resume with the same"
            )
        _checkpoint.check_model_state(self.model, state["model"])
        _checkpoint.check_optimizer_state(self.optimizer, self.names, state["optimizer"])
        self.amp.load_state_dict(state["amp"])
        _checkpoint.load_model_state(self.model, state["model"])
        _checkpoint.load_optimizer_state(self.optimizer, self.names, state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.epoch = int(state["step"]), int(state["epoch"])
        if self._position is not None and state["position"] is not None:
            self._position.load_state_dict(state["position"])
        if state["random"] is not None:
            rng.load_random_state(state["random"])

    def _resume(self) -> None:
        if self.folder is None:
            raise ConfigError("resume=True without a checkpoint folder; pass checkpoints='runs/mine'")
        state = saving.load_latest(self.folder)
        if state is not None:
            self.load_state_dict(state)

    def _last_step(self, loader: Iterable[Any], steps: int | None, epochs: int | None) -> int:
        if (steps is None) == (epochs is None):
            raise ConfigError(f"fit got steps={steps} and epochs={epochs}; give exactly one of them")
        for name, value in (("steps", steps), ("epochs", epochs)):
            if value is not None and not _is_count(value):
                raise ConfigError(f"fit got {name}={show(value)}; expected a whole number")
        if not isinstance(loader, Iterable):
            raise ConfigError(f"fit got a {type(loader).__name__} as a loader; give batches (input, target)")
        if steps is not None:
            last = steps
        elif hasattr(loader, "__len__"):
            last = int(epochs or 0) * len(loader) // self.accumulate  # type: ignore[arg-type]
        else:
            raise ConfigError(f"a {type(loader).__name__} has no length; give steps= instead of epochs=")
        if last < 1:
            raise ConfigError(f"fit would train {last} steps; give steps= or epochs= of at least 1")
        return last

    def _train_step(self, batches: Iterator[Any]) -> None:
        self._between = True

        def fetch() -> tuple[Any, Any]:
            batch = next(batches)
            try:
                self._ask_between_steps()
            except _StopBetweenSteps:
                cast(Position, self._position).give_back()
                raise
            return self._move(batch)

        if self._replayable is None:
            total, outcome = self._step(fetch() for _ in range(self.accumulate))
        else:
            self._replayable.steps = self.step
            total, outcome = self._replayable.run(self._step, MicroBatches(fetch, self.accumulate))
        self.step += 1
        self._pending.append((self.step, total, outcome))
        self._tell("on_step_end")
        cast(Position, self._position).settle()

    def _move(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(f"a batch is a {type(batch).__name__}; expected a pair (input, target)")
        for part, value in zip(("input", "target"), batch):
            if isinstance(value, Tensor) and value.is_floating_point() and value.device.type == "cpu":
                _require_finite(value, part, self.step + 1)
        x, y = (v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v for v in batch)
        return x, y

    def _read(self) -> None:
        if not self._pending:
            return
        losses = torch.stack([loss.float() for _, loss, _ in self._pending]).tolist()
        logs = [
            StepLog(step, loss, o.taken, o.scale, o.grad_norm, o.reason)
            for (step, _, outcome), loss in zip(self._pending, losses)
            for o in (outcome.read(),)
        ]
        self._pending.clear()
        self.history.steps.extend(logs)
        self._check_divergence(logs)
        self._log({"loss": logs[-1].loss, "scale": logs[-1].scale, "skipped": len(self.history.skipped)})
        self._tell("on_read", logs)

    def _check_divergence(self, logs: Sequence[StepLog]) -> None:
        bad = [log.step for log in logs if log.taken and not math.isfinite(log.loss)]
        if bad and self.history.diverged_at is None:
            self.history.diverged_at = bad[0]
            warnings.warn(
                f"the loss is not finite from step {bad[0]} on, yet steps were taken: the run has diverged "
                "(a dynamic loss scale skips such steps; a lower learning rate or bf16 may avoid them)",
                HalfstepWarning,
                stacklevel=4,
            )

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._tell("on_epoch_end")
        if self._stop or self._asks:
            self._ask_between_steps()

    def _ask_between_steps(self) -> None:
        """Once a step, before its first batch is used: was a rank told to stop when its pass ended?

        Ranks whose pass ended ask before they begin the next, others with a batch in hand.
        """
        between, self._between = self._between, False
        if between and (
            saving.ranks_max(bool(self._stop)) if self._asks else self._stop and world_size() == 1
        ):
            raise _StopBetweenSteps

    def _log(self, values: Mapping[str, float], prefix: str = "") -> None:
        for logger in self.loggers:
            logger.log(self.step, {prefix + name: value for name, value in values.items()})

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)


def _require_finite(value: Tensor, part: str, step: int) -> None:
    # A sum is not finite as soon as one element is not; only then is the exact and slower look needed.
    if not math.isfinite(value.sum(dtype=torch.float64).item()):
        finite = value.isfinite()
        bad = int((~finite).sum())
        if bad:
            kind = "NaN or inf" if bool(value.isnan().any()) else "inf"
            raise DataError(
                f"the {part} of the batch for step {step} holds {bad} values of {kind}; "
                "clean the data, nothing was updated with it"
            )


def _check_level(level: object) -> None:
    if level == "auto":
        raise ConfigError(
            "Trainer(level='auto'): a Trainer does not measure, so that a resumed run is the run that began; "
            "find the plan once with hs.tune(model, optimizer, step, x, y) or `halfstep tune`, then pass "
            "plan=found.plan or the path of the TOML file"
        )


def _check_options(counts: Mapping[str, int], checkpoints: str | Path | None) -> None:
    for name, value in counts.items():
        least = 0 if name == "checkpoint_every" else 1
        if not _is_count(value) or value < least:
            raise ConfigError(f"{name}={show(value)}; expected a whole number, {least} or more")
    every = counts["checkpoint_every"]
    if every and checkpoints is None:
        raise ConfigError(f"checkpoint_every={every} without a folder; pass checkpoints='runs/mine'")
    if checkpoints is not None and not isinstance(checkpoints, str | Path):
        raise ConfigError(f"checkpoints={show(checkpoints)}; expected a folder's path")


def _progress_bar(wanted: bool | None) -> list[Callback]:
    show = sys.stderr.isatty() if wanted is None else wanted
    return [ProgressBar()] if show and saving.rank() == 0 else []


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_callables(loss_fn: Any, metrics: Any, callbacks: Any, loggers: Any) -> None:
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn={show(loss_fn)}; expected a function (output, target) -> loss")
    if metrics is not None and not (isinstance(metrics, Mapping) and all(map(callable, metrics.values()))):
        raise ConfigError(f"metrics={show(metrics)}; expected names and functions (output, target) -> value")
    for name, given in (("callbacks", callbacks), ("loggers", loggers)):
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise ConfigError(f"{name}={show(given)}; expected a list")
