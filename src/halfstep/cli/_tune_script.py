"""`halfstep tune SCRIPT.py`: the script runs a few steps under each choice, in processes of its own.

The script is not changed: inside such a process `prepare` takes the choice's level, dtype and layout instead
of the script's, and everything ends after the last step that is timed. A script that never calls `prepare` is
tried at O1 (`_foreign_script.py`). Runs take turns. Precision by module is not tried, since a script's step
cannot be taken again.
"""

from __future__ import annotations

import importlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from halfstep.cli._foreign_script import ForeignScript
from halfstep.cli._progress import ShowProgress, time_left
from halfstep.convert.layout import convolution_weights
from halfstep.doctor.process import StopScript, in_words, run_in_process, run_main, seed
from halfstep.errors import ConfigError
from halfstep.formats import dtype_name, parse_dtype
from halfstep.optim.master_link import weight_of
from halfstep.recipes.measure import memory_peak
from halfstep.session.prepare import arguments_of
from halfstep.session.session import Session
from halfstep.trainer import loop
from halfstep.trees import parameters_of
from halfstep.tuning.choices import LevelChoice, Trial, decide
from halfstep.tuning.engine import FirstStep, clock_of
from halfstep.tuning.search import NEAR, Tuning

#: Steps of one run: the first ones warm up and are compared, the others are timed.
STEPS, WARM = 8, 3

#: Steps of a script that does not use halfstep, whose losses are compared as well.
FOREIGN_STEPS = 40

#: Times that every choice takes its turn.
TURNS = 3


def tune_script(
    path: Path,
    args: Sequence[str],
    dtype: str | None,
    seconds: float,
    report: ShowProgress = lambda name, share=None: None,
) -> Tuning:
    """Run the script under O0, O1, O2 and channels_last for the fastest, and decide; `report` each run.

    One that never calls `hs.prepare` runs as it is and at O1 in bf16 and fp16 (or `dtype`). Ctrl-C after the
    first run ends the work with what is measured.

    Raises:
        ConfigError: no such script, it cannot be tried, takes too few steps, or fails in fp32.
    """
    if not path.is_file():
        raise ConfigError(f"no script {path}; expected a recipe or the path of a .py file")
    began = time.perf_counter()
    report(f"under O0, run 1; each run takes at most {seconds:g} s from its first step on")
    base = run_script(path, args, LevelChoice("O0"), seconds)
    if base.trial.failed is not None:
        raise ConfigError(f"{path} cannot be tuned: {base.trial.failed}")
    if base.dtype:
        choices = [LevelChoice(level, dtype or base.dtype) for level in ("O1", "O2")]
    else:
        choices = [LevelChoice("O1", name) for name in (("bf16", "fp16") if dtype is None else (dtype,))]
    most = TURNS * (1 + len(choices) + (2 if base.convolutions else 0))
    number = itertools.count(1)

    def run(choice: LevelChoice) -> Run:
        done = next(number)
        rest = time_left(time.perf_counter() - began, done / most)
        report(f"under {choice.label}, run {done + 1} of at most {most}, {rest}")
        return run_script(path, args, choice, seconds)

    trials, interrupted = [base.beside(base)], False
    try:
        _try_others(trials, base, choices, run)
    except KeyboardInterrupt:
        interrupted = True
    return Tuning(tuple(trials), *decide(trials), time.perf_counter() - began, interrupted)


def _try_others(
    trials: list[Trial], base: Run, choices: Sequence[LevelChoice], run: Callable[[LevelChoice], Run]
) -> None:
    """Add the trials of the choices and of channels_last, then the further turns of those worth it."""
    for choice in choices:
        trials.append(run(choice).beside(base))
    if base.convolutions:
        for trial in sorted((t for t in trials if t.seconds), key=lambda t: t.time)[:2]:
            trials.append(run(replace(trial.choice, layout="channels_last")).beside(base))
    best = min(t.time for t in trials)
    for _ in range(TURNS - 1):
        for index, trial in enumerate(trials):
            if index == 0 or trial.time <= NEAR * best:
                more_seconds = run(trial.choice).trial.seconds
                trials[index] = replace(trial, seconds=(*trial.seconds, *more_seconds))


@dataclass
class Run:
    """What a run of a script showed: its trial, yet without distances, and its first step.

    `names`: of parameters, by optimizer and place. Of a script with a session also the dtype that its device
    prefers, and whether it has convolutions.
    """

    trial: Trial
    first: FirstStep = field(default_factory=FirstStep)
    dtype: str = ""
    convolutions: bool = False
    names: Mapping[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])

    def beside(self, base: Run) -> Trial:
        """Return the trial, with how far its first step is from that of the run in fp32."""
        loss, gradient = self.first.distance(base.first)
        farthest = self.first.find_farthest(base.first)
        name = "" if farthest is None else self.names.get(farthest, "")
        return replace(self.trial, loss_error=loss, gradient_error=gradient, farthest=name)


def run_script(path: Path, args: Sequence[str], choice: LevelChoice, seconds: float) -> Run:
    """What `time_script` finds in a process of its own; it ends after `seconds` from its first step's end."""
    result, stderr = run_in_process(partial(time_script, str(path), args, choice, seconds), os.environ)
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    if result is None:
        return Run(Trial(choice, failed=last))
    failed = result.trial.failed or ""
    if stderr.strip() and failed.startswith("SystemExit"):
        failed = f"{failed}; the last line of its standard error: {last}"
        result.trial = replace(result.trial, failed=failed)
    return result


class _Timer:
    """Prepares what the script prepares, as the choice says, and times the steps of its session.

    Before a session is made, and where none is, it tries what `ForeignScript` tries and times the steps of
    that.
    After `seconds` from the end of its first step, which may compile, it ends with what it has.
    """

    def __init__(self, choice: LevelChoice, seconds: float) -> None:
        self.choice, self.seconds = choice, seconds
        self.until = float("inf")
        self.session: Session | None = None
        dtype = None if choice.dtype is None else parse_dtype(choice.dtype)
        self.foreign: ForeignScript | None = ForeignScript(dtype, self._on_optimizer_step)
        self.first = FirstStep()
        self.memory, self.peak = ExitStack(), list[int]()
        self.ends: list[float] = []

    def install(self) -> None:
        """Put `prepare` of this process in the place of halfstep's."""
        assert self.foreign is not None
        self.foreign.install()
        prepare_module: Any = importlib.import_module("halfstep.session.prepare")
        original, backward = prepare_module.prepare, Session.backward

        def prepare(model: Any, optimizer: Any = None, **kwargs: Any) -> Session:
            tuned_names = ("level", "dtype", "layout", "plan", "step", "batch", "seconds")
            other_options = {key: value for key, value in kwargs.items() if key not in tuned_names}
            plan = kwargs.get("plan") if getattr(kwargs.get("plan"), "settings", None) is None else None
            session = original(model, optimizer, **arguments_of(self.choice, other_options, plan))
            if self.session is None:
                if self.foreign is not None:
                    self.foreign.close()
                self.session, self.foreign = session, None
                session.early_listeners.append(self.first.listen)
                session.listeners.append(self._on_session_step)
            return session

        def keep_loss(session: Session, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.first.loss is None and loss.numel() == 1:
                self.first.loss = float(loss.detach())
            backward(session, loss, *args, **kwargs)

        Session.backward = keep_loss  # type: ignore[method-assign]
        for place in (prepare_module, halfstep.session, halfstep, loop):  # pyright: ignore[reportAttributeAccessIssue]
            place.prepare = prepare  # pyright: ignore[reportAttributeAccessIssue]

    def _on_session_step(self, session: Session, outcome: Any) -> None:
        if len(session.history) % len(session.optimizers):
            return  # another optimizer's turn is still to come in this step
        if self.first.listen in session.early_listeners and bool(outcome.taken):
            session.early_listeners.remove(self.first.listen)
        self._end(session.device, STEPS + 1)

    def _on_optimizer_step(self) -> None:
        """A script without a session has stepped; memory is counted in the last step that is not timed."""
        assert self.foreign is not None
        self.memory.close()
        resident = self.foreign.resident()
        self._end(resident[0].device, FOREIGN_STEPS)
        if len(self.ends) == WARM - 1:
            self.peak = self.memory.enter_context(memory_peak(resident, resident[0].device))

    def _end(self, device: torch.device, last: int) -> None:
        """A step is over."""
        self.ends.append(clock_of(device)())
        if len(self.ends) == 1:
            self.until = time.perf_counter() + self.seconds
        if len(self.ends) >= last or time.perf_counter() > self.until:
            raise StopScript

    def failure(self) -> str | None:
        """Why the run says nothing, where the script itself did not fail."""
        if self.session is None and not self.ends:
            return "it neither calls hs.prepare nor steps a torch optimizer (weights updated by hand?)"
        if len(self.ends) > WARM:
            return None
        if time.perf_counter() > self.until:
            limit = f"--seconds {self.seconds:g}, counted from its first step's end: give more"
            return f"{WARM + 1} steps take longer than {limit}"
        steps = "1 step" if len(self.ends) == 1 else f"{len(self.ends)} steps"
        return f"it took {steps}, and {WARM + 1} are needed"

    def result(self) -> Run:
        """Return what goes back to the command."""
        steps = [b - a for a, b in zip(self.ends, self.ends[1:])][WARM - 1 :]
        trial = Trial(self.choice, (median(steps),))
        if self.foreign is not None:
            losses = tuple(float(loss) for loss in self.foreign.losses)
            self.foreign.first.loss = next(iter(losses), None)
            uses, skipped = frozenset(self.foreign.uses), self.foreign.skipped
            trial = replace(trial, losses=losses, peak_bytes=self.peak[0], skipped=skipped, uses=uses)
            names = _names_of(self.foreign.modules, self.foreign.optimizers[:1])
            return Run(trial, self.foreign.first, names=names)
        assert self.session is not None
        prefers = dtype_name(halfstep.devices.default_dtype(self.session.device))
        names = _names_of(self.session.models, self.session.optimizers)
        return Run(trial, self.first, prefers, bool(convolution_weights(self.session.models)), names)


def _names_of(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[tuple[int, int], str]:
    """Return the names of the models' parameters by optimizer and place."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    placed = (
        ((number, place), id(weight_of(p)))
        for number, optimizer in enumerate(optimizers)
        for place, p in enumerate(parameters_of(optimizer))
    )
    return {key: names[weight] for key, weight in placed if weight in names}


def time_script(script: str, args: Sequence[str], choice: LevelChoice, seconds: float) -> Run:
    """Runs a script in this process under a choice; what it raises is part of what was found."""
    timer = _Timer(choice, seconds)
    timer.install()
    seed(0)
    error = run_main(script, args)
    timer.memory.close()
    refused = None if timer.foreign is None else timer.foreign.refused
    failed = refused or (error and in_words(error, len(timer.ends))) or timer.failure()
    return timer.result() if failed is None else Run(Trial(choice, failed=failed))
