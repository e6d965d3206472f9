"""Measuring choices on the model itself: steps taken in turns from one state, which is put back afterwards.

A choice is entered by preparing the models and left by reverting; weights, gradients, optimizer states,
buffers and random generators are restored bit for bit each time, so that every choice takes the same steps
on the same batch. On several ranks all take the same steps, and what is dropped is rank 0's word.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.casting.kernel_probes import measurements
from halfstep.distributed import gather
from halfstep.distributed.reduce import Group
from halfstep.errors import ConfigError, HalfstepError, HalfstepWarning
from halfstep.numerics.snapshot import Snapshot, StepParticipants
from halfstep.optim.master_link import weight_of
from halfstep.torch_private import pytree
from halfstep.trees import compute_device, parameters_of
from halfstep.tuning.choices import NO_TIME, LevelChoice, Trial
from halfstep.tuning.op_times import StepTimes, step_times

Step = Callable[..., Any]
"""(session, *batch) -> loss: one whole training step, through `autocast`, `backward` and `step`."""

#: Steps that a dynamic loss scale may skip before one counts.
SKIPS = 24


@dataclass
class FirstStep:
    """What the first taken step of a choice showed: loss, and gradients by optimizer and place, unscaled."""

    loss: float | None = None
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])

    def listen(self, session: Any, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients of a step that begins; an early listener of a session."""
        number = next(i for i, known in enumerate(session.optimizers) if known is optimizer)
        self.keep(optimizer, session.loss_scale.read(), number)

    def keep(self, optimizer: torch.optim.Optimizer, scale: float = 1.0, number: int = 0) -> None:
        """Keep the gradients that an optimizer's parameters have."""
        for place, p in enumerate(parameters_of(optimizer)):
            gradient = weight_of(p).grad
            if gradient is not None:
                self.gradients[number, place] = gradient.detach().float() / scale

    def distance(self, base: FirstStep) -> tuple[float | None, float | None]:
        """How far loss and gradients are from the base's, relative to these; None where there are none."""
        apart = None
        if self.loss is not None and base.loss is not None:
            apart = abs(self.loss - base.loss) / max(abs(base.loss), 1e-12)
        pairs = [(self.gradients[key], b) for key, b in base.gradients.items() if key in self.gradients]
        whole = sum(float(b.double().square().sum()) for _, b in pairs)
        if not whole:
            return apart, None
        return apart, (sum(float((a - b).double().square().sum()) for a, b in pairs) / whole) ** 0.5


class Budget:
    """What is left of the `seconds` that measuring may take, and what a step of each choice was last seen to
    take of them, by the wall clock.

    Every rank of `group` asks in the same order and hears the first one's answer.
    """

    def __init__(self, seconds: float, group: Group | None = None) -> None:
        self._seconds, self.group = seconds, group
        self._steps: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Count from now."""
        self._until = time.perf_counter() + self._seconds

    def left(self) -> float:
        """Seconds that are left; below 0 where too many were spent."""
        return float(self.of_first_rank(self._until - time.perf_counter()))

    def saw(self, label: str, seconds: float) -> None:
        """Note what a step of a choice took."""
        self._steps[label] = seconds

    def affords(self, label: str, steps: int) -> bool:
        """Whether so many steps of a choice fit; one never seen is taken to be as fast as the first seen."""
        first = next(iter(self._steps.values()), 0.0)
        return self.left() > float(self.of_first_rank(steps * self._steps.get(label, first)))

    def of_first_rank(self, value: Any) -> Any:
        """The first rank's value, on every rank; every rank must ask."""
        return gather(value, self.group)[0]


class Bench:
    """The models, optimizers and step that choices are tried on; each leaves everything as it was."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        step: Step,
        batch: Sequence[Any],
        make: Callable[[LevelChoice], Any],
        seconds: float,
        group: Group | None = None,
    ) -> None:
        self.models = list(models)
        self._step, self._batch, self._make = step, tuple(batch), make
        self._start = Snapshot(StepParticipants(step, [*models, *optimizers]))
        self._device = compute_device(p for m in models for p in m.parameters())
        self.budget = Budget(seconds, group)
        self._clock = clock_of(self._device)
        self._bases: dict[str, FirstStep] = {}
        self._plain = LevelChoice("O0")

    @contextmanager
    def entered(self, choice: LevelChoice) -> Generator[Any]:
        """The models prepared for `choice`, from the state at the start; yields the session."""
        self._start.restore()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HalfstepWarning)
            session = self._make(choice)
            try:
                yield session
            finally:
                session.revert()
                self._start.restore()

    def run(self, session: Any) -> Any:
        """One whole step of a prepared choice."""
        return self._step(session, *self._batch)

    def first(self, choice: LevelChoice) -> Trial:
        """Take a few steps of a choice: is it possible, near fp32's numbers, and not hopelessly slow?

        Three steps like those seen before must fit into what is left.
        """
        if self._bases and not self.budget.affords(choice.label, 3):
            return Trial(choice, failed=NO_TIME)
        return together(gather(self._first(choice), self.budget.group))

    def _first(self, choice: LevelChoice) -> Trial:
        begins = not self._bases
        try:
            with self.entered(choice) as session:
                began, probes = time.perf_counter(), measurements.probes
                seen = self._look(session)
                spent = time.perf_counter() - began
                left = self.budget.left()
                probed = measurements.probes > probes  # only a first step measures kernels
                slow = not begins and (left <= 0 or (not probed and spent > max(1.0, left)))
                if self.budget.of_first_rank(slow):
                    return Trial(choice, failed=NO_TIME)
                # The least of two steps: the first ones may compile.
                taken = min(self._timed(session, choice) for _ in range(2))
            if begins:
                self._bases[choice.layout], self._plain = seen, choice
                self.budget.begin()  # kernels that compile are not measuring
            return Trial(choice, (taken,), *self._errors(choice, seen))
        except (HalfstepError, RuntimeError, TypeError, ValueError) as error:
            return Trial(choice, failed=" ".join(str(error).split())[:200])

    def _errors(self, choice: LevelChoice, seen: FirstStep) -> tuple[float | None, float | None]:
        """How far from the base in the same layout: another one draws another dropout mask."""
        plain = replace(self._plain, layout=choice.layout)
        if choice == plain and choice.layout not in self._bases:
            self._bases[choice.layout] = seen
            far = seen.distance(self._bases[self._plain.layout])
            return (None, None) if all(e is None or math.isfinite(e) for e in far) else far
        if choice.layout not in self._bases:
            with self.entered(plain) as session:
                self._bases[choice.layout] = self._look(session)
        return seen.distance(self._bases[choice.layout])

    def _look(self, session: Any) -> FirstStep:
        """Step until one is taken, and note what it computed."""
        seen, result = FirstStep(), None
        session.early_listeners.append(seen.listen)
        try:
            for _ in range(SKIPS):
                result = self.run(session)
                if session.history and bool(session.history[-1].taken):
                    break
        finally:
            session.early_listeners.remove(seen.listen)
        if not session.history:
            raise ConfigError("it ends without amp.step(); a step is forward, amp.backward(loss), amp.step()")
        scalars = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.numel() == 1]
        seen.loss = float(scalars[0].detach()) if scalars else None
        return seen

    def in_turns(self, trials: Sequence[Trial], rounds: int, steps: int) -> list[Trial]:
        """Add `rounds` timings to each trial, all taking turns; ends early where the budget does."""
        times = [list(trial.seconds) for trial in trials]
        places = range(len(trials))
        for index in (i for turn in range(rounds) for i in (places if turn % 2 else reversed(places))):
            choice = trials[index].choice
            if not self.budget.affords(choice.label, steps + 1):
                break
            with self.entered(choice) as session:
                self.run(session)
                times[index] += [self._timed(session, choice) for _ in range(steps)]
        times = self.budget.of_first_rank(times)
        return [replace(trial, seconds=tuple(seen)) for trial, seen in zip(trials, times)]

    def profile(self, choice: LevelChoice) -> StepTimes:
        """Where a step's time goes under `choice`."""
        with self.entered(choice) as session:
            self.run(session)
            return step_times(lambda: self.run(session), self.models)

    def _timed(self, session: Any, choice: LevelChoice) -> float:
        began, started = time.perf_counter(), self._clock()
        self.run(session)
        taken = self._clock() - started
        self.budget.saw(choice.label, time.perf_counter() - began)
        return taken


def together(trials: Sequence[Trial]) -> Trial:
    """One trial for all ranks: rank 0's times, the largest distances, and failed where any rank failed."""
    failed = next((t.failed for t in trials if t.failed is not None), None)
    loss, gradient = _worst([t.loss_error for t in trials]), _worst([t.gradient_error for t in trials])
    return replace(trials[0], failed=failed, loss_error=loss, gradient_error=gradient)


def _worst(errors: Sequence[float | None]) -> float | None:
    """The largest, with NaN above all."""
    known = [e for e in errors if e is not None]
    return max(known, key=lambda e: float("inf") if e != e else e, default=None)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds; of this process's own work on one CPU thread, so that neighbours do not count."""
    if device.type == "cpu":
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def now() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return now
