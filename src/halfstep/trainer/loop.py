"""A training loop that is short enough to read: fit, evaluate, checkpoints, resume, callbacks, loggers.

Precision and checkpoints are the session's (`hs.prepare`); the loop only calls it. Losses, metrics and
outcomes stay on the device and are read together every `read_every` steps, so that the steady step waits for
nothing.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import checkpoint, rng
from halfstep.devices import refuse_capture, refuse_reading, resolve
from halfstep.distributed import (
    all_ranks,
    gather,
    is_sharded,
    rank,
    started_by_torchrun,
    watchdog,
    world_size,
)
from halfstep.errors import CheckpointError, ConfigError, DataError, HalfstepError, show
from halfstep.numerics.replayable import Replayable
from halfstep.numerics.trace import Trace
from halfstep.outcome import Outcome
from halfstep.session.prepare import prepare
from halfstep.trainer.records import Callback, History, Logger, Metric, ProgressBar, StepLog
from halfstep.trees import move_to, stack_scalars

# ---- what a Trainer refuses before it touches a weight, on every rank alike ---------------------------


_LEAST = {"accumulate": 1, "read_every": 1, "keep": 1, "checkpoint_every": 0}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of a Trainer that cannot be."""
    metrics: Any = options["metrics"] or {}
    expected = {
        "loss_fn": (callable(options["loss_fn"]), "a function (output, target) -> loss"),
        "metrics": (
            isinstance(metrics, Mapping) and all(map(callable, cast("Any", metrics).values())),
            "names and functions (output, target) -> value",
        ),
        **{n: (isinstance(options[n], list | tuple), "a list") for n in ("callbacks", "loggers")},
        **{
            name: (type(options[name]) is int and options[name] >= least, f"a whole number, {least} or more")
            for name, least in _LEAST.items()
        },
        "checkpoints": (isinstance(options["checkpoints"], str | Path | None), "a folder's path"),
        "level": (
            options["level"] != "auto",
            "a level that is chosen before training, so that a resumed run is the run that began: find one "
            "with hs.tune(model, optimizer, step, x, y) or `halfstep tune`, then pass plan=found.plan or its "
            "file",
        ),
    }
    for name, (fits, what) in expected.items():
        if not fits:
            raise ConfigError(f"{name}={show(options[name])}; expected {what}")
    if (every := options["checkpoint_every"]) and options["checkpoints"] is None:
        raise ConfigError(f"checkpoint_every={every} without a folder; pass checkpoints='runs/mine'")


def check_parallel(model: nn.Module, wrapped: bool) -> None:
    """Raise ConfigError where several ranks would each train a model of their own."""
    ranks, started, remedy = world_size(), started_by_torchrun(), ""
    inside = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    if ranks == 1 and started > 1 and not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group() first, torch.distributed is not initialised"
    elif ranks > 1 and not (wrapped or inside or is_sharded(model)):
        remedy = "pass wrap=torch.nn.parallel.DistributedDataParallel, or shard the model first"
    if remedy:
        raise ConfigError(f"{max(ranks, started)} ranks would each train a model of their own: {remedy}")


def length_of(loader: Any) -> int | None:
    """Return the number of batches in a pass; None where neither the loader nor its data set knows."""
    try:
        return len(loader)
    except TypeError:
        return None


def last_step(loader: Iterable[Any], steps: int | None, epochs: int | None, accumulate: int) -> int:
    """Return the number of the last step of a `fit`; ConfigError where that is not given exactly once."""
    if (steps is None) == (epochs is None):
        raise ConfigError(f"fit got steps={steps} and epochs={epochs}; give exactly one of them")
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None and type(value) is not int:
            raise ConfigError(f"fit got {name}={show(value)}; expected a whole number")
    if not isinstance(loader, Iterable):
        raise ConfigError(f"fit got a {type(loader).__name__} as a loader; give batches (input, target)")
    batches = length_of(loader)
    if steps is None and batches is None:
        raise ConfigError(f"a {type(loader).__name__} has no length; give steps= instead of epochs=")
    last = int(epochs or 0) * (batches or 0) // accumulate if steps is None else steps
    if last < 1:
        raise ConfigError(f"fit would train {last} steps; give steps= or epochs= of at least 1")
    return last


def check_ranks(last: int) -> None:
    """Raise DataError on all ranks where they would end at different steps."""
    last_steps = gather(last)
    if len(set(last_steps)) > 1:
        ends = ", ".join(f"rank {number} after {end}" for number, end in enumerate(last_steps))
        raise DataError(
            f"ranks would run out of batches at different steps ({ends}), and a step needs all of them: give "
            "every rank as many (a DistributedSampler does), or fit the same steps= on all, which begins "
            "another pass where one ends"
        )


class Unread(NamedTuple):
    """Whether a batch that came on an accelerator is finite, in a 0-d tensor that nobody has read."""

    step: int
    part: str
    finite: Tensor


def check_unread(flags: Sequence[Unread]) -> None:
    """Raise DataError for the first batch that was not finite; where there are flags, wait for them."""
    values = stack_scalars([flag.finite for flag in flags], flags[0].finite.device).tolist() if flags else []
    for flag, finite in zip(flags, values):
        if not finite:
            raise DataError(
                f"the {flag.part} of the batch for step {flag.step} holds inf or NaN: clean the data, and go "
                f"on from a checkpoint of an earlier step (of batches that a loader puts on "
                f"{flag.finite.device} this is read after the step)"
            )


def check_batch(batch: Any, step: int, device: torch.device, unread: list[Unread]) -> tuple[Any, Any]:
    """The batch on the device; DataError for what is no pair, or holds inf or NaN in a tensor of the CPU.

    Tensors of an accelerator are looked at there; `unread` gets the answers.
    """
    if not isinstance(batch, tuple | list) or len(cast("Sequence[Any]", batch)) != 2:
        raise DataError(f"a batch is a {type(batch).__name__}; expected a pair (input, target)")
    pair = cast("Sequence[Any]", batch)
    for part, value in zip(("input", "target"), pair):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if value.device.type != "cpu":
            unread.append(Unread(step, part, value.isfinite().all()))
            continue
        if math.isfinite(value.sum(dtype=torch.float64).item()):
            continue  # as no sum with inf or NaN is; only others get the exact and slower look
        if bad := int((~value.isfinite()).sum()):
            kind = "NaN or inf" if bool(value.isnan().any()) else "inf"
            raise DataError(
                f"the {part} of the batch for step {step} holds {bad} values of {kind}; "
                "clean the data, nothing was updated with it"
            )
    x, y = (move_to(v, device) if isinstance(v, Tensor) else v for v in pair)
    return x, y


# ---- batches: a position that can be saved ------------------------------------------------------------


class Position:
    """Batches without end from a loader, and where in it training stands.

    A loader with `state_dict` and `load_state_dict` is asked; for any other the random state at the start of
    the pass is kept, and resuming replays the pass up to the batch. `on_epoch_end` is called once for a pass:
    by `advance` after its last batch where the loader has a length, else when no further batch comes.
    """

    def __init__(self, loader: Any, on_epoch_end: Callable[[], None]) -> None:
        self.loader, self.on_epoch_end = loader, on_epoch_end
        self.own = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.served, self.ended, self._resumed = 0, False, False
        self.start: dict[str, Any] = {}

    def _begin(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, False
        if not resumed:
            self.served, self.ended = 0, False
        if self.own:
            return iter(self.loader)
        now, generator = rng.random_state(), getattr(self.loader, "generator", None)
        if not resumed:
            self.start = now if generator is None else {**now, "generator": generator.get_state()}
            return iter(self.loader)
        rng.load_random_state(self.start)
        if generator is not None and "generator" in self.start:
            generator.set_state(self.start["generator"].cpu())
        batches = iter(self.loader)
        for _ in islice(batches, self.served):
            pass
        rng.load_random_state(now)
        return batches

    def __iter__(self) -> Iterator[Any]:
        empty = 0
        while True:
            empty += 1
            for batch in self._begin():
                empty = 0
                if self.own and self.ended:  # resumed behind the end of a pass: the loader began the next
                    self.served, self.ended = 0, False
                self.served += 1
                yield batch
            if empty > 1:
                raise DataError(
                    "a pass over the loader gave no batches; fit needs at least one in every pass "
                    "(a generator can be read once only: pass a list or a DataLoader)"
                )
            self.end()

    def advance(self) -> None:
        """End the pass where the batch just trained on was its last."""
        if self.served == length_of(self.loader):
            self.end()

    def end(self) -> None:
        """End the pass, unless it has ended."""
        if not self.ended:
            self.ended = True
            self.on_epoch_end()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state, or the position of the next batch."""
        how = {"loader": self.loader.state_dict()} if self.own else {"start": self.start}
        return {**how, "served": self.served, "ended": self.ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; CheckpointError for the state of another kind of loader."""
        if self.own != ("loader" in state):
            raise CheckpointError("the checkpoint was written with another kind of loader")
        if self.own:
            self.loader.load_state_dict(state["loader"])
        self.start = dict(state.get("start", {}))
        self.served, self.ended, self._resumed = state.get("served", 0), state.get("ended", False), True


# ---- the loop -----------------------------------------------------------------------------------------


def _train(trainer: Trainer, batches: Sequence[Any]) -> tuple[Tensor, Outcome]:
    """One step: forward and backward of each batch, then the update; the loss, detached, and the outcome."""
    losses: list[Tensor] = []
    for number, batch in enumerate(batches, 1):
        x, y = check_batch(batch, trainer.step + 1, trainer.device, trainer.unread)
        skips_sync = number < len(batches) and hasattr(trainer.forward, "no_sync")
        with cast(Any, trainer.forward).no_sync() if skips_sync else nullcontext():
            with trainer.amp.autocast():
                loss = trainer.loss_fn(trainer.forward(x), y) / len(batches)
            trainer.amp.backward(loss, more=number < len(batches))
        losses.append(loss.detach())
    return sum(losses[1:], losses[0]), trainer.amp.step(
        clip_norm=trainer.clip_norm, scheduler=trainer.scheduler
    )


@contextmanager
def _noting_sigterm(enabled: bool) -> Generator[list[int]]:
    """Within, the first SIGTERM is put into the list, where `enabled` and nobody else handles it."""
    arrived: list[int] = []

    def note(number: int, frame: Any) -> None:
        arrived.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process

    main = threading.current_thread() is threading.main_thread()
    mine = enabled and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, note)
    try:
        yield arrived
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Trainer:
    """Trains `model` with `optimizer` on batches (input, target) at a precision level.

    Args:
        model: the network.
        optimizer: over the network's parameters.
        loss_fn: a function (output, target) -> 0-d loss.
        level: as in `hs.prepare`, but not "auto": `plan=hs.tune(...).plan` brings what was measured.
        device: where to train; None leaves the model where it is.
        clip_norm: the norm to which gradients are clipped; None clips nothing.
        scheduler: a learning-rate scheduler, which advances on steps that are taken.
        accumulate: the number of batches that make one step; they are fetched before it begins. What is left
            of a pass goes into the first step of the next one, and is not trained on in the last.
        metrics: functions (output, target) -> 0-d or Python mean by name, for `evaluate`.
        callbacks: objects with the methods of `Callback`.
        loggers: objects with `log(step, values)`.
        checkpoints: the folder of checkpoints; None saves nothing. `fit(..., resume=True)` goes on from the
            newest.
        checkpoint_every: save every so many steps, as `Session.save` does; 0 saves none by itself.
        keep: the number of checkpoints that are kept.
        background_saves: True saves from a copy, in a thread; what fails there is raised by the next save or
            at the end.
        read_every: losses, metrics and outcomes are read from the device every so many steps.
        progress: True draws a progress bar, False none; None draws one when standard error is a terminal.
        trace: True replays a step that is skipped or whose loss is not finite. The op at which it began is
            named in a warning (once for each cause), in the message of LossScaleCollapsed, and kept in
            `traces`. Training goes on as if nothing had been replayed. A range that only the present value of
            a dynamic loss scale exceeds is kept without a warning. A run that goes well pays for noting
            random state and buffers.
        wrap: called with the prepared model, such as DistributedDataParallel. Each rank brings a loader of
            its own share; `history` has its own losses, `evaluate` gives the means of all.
        rank_timeout: a rank that fails, is killed, or does not answer for so many seconds is named by the
            others in a RankError.
        precision: further arguments of `hs.prepare`, such as dtype, policy, plan, loss_scale, kernels or
            on_nonfinite.

    SIGTERM during `fit` with a folder ends the step under way, saves and exits with status 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        level: str = "O1",
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
        **precision: Any,
    ) -> None:
        check_options(dict(locals()))
        if not isinstance(model, nn.Module):
            raise ConfigError(f"Trainer got a {type(model).__name__} as the model; expected one nn.Module")
        check_parallel(model, wrap is not None)
        if device is not None:
            model.to(resolve(device))
        self.amp = prepare(model, optimizer, level=level, **precision)
        self.forward = model if wrap is None else wrap(model)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.clip_norm, self.scheduler, self.accumulate = clip_norm, scheduler, accumulate
        self.metrics, self.loggers = dict(metrics or {}), tuple(loggers)
        drawn = rank() == 0 and (sys.stderr.isatty() if progress is None else progress)
        self.callbacks: tuple[Callback, ...] = (*callbacks, *([ProgressBar()] if drawn else []))
        self.folder = None if checkpoints is None else checkpoint.CheckpointFolder(checkpoints, keep)
        self.background_saves = background_saves
        self.checkpoint_every, self.read_every = checkpoint_every, read_every
        self.step, self.epoch, self.history = 0, 0, History()
        self.schedulers = [] if scheduler is None else [scheduler]
        self._replayable = Replayable(self.amp, others=self.schedulers) if trace else None
        # One function throughout, which a Replayable asks for; it keeps no Trainer alive.
        self._step = partial(_train, weakref.proxy(self))
        self._pending: list[tuple[int, Tensor, Any]] = []
        self.unread: list[Unread] = []
        self._position: Position | None = None
        self.rank_timeout = rank_timeout
        self._sigterm: Sequence[int] = ()
        self._stop = ""

    def stop(self, reason: str = "stopped by a callback") -> None:
        """End `fit` after the present step (of any rank); `history.stopped` says why. For callbacks.

        The end of a pass over a loader without a length is seen in the step after it, which is still trained.
        """
        self._stop = reason

    @property
    def device(self) -> torch.device:
        """Where the model computes: the accelerator that any parameter is on, else the CPU."""
        return self.amp.device

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
        """Train until step number `steps`, or until `epochs` passes of a loader with a length, in all.

        Both count from the first `fit`: one that has got there already trains nothing.

        Raises DataError for a batch with inf or NaN (before it touches the weights; of a batch that comes on
        an accelerator when its loss is read or a checkpoint is written), an empty loader, or (on
        every rank, before the first step) ranks with batches for different numbers of steps; and
        CheckpointError when `resume` finds a corrupt checkpoint or one of another model.
        """
        refuse_capture(self.device, "Trainer.fit()")
        last = last_step(loader, steps, epochs, self.accumulate)
        check_ranks(last)
        self._position = Position(loader, partial(Trainer._end_epoch, weakref.proxy(self)))
        self.history, self._stop = History(), ""
        if resume and self.folder is None:
            raise ConfigError("resume=True without a checkpoint folder; pass checkpoints='runs/mine'")
        if self.folder is not None:
            self.folder.read_latest(self._load) if resume else self.folder.claim()
        guard = watchdog(lambda: self.step + 1, self.rank_timeout)
        with _noting_sigterm(self.folder is not None) as self._sigterm, guard:
            self._fit(last, epochs or 0, self._position)
        if self._sigterm or self.history.stopped == "SIGTERM":
            sys.exit(0)
        return self.history

    def _fit(self, last: int, epochs: int, position: Position) -> None:
        started = time.perf_counter()
        self._call("on_fit_start", last)
        try:
            self.model.train()
            batches = iter(position)
            while self.step < last and not self._is_stop_asked():
                self._train_step(batches, position)
                if len(self._pending) >= self.read_every:
                    self._read()
                if self.checkpoint_every and self.step % self.checkpoint_every == 0:
                    self.save()
            if self._replayable is not None:
                self._replayable.finish()
            if self.epoch < epochs and not self.history.stopped:
                position.end()  # fewer batches are left than make a step
            self._read()
            self.amp.wait_until_saved()
        except HalfstepError:
            for _, _, outcome in self._pending:
                with suppress(HalfstepError):
                    outcome.read()  # raises once at most, what steps after the first bad one did too
            with suppress(HalfstepError):
                self._read()
            raise
        finally:
            self.history.seconds = time.perf_counter() - started
            self._call("on_fit_end")

    def _is_stop_asked(self) -> bool:
        """Whether some rank was asked to stop; saves first where SIGTERM asked it."""
        if self.device.type != "cpu" and self.step % self.read_every and world_size() > 1:
            return False  # asking makes an accelerator wait
        killed, stopped = all_ranks(
            torch.tensor([bool(self._sigterm), bool(self._stop)], device="cpu")
        ).tolist()
        if killed and self.folder is not None:
            self.amp.wait_until_saved()
            if not self.folder.has(self.step):
                self.save()
        if killed or stopped:
            self.history.stopped = "SIGTERM" if killed else self._stop or "another rank stopped"
        return killed or stopped

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Mean loss and metrics over `loader`, weighted by batch size; summed on the device, read once.

        Over ranks the mean over the samples of all, the same on each: every rank calls it, at the same step,
        with a loader of its own share (of any length, empty too).
        """
        refuse_reading(self.device, "Trainer.evaluate()")
        with watchdog(lambda: self.step, self.rank_timeout):
            parts = [(sums, count) for sums, count in gather(self._sums(loader)) if count]
        if not parts:
            raise DataError("the loader gave no batches; evaluate needs at least one")
        whole = sum(count for _, count in parts)
        means = {name: sum(sums[name] for sums, _ in parts) / whole for name in parts[0][0]}
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
                unread = list[Unread]()
                for x, y in (check_batch(batch, self.step + 1, self.device, unread) for batch in loader):
                    with self.amp.autocast():
                        output = self.model(x)
                        values = {"loss": self.loss_fn(output, y)}
                    values |= {name: metric(output, y) for name, metric in self.metrics.items()}
                    for name, value in values.items():
                        value = torch.as_tensor(value, device=self.device)
                        if value.numel() != 1:
                            raise ConfigError(
                                f"{name} has shape {tuple(value.shape)}, expected one number a batch (mean())"
                            )
                        sums[name] = sums.get(name, 0.0) + value.double() * len(x)
                    count += len(x)
                check_unread(unread)
        finally:
            for module, training in modes:
                module.training = training
        return (dict(zip(sums, torch.stack(list(sums.values())).tolist())) if sums else {}), count

    def save(self) -> Path:
        """Write a checkpoint of this moment into the folder, as `Session.save` does; returns its path."""
        if self.folder is None:
            raise ConfigError("this Trainer has no checkpoint folder; pass checkpoints='runs/mine'")
        self._check_batches()
        path = self.folder.path_for(self.step)
        place = None if self._position is None else self._position.state_dict()
        counts = {"step": self.step, "epoch": self.epoch}
        options: Any = {"extra": counts, "keep_last": self.folder.keep, "background": self.background_saves}
        return self.amp.save(path, schedulers=self.schedulers, position=place, **options)

    def go_on(self, counts: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        """Count from there, and take the next batch from that position, where it is known."""
        self.step, self.epoch = int(counts["step"]), int(counts["epoch"])
        if self._position is not None and position is not None:
            self._position.load_state_dict(position)

    def _load(self, path: Path) -> None:
        loaded = self.amp.load(path, schedulers=self.schedulers)
        self.go_on(loaded.extra, loaded.position)

    def _train_step(self, batches: Iterator[Any], position: Position) -> None:
        micro = list(islice(batches, self.accumulate))
        if self._replayable is None:
            total, outcome = self._step(micro)
        else:
            self._replayable.steps = self.step
            total, outcome = self._replayable.run(self._step, micro)
        self.step += 1
        self._pending.append((self.step, total, outcome))
        self._call("on_step_end")
        position.advance()

    def _check_batches(self) -> None:
        flags, self.unread = self.unread, []
        check_unread(flags)

    def _read(self) -> None:
        self._check_batches()
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
        bad = [log.step for log in logs if log.taken and not math.isfinite(log.loss)]
        if bad and self.history.diverged_at is None:
            self.history.diverged_at = bad[0]
        self._log({"loss": logs[-1].loss, "scale": logs[-1].scale, "skipped": len(self.history.skipped)})
        self._call("on_read", logs)

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._call("on_epoch_end")

    def _log(self, values: Mapping[str, float], prefix: str = "") -> None:
        for logger in self.loggers:
            logger.log(self.step, {prefix + name: value for name, value in values.items()})

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)
