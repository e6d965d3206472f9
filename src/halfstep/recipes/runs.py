"""Running a recipe at several precision settings and seeds, and measuring each setting's step.

Each setting has a `SettingRuns`; their `summary` is what the command line prints and the report draws.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.distributed import rank, world_size
from halfstep.errors import HalfstepError, HalfstepWarning
from halfstep.policy.levels import LEVELS
from halfstep.policy.plan import Plan
from halfstep.recipes import measure
from halfstep.recipes.registry import Recipe, Task
from halfstep.report.comparison import Bound, OpCost, RecipeRows, SeedRun, SettingRow
from halfstep.session.prepare import prepare, tune
from halfstep.session.session import Session
from halfstep.trainer.loop import Trainer
from halfstep.trainer.records import Callback, accuracy
from halfstep.tuning.op_times import StepTimes, costliest, step_times
from halfstep.tuning.search import SECONDS, Tuning


class OutOfTime(HalfstepError):
    """A training has used its share of the time; the message says how far it came."""


class TimeBudget:
    """`seconds` in all for a number of trainings, None for no limit.

    A training may take up to three times an equal share of what is left, so that long recipes fit beside
    short ones; what it does not use stays for the others. All take at most `seconds` and a step each.
    """

    PATIENCE = 3.0

    def __init__(
        self, seconds: float | None, trainings: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.trainings, self.clock = seconds, trainings, clock
        self.ends = None if seconds is None else clock() + seconds

    def start(self) -> TrainingTime:
        """The next training's share, running from now."""
        now = self.clock()
        left = max(1, self.trainings)
        self.trainings -= 1
        if self.ends is None:
            return TrainingTime(now, None, self.clock)
        remaining = max(0.0, self.ends - now)
        return TrainingTime(now, min(remaining, self.PATIENCE * remaining / left), self.clock)


class TrainingTime:
    """One training's part of a `TimeBudget`: `limit` seconds from `started`, None for no limit."""

    def __init__(self, started: float, limit: float | None, clock: Callable[[], float]) -> None:
        self.started, self.limit, self.clock = started, limit, clock

    def check(self, done: int, steps: int) -> None:
        """Raise OutOfTime if the share is used up after `done` of `steps` steps; not at the last one."""
        if self.limit is None or done >= steps:
            return
        used = self.clock() - self.started
        if used > self.limit:
            raise OutOfTime(
                f"stopped after {done} of {steps} steps, {used:.0f} s: at {used / max(1, done):.2g} s a step "
                "it would use more than its share of the time limit; raise --time-limit or give fewer --steps"
            )


NO_LIMIT = TrainingTime(0.0, None, time.monotonic)
"""The share of a training that nothing stops."""


class ShareOfBatches:
    """Of every batch this rank's share: every so many-th example. All of it on one rank."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.state_dict, self.load_state_dict = batches.state_dict, batches.load_state_dict

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        ranks, own = world_size(), rank()
        for x, y in self._batches:
            yield x[own::ranks], y[own::ranks]


OnStep = Callable[[str], None]
"""Told, after every step of every run, the name of the run."""


@dataclass(frozen=True)
class TrainSetting:
    """A precision to train at. `dtype` is None for fp32; `loss_scale` None means the level's own choice.

    `plan`, where it has settings, is what level "auto" came to: level and dtype are then the plan's.
    """

    level: str
    dtype: str | None
    loss_scale: str | None = None
    plan: Plan | None = None

    @classmethod
    def of(cls, tuning: Tuning) -> TrainSetting:
        """What level "auto" came to on this machine."""
        choice = tuning.choice
        return cls(choice.level, choice.dtype, plan=tuning.plan)

    @property
    def own_scale(self) -> str:
        """The loss scale the level chooses for the dtype: "dynamic" or "none"."""
        return "dynamic" if LEVELS[self.level].needs_scale(self.dtype) else "none"

    @property
    def label(self) -> str:
        """`O1 bf16`, or `O0` for fp32; with the loss scale where it is not the level's own."""
        words = [self.level, self.dtype or ""]
        if self.plan is not None:
            words = ["auto:" if self.plan.settings else "plan:", *words]
        if self.loss_scale not in (None, self.own_scale):
            words.append("no scale" if self.loss_scale == "none" else f"scale {self.loss_scale}")
        return " ".join(word for word in words if word)

    def prepare_options(self) -> dict[str, Any]:
        """Keyword arguments for `hs.prepare`."""
        if self.plan is not None and self.plan.settings:
            return {"plan": self.plan}
        own = {"level": self.level, "dtype": self.dtype, "loss_scale": self.loss_scale}
        return own if self.plan is None else {**own, "plan": self.plan}


@dataclass
class SettingRuns:
    """One setting's runs and measurements; None where a failure prevented the measurement."""

    setting: TrainSetting
    runs: list[SeedRun]
    seconds: float | None = None
    noise: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    bound: Bound | None = None
    times: StepTimes | None = None

    @property
    def stopped(self) -> str | None:
        """Why the time budget stopped a run; None where none was."""
        return next((run.stopped for run in self.runs if run.stopped), None)

    def finals(self, metric: str) -> list[float]:
        """The test metric of every run that ended."""
        return [run.test[metric] for run in self.runs if metric in run.test]


def summary(recipe: Recipe, data: str, steps: int, seeds: int, rows: Sequence[SettingRuns]) -> RecipeRows:
    """The recipe's words, and each setting's summary and raw runs."""
    fp32 = next((row for row in rows if row.setting.dtype is None), None)
    return RecipeRows(
        name=recipe.name,
        about=recipe.about,
        data=data,
        metric=recipe.metric,
        steps=steps,
        batch_size=recipe.batch_size,
        seeds=seeds,
        rows=[_summary(row, recipe, fp32) for row in rows],
    )


def _spread(finals: Sequence[float]) -> float | None:
    """The standard deviation over seeds; None for one seed, NaN where a run diverged."""
    if len(finals) < 2:
        return None
    return statistics.stdev(finals) if all(map(math.isfinite, finals)) else math.nan


def _summary(row: SettingRuns, recipe: Recipe, fp32: SettingRuns | None) -> SettingRow:
    finals, base = row.finals(recipe.metric), [] if fp32 is None else fp32.finals(recipe.metric)
    mean = statistics.fmean(finals) if finals else None
    settings = None if row.setting.plan is None else row.setting.plan.settings
    costs = [] if row.times is None else costliest(row.times, None if fp32 is None else fp32.times)
    return SettingRow(
        label=row.setting.label,
        level=row.setting.level,
        dtype=row.setting.dtype or "fp32",
        mean=mean,
        spread=_spread(finals),
        difference=mean - statistics.fmean(base) if mean is not None and base else None,
        why="" if settings is None else settings.reason,
        seconds=row.seconds,
        noise=row.noise,
        samples_per_second=recipe.batch_size / row.seconds if row.seconds else None,
        peak_bytes=row.peak_bytes,
        saved_bytes=row.saved_bytes,
        skipped=sum(len(run.skipped) for run in row.runs),
        last_scale=next((run.scales[-1] for run in reversed(row.runs) if run.scales), None),
        failed=next((run.failed for run in row.runs if run.failed), None),
        stopped=row.stopped,
        diverged=sum(run.diverged_at is not None for run in row.runs),
        bound=row.bound,
        ops=[OpCost(**vars(op), fp32=seconds) for op, seconds in costs],
        profiled=row.times.seconds if row.times else None,
        runs=row.runs,
    )


class _Tell(Callback):
    """Tells of each step, and ends the training when its share of the time is used up."""

    def __init__(self, on_step: OnStep, name: str, share: TrainingTime, steps: int) -> None:
        self.on_step, self.name, self.share, self.steps = on_step, name, share, steps
        self.done = 0

    def on_step_end(self, trainer: Trainer) -> None:
        self.done += 1
        self.on_step(self.name)
        self.share.check(self.done, self.steps)


@contextmanager
def _our_warnings(messages: list[str]) -> Generator[None]:
    """Collect the texts of our warnings; pass all others on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HalfstepWarning)
        yield
    for one in caught:
        if issubclass(one.category, HalfstepWarning):
            messages.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def train_once(
    recipe: Recipe,
    task: Task,
    setting: TrainSetting,
    seed: int,
    steps: int,
    device: torch.device,
    on_step: OnStep,
    share: TrainingTime = NO_LIMIT,
) -> SeedRun:
    """Train the recipe from `seed` and evaluate it; our errors and warnings become part of the result."""
    model, optimizer = recipe.build(seed, setting.level)
    run = SeedRun(seed)
    trainer = Trainer(
        model,
        optimizer,
        recipe.loss,
        device=device,
        metrics={"accuracy": accuracy} if recipe.metric == "accuracy" else {},
        callbacks=[_Tell(on_step, f"{recipe.name} {setting.label}", share, steps)],
        progress=False,
        wrap=nn.parallel.DistributedDataParallel if world_size() > 1 else None,
        **setting.prepare_options(),
    )
    with _our_warnings(run.warnings):
        try:
            trainer.fit(ShareOfBatches(task.train(seed)), steps=steps)
            run.test = trainer.evaluate(task.test)
        except OutOfTime as error:
            run.stopped = str(error)
        except HalfstepError as error:
            run.failed = str(error)
    history = trainer.history
    run.losses, run.skipped, run.diverged_at = history.losses, history.skipped, history.diverged_at
    run.scales = [log.scale for log in history.steps]
    return run


class TimedSetting:
    """A prepared model and one fixed batch: the parts of a step that the measurements need."""

    def __init__(self, recipe: Recipe, task: Task, setting: TrainSetting, device: torch.device) -> None:
        self.model, self.optimizer = recipe.build(0, setting.level)
        self.model.to(device)
        self.amp = prepare(self.model, self.optimizer, **setting.prepare_options())
        self.loss = recipe.loss
        self.x, self.y = (part.to(device) for part in next(iter(task.train(0))))

    def forward(self) -> Tensor:
        """The loss on the batch."""
        with self.amp.autocast():
            return self.loss(self.model(self.x), self.y)

    def step(self) -> None:
        """One whole training step."""
        self.amp.backward(self.forward())
        self.amp.step()

    def resident(self) -> list[Tensor]:
        """Every tensor that lives between steps."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        groups = [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        tensors = [*self.model.parameters(), *self.model.buffers(), *groups, *state, self.x, self.y]
        return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def measure_rows(
    recipe: Recipe, task: Task, rows: Sequence[SettingRuns], device: torch.device, rounds: int
) -> None:
    """Fill in time, memory and bound of every row that was not stopped, the times taken in turns."""
    rows = [row for row in rows if not row.stopped]
    benches = [TimedSetting(recipe, task, row.setting, device) for row in rows]
    with _our_warnings([]):  # the trainings have told them already
        seconds = measure.rounds_in_turn([bench.step for bench in benches], device, rounds)
        for row, bench, taken in zip(rows, benches, seconds):
            row.seconds, row.noise = statistics.median(taken), measure.noise(taken)
            row.saved_bytes = measure.saved_bytes(bench.forward, bench.model.parameters())
            row.peak_bytes = measure.peak_bytes(bench.step, bench.resident(), device)
            row.bound = measure.bound_of(measure.work_of(bench.step), device)
            row.times = step_times(bench.step, [bench.model], steps=2)


def run_recipe(
    recipe: Recipe,
    settings: Sequence[TrainSetting],
    *,
    seeds: int,
    steps: int,
    device: torch.device,
    folder: str | None,
    rounds: int,
    on_step: OnStep,
    budget: TimeBudget | None = None,
) -> RecipeRows:
    """Train the recipe at every setting from seeds 0 to `seeds` - 1, then measure each setting's step.

    Every training takes its share of `budget`; a setting whose training was stopped is not tried with further
    seeds, and is not measured. Ctrl-C ends the work: the result has the trainings that ended before.
    """
    task = recipe.task(folder)
    rows = [SettingRuns(setting, []) for setting in settings]
    try:
        for row in rows:
            for seed in range(seeds):
                share = budget.start() if budget else NO_LIMIT
                if not row.stopped:
                    row.runs.append(
                        train_once(recipe, task, row.setting, seed, steps, device, on_step, share)
                    )
        measure_rows(recipe, task, rows, device, rounds)
    except KeyboardInterrupt:
        ended = [row for row in rows if row.runs]
        return replace(summary(recipe, task.name, steps, seeds, ended), interrupted=True)
    return summary(recipe, task.name, steps, seeds, rows)


def tune_recipe(
    recipe: Recipe,
    device: torch.device,
    *,
    dtype: str | None = None,
    folder: str | None = None,
    seconds: float = SECONDS,
) -> Tuning:
    """What `tune` finds for the recipe's model, optimizer and first batch."""
    model, optimizer = recipe.build(0)
    model.to(device)
    x, y = (part.to(device) for part in next(iter(recipe.task(folder).train(0))))

    def step(amp: Session, x: Tensor, y: Tensor) -> Tensor:
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return tune(model, optimizer, step, x, y, dtype=dtype, seconds=seconds)
