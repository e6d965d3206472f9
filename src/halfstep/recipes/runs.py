"""Running a recipe at several precision settings and seeds, and measuring each setting's step.

Their `summary` is what the command line prints and the report draws.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
from halfstep.report.comparison import RecipeRows, SeedRun, SettingRow
from halfstep.session.prepare import prepare, tune
from halfstep.session.session import Session
from halfstep.trainer.loop import Trainer
from halfstep.trainer.records import Callback, accuracy
from halfstep.tuning.op_times import step_times
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
        self.trainings, self.clock = trainings, clock
        self.ends = math.inf if seconds is None else clock() + seconds
        self.started, self.limit = 0.0, math.inf

    def start(self) -> None:
        """The next training begins, and its share runs from now."""
        self.started = self.clock()
        seconds_left = max(0.0, self.ends - self.started)
        self.limit = min(seconds_left, self.PATIENCE * seconds_left / max(1, self.trainings))
        self.trainings -= 1

    def check(self, done: int, steps: int) -> None:
        """Raise OutOfTime if the share is used up after `done` of `steps` steps; not at the last one."""
        used = self.clock() - self.started
        if done < steps and used > self.limit:
            raise OutOfTime(
                f"stopped after {done} of {steps} steps, {used:.0f} s: at {used / max(1, done):.2g} s a step "
                "it would use more than its share of the time limit; raise --time-limit or give fewer --steps"
            )


class ShareOfBatches:
    """Of every batch this rank's share: every so many-th example. All of it on one rank."""

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        ranks, this_rank = world_size(), rank()
        for x, y in self._batches:
            yield x[this_rank::ranks], y[this_rank::ranks]


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

    @property
    def label(self) -> str:
        """`O1 bf16`, or `O0` for fp32; with the loss scale where it is not the level's own."""
        words = [self.level, self.dtype or ""]
        if self.plan is not None:
            words = ["auto:" if self.plan.settings else "plan:", *words]
        level_scale = "dynamic" if LEVELS[self.level].needs_scale(self.dtype) else "none"
        if self.loss_scale not in (None, level_scale):
            words.append("no scale" if self.loss_scale == "none" else f"scale {self.loss_scale}")
        return " ".join(word for word in words if word)

    def prepare_options(self) -> dict[str, Any]:
        """Keyword arguments for `hs.prepare`."""
        if self.plan is not None and self.plan.settings:
            return {"plan": self.plan}
        options = {"level": self.level, "dtype": self.dtype, "loss_scale": self.loss_scale}
        return options if self.plan is None else {**options, "plan": self.plan}


def summary(
    recipe: Recipe,
    data: str,
    steps: int,
    seeds: int,
    trained: Sequence[tuple[TrainSetting, list[SeedRun]]],
    measured: Mapping[TrainSetting, dict[str, Any]],
) -> RecipeRows:
    """Return the recipe's words, and of each setting the raw runs, their summary and what was measured."""
    base = next((_finals(runs, recipe) for setting, runs in trained if setting.dtype is None), [])
    rows = [_row(setting, runs, recipe, base, measured.get(setting, {})) for setting, runs in trained]
    return RecipeRows(
        name=recipe.name,
        about=recipe.about,
        data=data,
        metric=recipe.metric,
        steps=steps,
        batch_size=recipe.batch_size,
        seeds=seeds,
        rows=rows,
    )


def _finals(runs: Sequence[SeedRun], recipe: Recipe) -> list[float]:
    """Return the test metric of every run that ended."""
    return [run.test[recipe.metric] for run in runs if recipe.metric in run.test]


def _spread(finals: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds; None for one seed, NaN where a run diverged."""
    if len(finals) < 2:
        return None
    return statistics.stdev(finals) if all(map(math.isfinite, finals)) else math.nan


def _row(
    setting: TrainSetting, runs: list[SeedRun], recipe: Recipe, base: list[float], measured: dict[str, Any]
) -> SettingRow:
    finals = _finals(runs, recipe)
    mean = statistics.fmean(finals) if finals else None
    settings = None if setting.plan is None else setting.plan.settings
    return SettingRow(
        label=setting.label,
        level=setting.level,
        dtype=setting.dtype or "fp32",
        mean=mean,
        spread=_spread(finals),
        difference=mean - statistics.fmean(base) if mean is not None and base else None,
        why="" if settings is None else settings.reason,
        skipped=sum(len(run.skipped) for run in runs),
        last_scale=next((run.scales[-1] for run in reversed(runs) if run.scales), None),
        failed=next((run.failed for run in runs if run.failed), None),
        stopped=_why_stopped(runs),
        diverged=sum(run.diverged_at is not None for run in runs),
        runs=runs,
        **measured,
    )


def _why_stopped(runs: Sequence[SeedRun]) -> str | None:
    """Why the time budget stopped a run; None where none was."""
    return next((run.stopped for run in runs if run.stopped), None)


class _ReportProgress(Callback):
    """Tells of each step, and ends the training when its share of the time is used up."""

    def __init__(self, on_step: OnStep, name: str, budget: TimeBudget, steps: int) -> None:
        self.on_step, self.name, self.budget, self.steps = on_step, name, budget, steps

    def on_step_end(self, trainer: Trainer) -> None:
        self.on_step(self.name)
        self.budget.check(trainer.step, self.steps)


@contextmanager
def _our_warnings(messages: list[str]) -> Generator[None]:
    """Collect the texts of our warnings; pass all others on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HalfstepWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, HalfstepWarning):
            messages.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def train_once(
    recipe: Recipe,
    task: Task,
    setting: TrainSetting,
    seed: int,
    steps: int,
    device: torch.device,
    on_step: OnStep,
    budget: TimeBudget | None = None,
) -> SeedRun:
    """Train the recipe from `seed` and evaluate it; our errors and warnings become part of the result."""
    model, optimizer = recipe.build(seed, setting.level)
    run, budget = SeedRun(seed), budget or TimeBudget(None, 1)
    budget.start()
    trainer = Trainer(
        model,
        optimizer,
        recipe.loss,
        device=device,
        metrics={"accuracy": accuracy} if recipe.metric == "accuracy" else {},
        callbacks=[_ReportProgress(on_step, f"{recipe.name} {setting.label}", budget, steps)],
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
        """Return the loss on the batch."""
        with self.amp.autocast():
            return self.loss(self.model(self.x), self.y)

    def step(self) -> None:
        """One whole training step."""
        self.amp.backward(self.forward())
        self.amp.step()

    def resident(self) -> list[Tensor]:
        """Return every tensor that lives between steps."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        groups = [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        tensors = [*self.model.parameters(), *self.model.buffers(), *groups, *state, self.x, self.y]
        return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def measure_settings(
    recipe: Recipe, task: Task, settings: Sequence[TrainSetting], device: torch.device, rounds: int
) -> dict[TrainSetting, dict[str, Any]]:
    """Time, memory, bound and costliest ops of a step at each setting, the times taken in turns."""
    benches = [TimedSetting(recipe, task, setting, device) for setting in settings]
    results: dict[TrainSetting, dict[str, Any]] = {}
    with _our_warnings([]):  # the trainings have told them already
        seconds = measure.rounds_in_turn([bench.step for bench in benches], device, rounds)
        times = [step_times(bench.step, [bench.model], steps=2) for bench in benches]
        full = next((t for setting, t in zip(settings, times) if setting.dtype is None), None)
        for setting, bench, step_seconds, ops in zip(settings, benches, seconds, times):
            median = statistics.median(step_seconds)
            with measure.memory_peak(bench.resident(), device) as peak:
                bench.step()
            results[setting] = {
                "seconds": median,
                "noise": measure.noise(step_seconds),
                "samples_per_second": recipe.batch_size / median,
                "saved_bytes": measure.bytes_saved_by(bench.forward, bench.model.parameters()),
                "peak_bytes": peak[0],
                "bound": measure.find_bound(measure.work_of(bench.step), device),
                "ops": measure.costliest(ops, full),
                "profiled": ops.seconds,
            }
    return results


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
    trained: list[tuple[TrainSetting, list[SeedRun]]] = [(setting, []) for setting in settings]
    results: dict[TrainSetting, dict[str, Any]] = {}
    interrupted = False
    try:
        for setting, runs in trained:
            for seed in range(seeds):
                if not _why_stopped(runs):
                    runs.append(train_once(recipe, task, setting, seed, steps, device, on_step, budget))
                elif budget:
                    budget.start()  # its share stays for the others
        results = measure_settings(
            recipe, task, [s for s, runs in trained if not _why_stopped(runs)], device, rounds
        )
    except KeyboardInterrupt:
        interrupted = True
        trained = [(setting, runs) for setting, runs in trained if runs]
    return replace(summary(recipe, task.name, steps, seeds, trained, results), interrupted=interrupted)


def tune_recipe(
    recipe: Recipe,
    device: torch.device,
    *,
    dtype: str | None = None,
    folder: str | None = None,
    seconds: float = SECONDS,
    compile: bool = False,
) -> Tuning:
    """Tune the recipe's model and optimizer on its first batch; `compile` tries `model.compile()` too."""
    model, optimizer = recipe.build(0)
    model.to(device)
    x, y = (part.to(device) for part in next(iter(recipe.task(folder).train(0))))

    def step(amp: Session, x: Tensor, y: Tensor) -> Tensor:
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return tune(model, optimizer, step, x, y, dtype=dtype, seconds=seconds, compile=compile)
