"""The search: levels, then layouts and compiling for the fastest, then fp32 for the modules faster in it.

The outcome is a plan whose settings name level, dtype, layout and whether to compile, with times:
`hs.prepare(plan=...)` loads it, here or from TOML.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from halfstep.convert.layout import convolution_weights
from halfstep.distributed.reduce import Group
from halfstep.errors import ConfigError
from halfstep.formats import parse_dtype
from halfstep.policy.plan import Plan
from halfstep.policy.settings import Measured, Settings
from halfstep.ratios import number
from halfstep.tuning.choices import TORCHS, LevelChoice, Trial, decide
from halfstep.tuning.engine import Bench, Step
from halfstep.tuning.modules import cast_cost, flow_of, plan_by_module

#: Seconds of measuring at most.
SECONDS = 60.0

#: Turns that choices take before and after a plan by module is made, and the steps timed in each.
FIRST_ROUNDS, LAST_ROUNDS, STEPS = 2, 5, 2

#: What takes more than this share of the best choice's time takes no part in the first turns, in the last
#: ones, and in those that follow between choices as good as equal.
HOPELESS, NEAR, CLOSE = 3.0, 1.3, 1.05

#: Steps that a plan by module costs: two profiles, whose steps take longer, and the flow between modules.
PROFILED = 16

#: How often the last turns are taken at most, while some choices are as good as equal.
CLOSE_TURNS = 3


@dataclass(frozen=True)
class Tuning:
    """What was tried on this machine and what came of it.

    `choice` was taken, `reason` says why in a sentence, with the measured times; `plan` is what
    `hs.prepare(plan=...)` takes. `trials` holds the measurements, `seconds` what they took. `interrupted`:
    Ctrl-C ended the work, and further choices were still to be tried.
    """

    trials: tuple[Trial, ...]
    choice: LevelChoice
    reason: str
    seconds: float
    interrupted: bool = False

    @property
    def plan(self) -> Plan:
        """Level, dtype, layout, compiling and rules by module, with the measured times as reasons."""
        choice = self.choice
        settings = Settings(
            level=choice.level,
            dtype=None if choice.dtype is None else parse_dtype(choice.dtype),
            layout=choice.layout,
            compile=choice.compiled,
            reason=self.reason,
            measured=tuple(map(_as_measured, self.trials)),
        )
        return replace(choice.rules, settings=settings)

    def to_toml(self) -> str:
        """Return the plan as TOML."""
        return self.plan.to_toml()

    def __str__(self) -> str:
        lines = [
            f"{row.setting:32} {number(row.milliseconds, '{:,.4g} ms'):>9}  {row.note}"
            for row in map(_as_measured, self.trials)
        ]
        return "\n".join([*lines, self.reason])


def _as_measured(trial: Trial) -> Measured:
    note = trial.failed or trial.too_far or ""
    milliseconds = trial.time * 1e3 if trial.seconds else None
    return Measured(trial.choice.label, milliseconds, trial.loss_error, trial.gradient_error, note)


def search(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    step: Step,
    batch: Sequence[Any],
    make: Callable[[LevelChoice], Any],
    *,
    dtype: str,
    device: torch.device,
    level: str | None = None,
    relayout: bool = True,
    by_module: bool = True,
    compiles: bool = False,
    seconds: float = SECONDS,
    group: Group | None = None,
) -> Tuning:
    """Try choices on the models and put them back; `make` prepares them for one and returns the session.

    With `level` given only layouts are tried, at that level. Where no step fits in fp32, others are measured
    against the first that runs. Raises ConfigError where none does.
    """
    began = time.perf_counter()
    relayout = relayout and bool(convolution_weights(models))
    bench = Bench(models, optimizers, step, batch, make, seconds, group)
    plain = LevelChoice("O0") if level in (None, "O0") else LevelChoice(level, dtype)
    others = [LevelChoice(name, dtype) for name in ("O1", "O2")] if level is None else []
    trials = _search(bench, plain, others, device, relayout, by_module and level is None, compiles)
    if trials[0].failed is not None:
        raise ConfigError(f"no step can be taken at {trials[0].choice.label}: {trials[0].failed}")
    trials = bench.budget.of_first_rank(trials)
    return Tuning(tuple(trials), *decide(trials), time.perf_counter() - began)


def _search(
    bench: Bench,
    plain: LevelChoice,
    others: Sequence[LevelChoice],
    device: torch.device,
    relayout: bool,
    by_module: bool,
    compiles: bool,
) -> list[Trial]:
    """Try levels and torch.autocast, then channels_last for the two fastest, compiling, plans by module.

    Returns every trial.
    """
    trials = [bench.first(plain)]
    if trials[0].failed is not None and not trials[0].too_large:
        return trials
    trials += [bench.first(choice) for choice in others]
    trials.sort(key=lambda trial: trial.too_large)  # the first is what others are measured against
    if trials[0].failed is not None:
        return trials
    if others:
        trials.append(bench.first(LevelChoice(TORCHS, others[0].dtype)))
    by_module = by_module and trials[0].choice.dtype is None
    for trial in _best(bench, trials, 2) if relayout else ():
        trials.append(bench.first(replace(trial.choice, layout="channels_last")))
    trials = _turns(bench, trials, FIRST_ROUNDS, HOPELESS)
    for choice in _levels(bench, trials) if compiles and others else ():
        trials.append(bench.first(replace(choice, compiled=True)))
    if by_module:
        trials += [bench.first(choice) for choice in _by_module(bench, trials, device)]
    trials = _turns(bench, trials, LAST_ROUNDS, NEAR)
    for _ in range(CLOSE_TURNS):
        trials = _turns(bench, trials, LAST_ROUNDS, CLOSE)
        times = sorted(t.time for t in trials if t.is_choice)
        if bench.budget.of_first_rank(not any(time <= CLOSE * times[0] for time in times[1:])):
            break
    return trials


def _best(bench: Bench, trials: Sequence[Trial], count: int) -> list[Trial]:
    """Return the fastest usable trials as rank 0 saw them."""
    order = sorted(range(len(trials)), key=lambda i: trials[i].time)
    return [trials[i] for i in bench.budget.of_first_rank(order) if trials[i].is_choice][:count]


def _levels(bench: Bench, trials: Sequence[Trial]) -> list[LevelChoice]:
    """Return the two fastest levels, each in its faster layout."""
    fastest: dict[str, LevelChoice] = {}
    for trial in _best(bench, trials, len(trials)):
        fastest.setdefault(trial.choice.level, trial.choice)
    return list(fastest.values())[:2]


def _turns(bench: Bench, trials: list[Trial], rounds: int, near: float) -> list[Trial]:
    """Time what is within `near` of the best, and fp32, in turns."""
    best = min((t.time for t in trials if t.is_choice), default=float("inf"))
    chosen = bench.budget.of_first_rank(
        [i for i, t in enumerate(trials) if i == 0 or (t.failed is None and t.time <= near * best)]
    )
    timed = bench.time_interleaved([trials[i] for i in chosen], rounds, STEPS)
    for index, trial in zip(chosen, timed):
        trials[index] = trial
    return trials


def _by_module(bench: Bench, trials: Sequence[Trial], device: torch.device) -> list[LevelChoice]:
    """Return the fastest 16-bit choice of each level, with fp32 for the modules that are faster in it."""
    if len(bench.models) != 1:
        return []
    choices: list[LevelChoice] = []
    for level in ("O1", "O2"):
        plain = [t for t in trials if t.usable and not t.choice.compiled]
        level_trials = [t for t in plain if t.choice.level == level and t.choice.dtype]
        for trial in _best(bench, level_trials, 1):
            if not bench.budget.affords(trial.choice.label, PROFILED):
                return choices
            rules = bench.budget.of_first_rank(_rules_for(bench, trial.choice, device))
            if rules.rules:
                choices.append(replace(trial.choice, rules=rules))
    return choices


def _rules_for(bench: Bench, choice: LevelChoice, device: torch.device) -> Plan:
    assert choice.dtype is not None
    base = LevelChoice("O0", layout=choice.layout)
    full, low = bench.profile(base), bench.profile(choice)
    nodes = {*full.by_module(), *low.by_module()}
    with bench.enter(base) as session:
        flow = flow_of(lambda: bench.run(session), bench.models, nodes)
    dtype = parse_dtype(choice.dtype)
    cost = cast_cost(device, dtype)
    return plan_by_module(bench.models[0], full, low, flow, cost, choice.level, dtype)
