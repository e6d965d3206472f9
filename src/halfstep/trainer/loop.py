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
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import checkpoint, rng
from halfstep.devices import resolve
from halfstep.distributed import (
    gather,
    global_max,
    is_sharded,
    rank,
    started_by_torchrun,
    watchdog,
    world_size,
)
from halfstep.errors import CheckpointError, ConfigError, DataError, HalfstepError, HalfstepWarning, show
from halfstep.gradients.outcome import Outcome
from halfstep.numerics.replayable import Replayable
from halfstep.numerics.trace import Trace
from halfstep.session.prepare import prepare
from halfstep.trainer.records import Callback, EarlyStopping, History, Logger, Metric, ProgressBar, StepLog

# ---- what a Trainer refuses before it touches a weight, on every rank alike ---------------------------


def _count(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda v: type(v) is int and v >= least, f"a whole number, {least} or more"


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "loss_fn": (callable, "a function (output, target) -> loss"),
    "metrics": (
        lambda v: v is None or (isinstance(v, Mapping) and all(map(callable, cast("Any", v).values()))),
        "names and functions (output, target) -> value",
    ),
    **dict.fromkeys(("callbacks", "loggers"), (lambda v: isinstance(v, list | tuple), "a list")),
    **dict.fromkeys(("accumulate", "read_every", "keep"), _count(1)),
    "checkpoint_every": _count(0),
    "checkpoints": (lambda v: v is None or isinstance(v, str | Path), "a folder's path"),
    "level": (
        lambda v: v != "auto",
        "a level that is chosen before training, so that a resumed run is the run that began: find one with "
        "hs.tune(model, optimizer, step, x, y) or `halfstep tune`, then pass plan=found.plan or its file",
    ),
}


def check_options(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of a Trainer that cannot be."""
    for name, (fits, expected) in _EXPECTED.items():
        if not fits(given[name]):
            raise ConfigError(f"{name}={show(given[name])}; expected {expected}")
    if (every := given["checkpoint_every"]) and given["checkpoints"] is None:
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


def last_step(loader: Iterable[Any], steps: int | None, epochs: int | None, accumulate: int) -> int:
    """The number of the last step of a `fit`; ConfigError where that is not said once and clearly."""
    if (steps is None) == (epochs is None):
        raise ConfigError(f"fit got steps={steps} and epochs={epochs}; give exactly one of them")
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None and type(value) is not int:
            raise ConfigError(f"fit got {name}={show(value)}; expected a whole number")
    if not isinstance(loader, Iterable):
        raise ConfigError(f"fit got a {type(loader).__name__} as a loader; give batches (input, target)")
    if steps is None and not hasattr(loader, "__len__"):
        raise ConfigError(f"a {type(loader).__name__} has no length; give steps= instead of epochs=")
    last = int(epochs or 0) * len(cast(Any, loader)) // accumulate if steps is None else steps
    if last < 1:
        raise ConfigError(f"fit would train {last} steps; give steps= or epochs= of at least 1")
    return last


def check_ranks(loader: Iterable[Any], last: int, alike: bool) -> None:
    """Raise on all ranks: DataError where they end apart, ConfigError where passes must be `alike`."""
    found = gather((last, len(cast(Any, loader)) if hasattr(loader, "__len__") else "unknown"))
    if len({end for end, _ in found}) > 1:
        ends = ", ".join(f"rank {number} after {end}" for number, (end, _) in enumerate(found))
        raise DataError(
            f"ranks would run out of batches at different steps ({ends}), and a step needs all of them: give "
            "every rank as many (a DistributedSampler does), or fit the same steps= on all, which begins "
            "another pass where one ends"
        )
    lengths = [str(length) for _, length in found]
    if alike and len(found) > 1 and ("unknown" in lengths or len(set(lengths)) > 1):
        raise ConfigError(
            f"EarlyStopping at the end of each pass, whose lengths on the ranks are {', '.join(lengths)}: "
            "all evaluate together, so give it every=, the steps from one evaluation to the next"
        )


def check_batch(batch: Any, step: int) -> None:
    """Raise DataError for what is no pair, or holds inf or NaN in a tensor of the CPU."""
    if not isinstance(batch, tuple | list) or len(cast("Sequence[Any]", batch)) != 2:
        raise DataError(f"a batch is a {type(batch).__name__}; expected a pair (input, target)")
    for part, value in zip(("input", "target"), cast("Sequence[Any]", batch)):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.device.type != "cpu":
            continue
        # A sum is not finite as soon as one element is not; only then is the exact and slower look needed.
        if not math.isfinite(value.sum(dtype=torch.float64).item()) and (
            bad := int((~value.isfinite()).sum())
        ):
            kind = "NaN or inf" if bool(value.isnan().any()) else "inf"
            raise DataError(
                f"the {part} of the batch for step {step} holds {bad} values of {kind}; "
                "clean the data, nothing was updated with it"
            )


# ---- batches: a position that can be saved, and steps that can be run again ---------------------------


#: What a Position gives between two passes.
END = object()


class Position:
    """Batches without end from a loader, and where in it training stands.

    A loader with `state_dict` and `load_state_dict` is asked; for any other the random state at the start of
    the pass is kept, and resuming replays the pass up to the batch. `on_epoch_end` is called once for a pass:
    by `trained` after its last batch where the loader has a length, else when no further batch comes.
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
            yield END

    def trained(self) -> None:
        """End the pass where the batch just trained on was its last."""
        if hasattr(self.loader, "__len__") and self.served == len(self.loader):
            self.end()

    def end(self) -> None:
        """End the pass, unless it has ended."""
        if not self.ended:
            self.ended = True
            self.on_epoch_end()

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, or how to get to the next batch again."""
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


class MicroBatches:
    """The batches of one step, fetched as the step asks for them; a replay gets the same ones again.

    Random generators are as they were after each fetch then: a loader may have drawn from them.
    """

    def __init__(self, fetch: Callable[[], Any], count: int) -> None:
        self._fetch, self._count = fetch, count
        self._fetched: list[tuple[Any, Callable[[], None]]] = []

    def __iter__(self) -> Iterator[Any]:
        for place in range(self._count):
            if place == len(self._fetched):
                self._fetched.append((self._fetch(), rng.rewinder()))
            else:
                self._fetched[place][1]()
            yield self._fetched[place][0]


# ---- the loop -----------------------------------------------------------------------------------------


def _train(own: Trainer, batches: Iterable[Any]) -> tuple[Tensor, Outcome]:
    """One step: forward and backward of each batch, then the update; the loss, detached, and the outcome."""
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


@contextmanager
def _noting_sigterm(wanted: bool) -> Generator[list[int]]:
    """Within, the first SIGTERM is put into the list, where `wanted` and nobody else handles it."""
    arrived: list[int] = []

    def note(number: int, frame: Any) -> None:
        arrived.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process

    main = threading.current_thread() is threading.main_thread()
    mine = wanted and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, note)
    try:
        yield arrived
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_PARTS = {"threads", "model", "optimizer", "amp", "step", "epoch", "scheduler", "random", "position"}


def _ranks_max(number: int) -> int:
    return number if world_size() == 1 else int(global_max(torch.tensor(float(number))))


class Trainer:
    """Trains `model` with `optimizer` on batches (input, target) at a precision level.

    Args:
        model: the network.
        optimizer: over the network's parameters.
        loss_fn: a function (output, target) -> 0-d loss.
        level: as in `hs.prepare`, but not "auto": `plan=hs.tune(...).plan` brings what was measured.
        dtype: as in `hs.prepare`.
        policy: as in `hs.prepare`.
        plan: as in `hs.prepare`.
        loss_scale: as in `hs.prepare`.
        kernels: as in `hs.prepare`.
        device: where to train; None takes the accelerator, else the CPU.
        clip_norm: the norm to which gradients are clipped; None clips nothing.
        scheduler: a learning-rate scheduler, which advances on steps that are taken.
        accumulate: the number of batches that make one step.
        metrics: functions (output, target) -> 0-d mean by name, for `evaluate`.
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
        on_nonfinite: as in `hs.prepare`.

    SIGTERM during `fit` with a folder ends the step under way, saves and exits with status 0.
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
        check_options(dict(locals()))
        check_parallel(model, wrap is not None)
        if device is not None:
            model.to(resolve(device))
        self.names = checkpoint.parameter_names(model, optimizer)
        options: dict[str, Any] = {"dtype": dtype, "policy": policy, "plan": plan, "kernels": kernels}
        options |= {"loss_scale": loss_scale, "on_nonfinite": on_nonfinite}
        self.amp = prepare(model, optimizer, level=level, **options)
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
        self._schedulers = [] if scheduler is None else [scheduler]
        self._replayable = Replayable(self.amp, others=self._schedulers) if trace else None
        self._step = partial(_train, self)
        self._pending: list[tuple[int, Tensor, Any]] = []
        self._position: Position | None = None
        self.rank_timeout = rank_timeout
        self._sigterm: Sequence[int] = ()
        self._stop, self._asks = "", False

    def stop(self, reason: str = "stopped by a callback") -> None:
        """End `fit` after the present step (of any rank); `history.stopped` says why. For callbacks.

        Called at the end of a pass, no further step is trained.
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
        last = last_step(loader, steps, epochs, self.accumulate)
        by_pass = any(isinstance(one, EarlyStopping) and one.every is None for one in self.callbacks)
        check_ranks(loader, last, alike=by_pass)
        self._position = Position(loader, self._end_epoch)
        self.history, self._stop = History(), ""
        unsized = _ranks_max(not hasattr(loader, "__len__"))
        self._asks = bool(unsized) and self.device.type == "cpu"  # asking makes an accelerator wait
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
            while self.step < last and not self._stopped():
                if not self._train_step(batches, position):
                    continue
                if len(self._pending) >= self.read_every:
                    self._read()
                if self.checkpoint_every and self.step % self.checkpoint_every == 0:
                    self.save()
            if self._replayable is not None:
                self._replayable.settle()
            if self.epoch < epochs and not self.history.stopped:
                position.end()  # fewer batches are left than make a step
            self._read()
            self.wait_until_saved()
        except HalfstepError:
            with suppress(HalfstepError):
                self._read()
            raise
        finally:
            self.history.seconds = time.perf_counter() - started
            self._call("on_fit_end")

    def wait_until_saved(self) -> None:
        """Return when no save in the background is under way; CheckpointError where the last one failed."""
        self.amp.wait_until_saved()

    def _stopped(self) -> bool:
        """Whether some rank was asked to stop; saves first where SIGTERM asked it."""
        if self.device.type != "cpu" and self.step % self.read_every and world_size() > 1:
            return False  # asking makes an accelerator wait
        asked = _ranks_max(2 if self._sigterm else 1 if self._stop else 0)
        if asked == 2 and self.folder is not None:
            self.wait_until_saved()
            if not self.folder.has(self.step):
                self.save()
        if asked:
            self.history.stopped = "SIGTERM" if asked == 2 else self._stop or "another rank stopped"
        return bool(asked)

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Mean loss and metrics over `loader`, weighted by batch size; summed on the device, read once.

        Over ranks the mean over the samples of all, the same on each: every rank calls it, at the same step,
        with a loader of its own share (of any length, empty too).
        """
        with watchdog(lambda: self.step, self.rank_timeout):
            parts = [(own, count) for own, count in gather(self._sums(loader)) if count]
        if not parts:
            raise DataError("the loader gave no batches; evaluate needs at least one")
        whole = sum(count for _, count in parts)
        means = {name: sum(own[name] for own, _ in parts) / whole for name in parts[0][0]}
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
                        if value.numel() != 1:
                            raise ConfigError(
                                f"{name} has shape {tuple(value.shape)}, expected one number a batch (mean())"
                            )
                        sums[name] = sums.get(name, 0.0) + value.double() * len(x)
                    count += len(x)
        finally:
            for module, training in modes:
                module.training = training
        return (dict(zip(sums, torch.stack(list(sums.values())).tolist())) if sums else {}), count

    def save(self) -> Path:
        """Write a checkpoint of this moment into the folder, as `Session.save` does; returns its path."""
        if self.folder is None:
            raise ConfigError("this Trainer has no checkpoint folder; pass checkpoints='runs/mine'")
        self.folder.claim()
        path = self.folder.path_of(self.step)
        place = None if self._position is None else self._position.state_dict()
        counts = {"step": self.step, "epoch": self.epoch}
        options: Any = {"extra": counts, "keep_last": self.folder.keep, "background": self.background_saves}
        return self.folder.wrote(self.amp.save(path, schedulers=self._schedulers, position=place, **options))

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: model, optimizer, precision, scheduler, generators, position."""
        return {
            "format": checkpoint.FORMAT,
            "threads": torch.get_num_threads(),
            "model": checkpoint.model_state(self.model),
            "optimizer": checkpoint.optimizer_state(self.optimizer, self.names),
            "amp": self.amp.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "random": rng.random_state(),
            "position": None if self._position is None else self._position.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; CheckpointError when it is of another model or layout."""
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CheckpointError(f"got {show(state)}: expected what a Trainer's state_dict() gave")
        if state.get("format") != checkpoint.FORMAT:
            layout = state.get("format")
            raise CheckpointError(f"checkpoint layout {layout!r}; this version reads {checkpoint.FORMAT}")
        if missing := sorted(_PARTS - state.keys()):
            raise CheckpointError(f"not a Trainer's checkpoint: {', '.join(missing)} missing")
        if (self.scheduler is None) != (state["scheduler"] is None):
            names = ("checkpoint", "Trainer") if self.scheduler is None else ("Trainer", "checkpoint")
            raise CheckpointError(
                "the {} has a scheduler, the {} has none: resume with the same".format(*names)
            )
        checkpoint.warn_if_threads_differ(state["threads"])
        checkpoint.check_model_state(self.model, state["model"])
        checkpoint.check_optimizer_state(self.optimizer, self.names, state["optimizer"])
        self.amp.load_state_dict(state["amp"])
        checkpoint.load_model_state(self.model, state["model"])
        checkpoint.load_optimizer_state(self.optimizer, self.names, state["optimizer"])
        for scheduler in self._schedulers:
            scheduler.load_state_dict(state["scheduler"])
        self._go_on(state, state["position"])
        if state["random"] is not None:
            rng.load_random_state(state["random"])

    def _go_on(self, counts: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        self.step, self.epoch = int(counts["step"]), int(counts["epoch"])
        if self._position is not None and position is not None:
            self._position.load_state_dict(position)

    def _load(self, path: Path) -> None:
        if not path.suffix:
            found = self.amp.load(path, schedulers=self._schedulers)
            self._go_on(found.extra, found.position)
            return
        state = checkpoint.load(path)  # as earlier versions wrote it
        ranks = state.get("ranks") or [state]
        if len(ranks) != world_size():
            warnings.warn(
                f"the checkpoint was written by {len(ranks)} ranks and is read by {world_size()}: random "
                "generators, and the pass over the data that was under way, begin anew",
                HalfstepWarning,
                stacklevel=3,
            )
        own = ranks[rank()] if len(ranks) == world_size() else {"random": None, "position": None}
        self.load_state_dict({**state, "random": own["random"], "position": own["position"]})

    def _train_step(self, batches: Iterator[Any], position: Position) -> bool:
        """Train one step; False without one where a rank was asked to stop when its pass ended."""
        first = next(batches)
        if _ranks_max(bool(self._stop)) if self._asks else self._stop and world_size() == 1:
            if first is not END:  # this rank's pass goes on: a resumed run is given the batch again
                position.served -= 1
            return False
        waiting = [] if first is END else [first]

        def fetch() -> tuple[Any, Any]:
            batch = waiting.pop() if waiting else next(batches)
            return self._move(next(batches) if batch is END else batch)

        if self._replayable is None:
            total, outcome = self._step(fetch() for _ in range(self.accumulate))
        else:
            self._replayable.steps = self.step
            total, outcome = self._replayable.run(self._step, MicroBatches(fetch, self.accumulate))
        self.step += 1
        self._pending.append((self.step, total, outcome))
        self._call("on_step_end")
        position.trained()
        return True

    def _move(self, batch: Any) -> tuple[Any, Any]:
        check_batch(batch, self.step + 1)
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
        bad = [log.step for log in logs if log.taken and not math.isfinite(log.loss)]
        if bad and self.history.diverged_at is None:
            self.history.diverged_at = bad[0]
            warnings.warn(
                f"the loss is not finite from step {bad[0]} on, yet steps were taken: the run has diverged "
                "(a dynamic loss scale skips such steps; a lower learning rate or bf16 may avoid them)",
                HalfstepWarning,
                stacklevel=3,
            )
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
