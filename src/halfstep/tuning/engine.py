"""Measuring choices on the model itself: steps taken in turns from one state, which is put back afterwards.

A choice is entered by preparing the models and left by reverting; weights, gradients, optimizer states,
buffers and random generators are restored bit for bit each time, so that every choice takes the same steps
on the same batch. On several ranks all take the same steps, and what is dropped is rank 0's word.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.casting.kernel_probes import measurements
from halfstep.distributed import gather
from halfstep.distributed.reduce import Group
from halfstep.errors import ConfigError, HalfstepError, HalfstepWarning
from halfstep.numerics.snapshot import Snapshot, StepParticipants
from halfstep.optim import split
from halfstep.optim.master_link import weight_of
from halfstep.rng import random_state
from halfstep.torch_private import pytree
from halfstep.trees import compute_device, parameters_of
from halfstep.tuning.choices import NO_TIME, LevelChoice, Trial
from halfstep.tuning.op_times import StepTimes, step_times

Step = Callable[..., Any]
"""(session, *batch) -> loss: one whole training step, through `autocast`, `backward` and `step`."""

#: Steps that a dynamic loss scale may skip before one counts.
SKIPS = 24

#: Seconds that the first compilation is taken to need: Inductor's for a GPT of four layers with empty caches.
COMPILING = 30.0

#: Where the seconds that are left hold so many steps, a first timing is taken twice: the first may compile.
PLENTY = 10


@dataclass
class FirstStep:
    """What the first taken step of a choice showed: loss, and gradients by optimizer and place, unscaled.

    Beside a `base` no gradients are kept but the squares of their distance to its own and of these.
    """

    loss: float | None = None
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    base: FirstStep | None = None
    squares: dict[tuple[int, int], tuple[float, float]] = field(
        default_factory=dict[tuple[int, int], tuple[float, float]]
    )
    home: torch.device | None = None
    """Where gradients are kept; None where they are."""

    def listen(self, session: Any, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients of a step that begins; an early listener of a session."""
        number = next(i for i, candidate in enumerate(session.optimizers) if candidate is optimizer)
        self.keep(optimizer, session.loss_scale.read(), number)

    def keep(self, optimizer: torch.optim.Optimizer, scale: float = 1.0, number: int = 0) -> None:
        """Keep the gradients that an optimizer's parameters have."""
        for place, p in enumerate(parameters_of(optimizer)):
            gradient, key = weight_of(p).grad, (number, place)
            if gradient is None:
                continue
            value = gradient.detach().float() / scale
            if self.base is None:
                self.gradients[key] = value.to(self.home or value.device)
            elif key in self.base.gradients:
                self.squares[key] = _squares(value, self.base.gradients[key])

    def distance(self, base: FirstStep) -> tuple[float | None, float | None]:
        """How far loss and gradients are from the base's, relative to these; None where there are none."""
        loss_error = None
        if self.loss is not None and base.loss is not None:
            loss_error = abs(self.loss - base.loss) / max(abs(base.loss), 1e-12)
        far, whole = (sum(pair[i] for pair in self._squares_from(base).values()) for i in range(2))
        return loss_error, (far / whole) ** 0.5 if whole else None

    def find_farthest(self, base: FirstStep) -> tuple[int, int] | None:
        """Return optimizer and place of the gradient with the largest part in the distance, or None."""
        squares = {key: far for key, (far, _) in self._squares_from(base).items()}
        return max(squares, key=lambda key: squares[key], default=None)

    def _squares_from(self, base: FirstStep) -> dict[tuple[int, int], tuple[float, float]]:
        if self.base is base:
            return self.squares
        kept = {key: value for key, value in self.gradients.items() if key in base.gradients}
        return {key: _squares(value, base.gradients[key]) for key, value in kept.items()}


def _squares(value: Tensor, base: Tensor) -> tuple[float, float]:
    """Return the squares of the distance of two tensors and of the second, summed up."""
    far: Any = 0.0
    whole: Any = 0.0
    for a, b in split.parts(value, base) if type(value) is Tensor else [(value, base)]:
        base_part = b.to(a.device)
        far += torch.linalg.vector_norm(a - base_part, dtype=torch.float64) ** 2
        whole += torch.linalg.vector_norm(base_part, dtype=torch.float64) ** 2
    return float(far), float(whole)


class Budget:
    """What is left of the `seconds` that measuring may take, and what a step of each choice was last seen to
    take of them, by the wall clock.

    Every rank of `group` asks in the same order and hears the first one's answer.
    """

    def __init__(self, seconds: float, group: Group | None = None) -> None:
        self._seconds, self.group = seconds, group
        self._steps: dict[str, float] = {}
        self.around = 0.0
        """Seconds that preparing for a choice and putting everything back took last."""
        self.begin()

    def begin(self, spent: float = 0.0) -> None:
        """Count from now, or from so many seconds ago."""
        self._until = time.perf_counter() + self._seconds - spent

    def seconds_left(self) -> float:
        """Return seconds that are left; below 0 where too many were spent."""
        return float(self.of_first_rank(self._until - time.perf_counter()))

    def saw(self, label: str, seconds: float) -> None:
        """Note what a step of a choice took."""
        self._steps[label] = seconds

    def step(self, label: str) -> float:
        """What a step of a choice last took; one never seen is taken to be as fast as the first seen."""
        return self._steps.get(label, next(iter(self._steps.values()), 0.0))

    def affords(self, label: str, steps: int) -> bool:
        """Whether so many steps of a choice fit, with what is done before and after them."""
        return self.seconds_left() > float(self.of_first_rank(self.around + steps * self.step(label)))

    def of_first_rank(self, value: Any) -> Any:
        """Return the first rank's value, on every rank; every rank must ask."""
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
        self._device = compute_device(p for m in models for p in m.parameters())
        weights = _bytes(p for m in models for p in m.parameters())
        self._needs = weights
        """Bytes that a step takes beside the weights: gradients and states, once these are seen."""
        self._home = torch.device("cpu") if _free(self._device) < ROOM * weights else self._device
        self._start = Snapshot(StepParticipants(step, [*models, *optimizers]), home=self._home)
        self.budget = Budget(seconds, group)
        self._clock = clock_of(self._device)
        self._bases: dict[str, FirstStep] = {}
        self._plain = LevelChoice("O0")
        self._draws = False
        """Whether a step draws random numbers: compiled code draws others."""
        self.compiling = COMPILING
        """Seconds that a compilation is taken to need: what the last one took, once there was one."""

    @contextmanager
    def enter(self, choice: LevelChoice) -> Generator[Any]:
        """The models prepared for `choice`, from the state at the start; yields the session."""
        began = time.perf_counter()
        self._start.restore()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HalfstepWarning)
            session = self._make(choice)
            entered = time.perf_counter() - began
            try:
                yield session
            finally:
                began = time.perf_counter()
                session.revert()
                self._start.restore()
                self.budget.around = entered + time.perf_counter() - began

    def run(self, session: Any) -> Any:
        """One whole step of a prepared choice."""
        return self._step(session, *self._batch)

    def first(self, choice: LevelChoice) -> Trial:
        """Take a few steps of a choice: is it possible, near fp32's numbers, and not hopelessly slow?

        Two steps like those seen before must fit into the seconds that are left, its tensors into memory.
        """
        if choice.compiled and (seconds_left := self.budget.seconds_left()) < self.compiling:
            needs, left = f"compiling takes about {self.compiling:.2g} s", f"{max(0.0, seconds_left):.2g} s"
            return Trial(choice, failed=f"{NO_TIME}: {needs}, and {left} of `seconds` are left")
        if self._bases and not self.budget.affords(choice.label, 2 + (choice.layout not in self._bases)):
            return Trial(choice, failed=NO_TIME)
        lacking = next(filter(None, gather(self._lacking(choice), self.budget.group)), None)
        if lacking is not None:
            return Trial(choice, failed=lacking)
        return together(gather(self._first(choice), self.budget.group))

    def _lacking(self, choice: LevelChoice) -> str | None:
        """Why its gradients, 16-bit copies and the states that were seen do not fit; None where they do."""
        copies = 0 if choice.dtype is None else _bytes(p for m in self.models for p in m.parameters()) // 2
        needs, free = self._needs + copies, _free(self._device)
        if needs <= free:
            return None
        return f"it needs {needs / 1e9:.3g} GB beside what is held, and {free / 1e9:.3g} GB are free"

    def _first(self, choice: LevelChoice) -> Trial:
        begins, plain = not self._bases, replace(self._plain, layout=choice.layout)
        try:
            if not begins and choice != plain and choice.layout not in self._bases:
                with self.enter(plain) as session:
                    self._bases[choice.layout] = self._run_first_step(session)
            with self.enter(choice) as session:
                began, probes = time.perf_counter(), measurements.probes
                generators = _generators()
                first_step = self._run_first_step(session, None if begins else self._bases.get(choice.layout))
                spent = time.perf_counter() - began
                if choice.compiled:
                    self.compiling = self.budget.of_first_rank(spent)
                if begins:
                    self._draws = not all(map(torch.equal, generators, _generators()))
                    self.budget.begin()  # kernels that compile are not measuring
                seconds_left = self.budget.seconds_left()
                probed = measurements.probes > probes  # only a first step measures kernels
                slow = seconds_left <= 0 or (not probed and spent > max(1.0, seconds_left))
                slow = slow and not begins and not choice.compiled  # what took so long is not thrown away
                if self.budget.of_first_rank(slow):
                    return Trial(choice, failed=NO_TIME)
                # The least of two steps where there is time: the first ones may compile.
                steps = [self._time_step(session, choice) for _ in range(3 if choice.compiled else 1)]
                if self.budget.affords(choice.label, PLENTY):
                    steps.append(self._time_step(session, choice))
                seconds = min(steps)
                if begins:
                    self._needs += sum(
                        _bytes(s.values()) for o in session.optimizers for s in o.state.values()
                    )
            if begins:
                self._bases[choice.layout], self._plain = first_step, choice
                self.budget.begin(self.budget.around + (1 + len(steps)) * self.budget.step(choice.label))
            compiling = spent if choice.compiled else None
            return Trial(choice, (seconds,), *self._errors(choice, first_step), compiling)
        except (HalfstepError, RuntimeError, TypeError, ValueError) as error:
            return Trial(choice, failed=" ".join(str(error).split())[:200])

    def _errors(self, choice: LevelChoice, first_step: FirstStep) -> tuple[float | None, float | None]:
        """Return the distances from the base in the same layout.

        Another layout draws another dropout mask, and so does compiled code.
        """
        base = self._bases.get(choice.layout)
        if base is not None and not (choice.compiled and self._draws):
            return first_step.distance(base)
        far = first_step.distance(base or self._bases[self._plain.layout])
        self._bases.setdefault(choice.layout, first_step)
        return (None, None) if all(e is None or math.isfinite(e) for e in far) else far

    def _run_first_step(self, session: Any, base: FirstStep | None = None) -> FirstStep:
        """Step until one is taken, and note what it computed, or how far from a base its gradients are."""
        first_step, result = FirstStep(base=base, home=self._home), None
        session.early_listeners.append(first_step.listen)
        try:
            for _ in range(SKIPS):
                result = self.run(session)
                if session.history and bool(session.history[-1].taken):
                    break
        finally:
            session.early_listeners.remove(first_step.listen)
        if not session.history:
            raise ConfigError("it ends without amp.step(); a step is forward, amp.backward(loss), amp.step()")
        scalars = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.numel() == 1]
        first_step.loss = float(scalars[0].detach()) if scalars else None
        return first_step

    def time_interleaved(self, trials: Sequence[Trial], rounds: int, steps: int) -> list[Trial]:
        """Add `rounds` timings to each trial, all taking turns; ends early where the budget does."""
        times = [list(trial.seconds) for trial in trials]
        places = range(len(trials))
        for index in (i for turn in range(rounds) for i in (places if turn % 2 else reversed(places))):
            choice = trials[index].choice
            if not self.budget.affords(choice.label, steps + 1):
                break
            with self.enter(choice) as session:
                self.run(session)
                times[index] += [self._time_step(session, choice) for _ in range(steps)]
        times = self.budget.of_first_rank(times)
        return [replace(trial, seconds=tuple(seconds)) for trial, seconds in zip(trials, times)]

    def profile(self, choice: LevelChoice) -> StepTimes:
        """Return where a step's time goes under `choice`."""
        with self.enter(choice) as session:
            self.run(session)
            return step_times(lambda: self.run(session), self.models)

    def _time_step(self, session: Any, choice: LevelChoice) -> float:
        began, started = time.perf_counter(), self._clock()
        self.run(session)
        seconds = self._clock() - started
        self.budget.saw(choice.label, time.perf_counter() - began)
        return seconds


def together(trials: Sequence[Trial]) -> Trial:
    """One trial for all ranks: rank 0's times, the largest distances, and failed where any rank failed."""
    failed = next((t.failed for t in trials if t.failed is not None), None)
    loss, gradient = _worst([t.loss_error for t in trials]), _worst([t.gradient_error for t in trials])
    return replace(trials[0], failed=failed, loss_error=loss, gradient_error=gradient)


def _worst(errors: Sequence[float | None]) -> float | None:
    """Return the largest, with NaN above all."""
    numbers = [e for e in errors if e is not None]
    return max(numbers, key=lambda e: float("inf") if e != e else e, default=None)


#: Bytes that training with a copy of the weights and of the gradients may take for one of the weights. Where
#: an accelerator has not so many, the copies are on the host.
ROOM = 6


def _generators() -> list[Tensor]:
    """Return the states of random generators that are tensors: torch's on every device, and numpy's."""
    return [leaf for leaf in pytree.tree_leaves(random_state()) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _free(device: torch.device) -> float:
    """Return the bytes that are free on a device; inf where that is unknown."""
    if device.type != "cpu":
        try:
            free, _ = torch.accelerator.get_memory_info(device)
            return (
                free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
            )
        except RuntimeError:  # a backend without it
            return math.inf
    info = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.exists() else None
    return int(match[1]) * 1024 if match else math.inf


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds; of this process's own work on one CPU thread, so that neighbours do not count."""
    if device.type == "cpu":
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def now() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return now
