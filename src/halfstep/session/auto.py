"""What `prepare` does with level="auto", layout="auto" and a plan that has settings; and `tune`.

Measuring itself is `tuning`'s affair. Here arguments are read, and the way back into `prepare` is handed in.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import devices
from halfstep.errors import ConfigError, PlanError, show
from halfstep.formats import dtype_name, parse_dtype
from halfstep.policy.levels import Level, dtype_of, level_of
from halfstep.policy.plan import Plan
from halfstep.tuning.choices import LevelChoice
from halfstep.tuning.engine import Step
from halfstep.tuning.search import Tuning, options_of, search


def read_plan(plan: Any) -> Plan | None:
    """Return the plan, read from TOML where a path was given; PlanError where it cannot be read."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return Plan.read(plan)
    raise PlanError(f"got {type(plan).__name__} as a plan: expected a Plan or the path of a TOML file")


def as_auto(level: Any) -> Any:
    """The level as it was given; "auto" in whatever case, as levels' own names are read."""
    return "auto" if isinstance(level, str) and level.strip().lower() == "auto" else level


def settings_of(
    plan: Plan | None, level: Any, dtype: Any, layout: str
) -> tuple[Any, str | torch.dtype | None, str]:
    """Level, dtype and layout with those of the plan's settings, where it has any.

    A level, dtype or layout beside them is an error unless it is the default or the same.
    """
    if plan is None or plan.settings is None:
        return level, dtype, layout
    own = plan.settings
    theirs = level_of(own.level)[0].name
    given = level if level in ("auto", "O1") else level_of(level)[0].name
    if given not in ("O1", theirs):
        raise ConfigError(f"level={show(level)} beside a plan made for {own.level}: give one of the two")
    if dtype is not None and own.dtype is not None and parse_dtype(dtype) != own.dtype:
        raise ConfigError(
            f"dtype={dtype!r} beside a plan made for {dtype_name(own.dtype)}: give one of the two"
        )
    return own.level, own.dtype, layout if layout != "keep" else own.layout


def choose(
    make: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    step: Step | None,
    batch: Sequence[Any],
    *,
    device: torch.device,
    level: str | Level,
    dtype: str | torch.dtype | None,
    layout: str,
    plan: Plan | None,
    seconds: float,
    options: dict[str, Any],
) -> Tuning:
    """Measure and decide; `make(models, optimizers, **arguments)` prepares. Leaves everything as it was.

    Raises ConfigError without a step, for a batch that is no tuple, for seconds not above 0, and where fp32
    takes no step either.
    """
    if not callable(step):
        asked = "level='auto'" if level == "auto" else f"layout={layout!r}"
        raise ConfigError(
            f"{asked} is chosen by running training steps, but step={step!r:.60}: expected a function "
            "step(amp, *batch) that makes one training step, and batch=(x, y), what it is called with"
        )
    if isinstance(batch, Tensor) or not isinstance(batch, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"batch is a {type(batch).__name__}: expected what step(amp, *batch) is called with, as a tuple; "
            "for one argument batch=(x,)"
        )
    try:
        inspect.signature(step).bind(None, *batch)
    except TypeError as error:
        raise ConfigError(
            f"step(amp, *batch) cannot be called with this batch of {len(batch)}: {error}. Give prepare() "
            "batch=(x, y), what your step takes after the session"
        ) from None
    except ValueError:  # a callable of C tells nothing of its arguments
        pass
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"seconds={show(seconds)}: expected a number above 0")
    row, word = (None, None) if level == "auto" else level_of(level)
    low = dtype_name(dtype_of(dtype) if dtype is not None else word or devices.default_dtype(device))
    fixed = level if isinstance(level, str) else level.name

    def prepared(choice: LevelChoice) -> Any:
        return make(models, optimizers, **arguments_of(choice, options, plan))

    return search(
        models,
        optimizers,
        step,
        batch,
        prepared,
        dtype=low,
        device=device,
        level=None if row is None else fixed,
        relayout=layout == "auto",
        by_module=plan is None,
        seconds=seconds,
        group=options.get("group"),
    )


def arguments_of(choice: LevelChoice, options: dict[str, Any], plan: Plan | None) -> dict[str, Any]:
    """The arguments of `prepare` for a choice; what belongs to 16 bits alone is left out in fp32."""
    if choice.dtype is None:
        kept = {k: v for k, v in options.items() if k not in ("policy", "loss_scale")}
        return {**kept, **options_of(choice)}
    return {**options, **({} if plan is None else {"plan": plan}), **options_of(choice)}


def tell(tuning: Tuning) -> None:
    """Say on standard error what was chosen and why: whoever asks for "auto" hears the answer."""
    print(f"halfstep: {tuning.reason}", file=sys.stderr, flush=True)
