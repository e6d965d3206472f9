"""Running a recipe at several precision settings and seeds, and measuring each setting's step.

Their `summary` is what the command line prints and the report draws.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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


class Pace:
    """Until when each of several jobs may go on, so that all end within `seconds`; None for no limit.

    A job gets the share of the seconds left that its weight has among the weights of the jobs left: what one
    does not use stays for the others.
    """

    def __init__(
        self,
        seconds: float | None,
        weights: Sequence[float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self.weights = clock, list(weights)
        self.ends = math.inf if seconds is None else clock() + seconds
        self.began = self.until = self.ends

    def begin(self) -> None:
        """The next job begins now."""
        self.began = self.clock()
        share = self.weights[0] / sum(self.weights)
        self.until = self.began + share * max(0.0, self.ends - self.began)
        del self.weights[0]

    def share_used(self) -> float:
        """Return which share of its time the job has used; 0 where it has no limit."""
        return min(1.0, (self.clock() - self.began) / max(1e-9, self.until - self.began))

    def allows(self, seconds: float) -> bool:
        """Whether so many more seconds end in time."""
        return self.clock() + seconds <= self.until


def _endless(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of every batch, pass after pass, this rank's share: every so many-th example. All of it on one rank."""
    ranks, this_rank = world_size(), rank()
    while True:
        for x, y in batches:
            yield x[this_rank::ranks], y[this_rank::ranks]


OnStep = Callable[[str, float], None]
"""Called after every step of every run, with its name and which share of the recipe is trained."""


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
        diverged=sum(run.diverged_at is not None for run in runs),
        runs=runs,
        **measured,
    )


class _AfterStep(Callback):
    """Calls a function after each step."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_step_end(self, trainer: Trainer) -> None:
        self.call()


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


class Training:
    """One training of a recipe, taken as far as is asked; our errors and warnings go into its `run`."""

    def __init__(
        self, recipe: Recipe, task: Task, setting: TrainSetting, seed: int, after_step: Callable[[str], None]
    ) -> None:
        self.recipe, self.task, self.setting = recipe, task, setting
        self.after_step = partial(after_step, f"{recipe.name} {setting.label}")
        self.run = SeedRun(seed)
        self._batches = _endless(task.train(seed))
        self._trainer: Trainer | None = None

    def train_to(self, step: int, device: torch.device) -> None:
        """Train until step number `step`, unless an error has ended it."""
        run = self.run
        with _our_warnings(run.warnings):
            if self._trainer is None:
                self._trainer = self._make_trainer(device)
            if run.failed is not None:
                return
            try:
                self._trainer.fit(self._batches, steps=step)
            except HalfstepError as error:
                run.failed = str(error)
        history = self._trainer.history
        run.losses += history.losses
        run.skipped += history.skipped
        run.scales += [log.scale for log in history.steps]
        run.diverged_at = history.diverged_at if run.diverged_at is None else run.diverged_at

    def _make_trainer(self, device: torch.device) -> Trainer:
        model, optimizer = self.recipe.build(self.run.seed, self.setting.level)
        return Trainer(
            model,
            optimizer,
            self.recipe.loss,
            device=device,
            metrics={"accuracy": accuracy} if self.recipe.metric == "accuracy" else {},
            callbacks=[_AfterStep(self.after_step)],
            progress=False,
            wrap=nn.parallel.DistributedDataParallel if world_size() > 1 else None,
            **self.setting.prepare_options(),
        )

    def end(self) -> None:
        """Evaluate what was trained, and let go of it; does nothing the second time."""
        run, trainer = self.run, self._trainer
        if trainer is not None and run.failed is None and not run.test:
            with _our_warnings(run.warnings):
                try:
                    run.test = trainer.evaluate(self.task.test)
                except HalfstepError as error:
                    run.failed = str(error)
        self._trainer = None

    @property
    def ended(self) -> bool:
        """Whether it was evaluated, or an error ended it."""
        return bool(self.run.test) or self.run.failed is not None


def train_once(
    recipe: Recipe, task: Task, setting: TrainSetting, seed: int, steps: int, device: torch.device
) -> SeedRun:
    """Train the recipe from `seed` and evaluate it; our errors and warnings become part of the result."""
    training = Training(recipe, task, setting, seed, lambda name: None)
    training.train_to(steps, device)
    training.end()
    return training.run


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


#: To evaluate and measure every setting takes as long as about so many rounds of training steps.
AFTER_TRAINING = 30
#: Into so many parts trainings are cut that take turns.
_PARTS = 50


def seconds_of(
    recipe: Recipe,
    settings: Sequence[TrainSetting],
    seeds: int,
    steps: int,
    device: torch.device,
    folder: str | None,
) -> float:
    """Return about how many seconds `run_recipe` takes, from three steps at the first of the settings."""
    timed = TimedSetting(recipe, recipe.task(folder), settings[0], device)
    with _our_warnings([]):
        seconds, _ = measure.rounds_in_turn([timed.step], device, rounds=3, warm_up=1)
    return statistics.median(seconds[0]) * len(settings) * (steps * seeds + AFTER_TRAINING)


def measure_settings(
    recipe: Recipe,
    task: Task,
    settings: Sequence[TrainSetting],
    device: torch.device,
    rounds: int,
    for_report: bool = True,
) -> dict[TrainSetting, dict[str, Any]]:
    """Time and memory of a step at each setting, times in turns; bound and costliest ops for a report."""
    benches = [TimedSetting(recipe, task, setting, device) for setting in settings]
    results: dict[TrainSetting, dict[str, Any]] = {}
    with _our_warnings([]):  # the trainings have told them already
        timed = measure.rounds_in_turn([bench.step for bench in benches], device, rounds)
        for setting, bench, seconds, processor in zip(settings, benches, *timed):
            median = statistics.median(seconds)
            with measure.memory_peak(bench.resident(), device) as peak:
                bench.step()
            results[setting] = {
                "seconds": median,
                "noise": measure.noise(seconds),
                "samples_per_second": recipe.batch_size / median,
                "saved_bytes": measure.bytes_saved_by(bench.forward, bench.model.parameters()),
                "peak_bytes": peak[0],
            }
            if device.type == "cpu":
                results[setting]["processor_seconds"] = statistics.median(processor)
                results[setting]["processor_noise"] = measure.noise(processor)
        if for_report:
            times = [step_times(bench.step, [bench.model], steps=2) for bench in benches]
            full = next((t for setting, t in zip(settings, times) if setting.dtype is None), None)
            for setting, bench, ops in zip(settings, benches, times):
                results[setting] |= {
                    "bound": measure.find_bound(measure.work_of(bench.step), device),
                    "ops": measure.costliest(ops, full),
                    "profiled": ops.seconds,
                }
    return results


def _train_in_turns(
    trainings: Sequence[Training], steps: int, seeds: int, pace: Pace, device: torch.device
) -> tuple[int, bool]:
    """Train and evaluate all; return the step at which all of them ended, and whether time was short then.

    Where there is a limit they take turns, a part of their steps at a time, until the next part would leave
    too little time to evaluate and measure; a tenth of their steps may use that time too.
    """
    part = steps if pace.until == math.inf else max(1, steps // _PARTS)
    began, done, in_time = pace.clock(), 0, True
    while done < steps:
        done = min(done + part, steps)
        for training in trainings:
            training.train_to(done, device)
            if done == steps:
                training.end()
        round_seconds = (pace.clock() - began) / (done * seeds)
        in_time = pace.allows(AFTER_TRAINING / 2 * round_seconds)
        reserved = AFTER_TRAINING if 10 * done >= steps else 0
        if not pace.allows((part * seeds + reserved) * round_seconds):
            break
    for training in trainings:
        training.end()
    return done, in_time


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
    pace: Pace | None = None,
) -> RecipeRows:
    """Train the recipe at every setting from seeds 0 to `seeds` - 1, then measure each setting's step.

    Where `pace` has a limit, all trainings end at the same step, and what only a report shows is left out if
    time is short. Ctrl-C ends the work: the result has the trainings that ended before.
    """
    pace = Pace(None, [1.0]) if pace is None else pace
    pace.begin()
    task = recipe.task(folder)
    taken = itertools.count(1)

    def after_step(name: str) -> None:
        on_step(name, max(next(taken) / (steps * seeds * len(settings)), pace.share_used()))

    trainings = [
        (setting, [Training(recipe, task, setting, seed, after_step) for seed in range(seeds)])
        for setting in settings
    ]
    results: dict[TrainSetting, dict[str, Any]] = {}
    done, interrupted = steps, False
    try:
        all_trainings = [training for _, of_setting in trainings for training in of_setting]
        done, in_time = _train_in_turns(all_trainings, steps, seeds, pace, device)
        on_step(f"measuring {recipe.name}", 1.0)
        rounds = rounds if in_time else min(rounds, 6)
        results = measure_settings(recipe, task, settings, device, rounds, for_report=in_time)
    except KeyboardInterrupt:
        interrupted = True
    trained = [(setting, [t.run for t in of_setting if t.ended]) for setting, of_setting in trainings]
    rows = summary(recipe, task.name, done, seeds, [(s, runs) for s, runs in trained if runs], results)
    return replace(rows, steps_asked=steps, interrupted=interrupted)


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
