"""`halfstep train RECIPE`: train at several precisions and seeds, compare in one table, write a report."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import tyro

from halfstep.cli._options import Flag, check_report, computing_device, set_threads, shown
from halfstep.cli._output import console, print_json, table
from halfstep.cli._progress import progress
from halfstep.distributed import joined, rank, started_by_torchrun
from halfstep.errors import ConfigError
from halfstep.report.comparison import Comparison, RecipeRows
from halfstep.scaling.loss_scale import LARGEST_SCALE, SMALLEST_SCALE

if TYPE_CHECKING:
    from halfstep.policy.plan import Plan
    from halfstep.recipes import Recipe
    from halfstep.recipes.runs import TrainSetting


AUTO = "auto"


def run(
    recipe: tyro.conf.Positional[Annotated[str, shown("RECIPE")]],
    level: Annotated[str | None, shown("LEVELS")] = None,
    dtype: Annotated[str | None, shown("DTYPES")] = None,
    loss_scale: Annotated[str, shown("SCALES")] = "default",
    seeds: Annotated[int | None, shown("COUNT")] = None,
    steps: Annotated[int | None, shown("COUNT")] = None,
    epochs: Annotated[int | None, shown("COUNT")] = None,
    device: Annotated[str | None, shown("DEVICE")] = None,
    threads: Annotated[int | None, shown("COUNT")] = None,
    data: Annotated[str | None, shown("FOLDER")] = None,
    plan: Annotated[Path | None, shown("FILE")] = None,
    time_limit: Annotated[float | None, shown("SECONDS")] = None,
    report: Annotated[Path | None, shown("FILE")] = None,
    json: Flag = False,
) -> None:
    """Train a recipe at several precisions and compare them. Lists are separated by commas.

    Under torchrun the ranks share each batch (DistributedDataParallel), and the first one reports.

    Args:
        recipe: digits-mlp, digits-cnn, text-gpt, digits-faint, several separated by commas, or demo (all).
        level: Levels to compare, O0 to O3, words such as bf16-mixed, or auto: what trains the recipe fastest
            on this machine, measured first (at most a minute a recipe). Default: O0,O1; all four for demo.
        dtype: 16-bit dtypes to compare, bf16 or fp16. Default: what the device prefers; both for demo.
        loss_scale: dynamic, headroom, none, a number, or default: dynamic for fp16 at O1 and O2.
        seeds: Trainings of each setting, with seeds 0, 1, ... Default: 1; 2 for demo.
        steps: Steps of each training. Default: the recipe's own.
        epochs: Passes over the training data instead of steps.
        device: cpu, cuda, ... Default: the accelerator if there is one.
        threads: CPU threads of torch. Default: torch's own.
        data: Folder with MNIST's IDX files, instead of the bundled digits.
        plan: A plan (TOML) whose rules hold at all levels but O0, such as `halfstep doctor` writes.
        time_limit: Seconds for all trainings together; one that takes far more than its share is stopped and
            its row says so. Default: no limit; 240 for demo.
        report: Write an HTML report to this file.
        json: Print JSON instead of the table.
    """
    from halfstep import devices
    from halfstep.recipes.runs import TimeBudget, run_recipe

    order = _order(recipe, level, dtype, loss_scale, seeds, steps, epochs, _plan(plan))
    limit = _time_limit(time_limit, order.demo)
    check_report(report)
    set_threads(threads)
    where = computing_device(device)
    kept = where.type == "cpu" and devices.keep_freed_memory()
    jobs = [_job(one, order, where, data) for one in order.recipes]
    trainings = [len(job.settings) * order.seeds for job in jobs]
    budget = TimeBudget(limit, sum(trainings))
    with joined(where):
        quiet = json or rank() != 0
        with progress(
            "training", sum(job.steps * count for job, count in zip(jobs, trainings)), quiet=quiet
        ) as on_step:
            results: list[RecipeRows] = []
            for job in jobs:
                found = run_recipe(
                    job.recipe,
                    job.settings,
                    seeds=order.seeds,
                    steps=job.steps,
                    device=where,
                    folder=data,
                    rounds=12 if order.demo else 24,
                    on_step=on_step,
                    budget=budget,
                )
                results.append(found)
                if found.interrupted:
                    break
        interrupted = results[-1].interrupted
        if rank() == 0:
            ended = [found for found in results if found.rows]
            _show(Comparison(_machine(where, kept), ended), report, json)
    if interrupted:
        raise KeyboardInterrupt


def _show(document: Comparison, report: Path | None, json: bool) -> None:
    if report is not None:
        from halfstep.report import write_report

        write_report(document, report)
    if json:
        print_json(document.as_dict())
    else:
        _print(document, report)


@dataclass(frozen=True)
class _TrainOrder:
    """The command line, read and checked."""

    recipes: tuple[Recipe, ...]
    demo: bool
    levels: tuple[str, ...]
    dtypes: tuple[str, ...]
    scales: tuple[str | None, ...]
    seeds: int
    steps: int | None
    epochs: int | None
    plan: Plan | None


@dataclass(frozen=True)
class _RecipeJob:
    """One recipe's share of an order."""

    recipe: Recipe
    settings: tuple[TrainSetting, ...]
    steps: int


def _order(
    recipe: str,
    level: str | None,
    dtype: str | None,
    loss_scale: str,
    seeds: int | None,
    steps: int | None,
    epochs: int | None,
    plan: Plan | None,
) -> _TrainOrder:
    from halfstep.formats import dtype_name
    from halfstep.policy.levels import LEVELS, dtype_of, level_of
    from halfstep.recipes import RECIPES, recipe_of

    demo = recipe == "demo"
    names = tuple(RECIPES) if demo else tuple(_list(recipe, "recipe"))
    if "demo" in names:
        raise ConfigError(f"recipe list {recipe!r}: demo is all recipes, give it alone")
    if level is None:
        level = "O0,O1,O2,O3" if demo else "O0,O1"
    asked = _list(level, "level")
    words = [level_of(word) for word in asked if word != AUTO]
    names_of = [AUTO if word == AUTO else level_of(word)[0].name for word in asked]
    dtypes = [
        dtype_of(word)
        for word in _list(("bf16,fp16" if demo else "default") if dtype is None else dtype, "dtype")
        if word != "default"
    ]
    if dtypes and set(names_of) == {"O0"}:
        for chosen in dtypes:
            LEVELS["O0"].check_dtype(chosen)
        dtypes = []
    for chosen in dtypes:
        if chosen not in (torch.bfloat16, torch.float16):
            raise ConfigError(f"--dtype {dtype_name(chosen)}: expected bf16 or fp16 (fp32 is --level O0)")
    return _TrainOrder(
        recipes=tuple(recipe_of(name) for name in names),
        demo=demo,
        levels=tuple(dict.fromkeys(names_of)),
        dtypes=tuple(
            dict.fromkeys(dtype_name(d) for d in (*dtypes, *(d for _, d in words if d is not None)))
        ),
        scales=tuple(_scale(word) for word in _list(loss_scale, "loss scale")),
        seeds=_at_least_one("seeds", seeds if seeds is not None else (2 if demo else 1)),
        steps=None if steps is None else _at_least_one("steps", steps),
        epochs=None if epochs is None else _at_least_one("epochs", epochs),
        plan=plan,
    )


def _plan(file: Path | None) -> Plan | None:
    """The rules of a file; ConfigError where it holds a level as well, which only hs.prepare reads."""
    from halfstep.policy.plan import Plan

    plan = None if file is None else Plan.read(file)
    if plan is not None and plan.settings is not None:
        raise ConfigError(f"--plan {file}: it has [settings] of its own, expected [[rule]] tables alone")
    return plan


def _list(text: str, what: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(f"{what} list {text!r} has an empty entry; separate entries by single commas")
    return list(dict.fromkeys(words))


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"--{name} {value}: expected 1 or more")
    return value


_DEMO_SECONDS = 240.0


def _time_limit(seconds: float | None, demo: bool) -> float | None:
    if started_by_torchrun() > 1:
        # Ranks would run out of time at different steps and wait for each other: none has a limit.
        if seconds is not None:
            raise ConfigError(f"--time-limit {seconds:g} under torchrun: ranks stop together, drop it")
        return None
    if seconds is None:
        return _DEMO_SECONDS if demo else None
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--time-limit {seconds:g}: expected seconds above 0")
    return seconds


def _scale(word: str) -> str | None:
    if word in ("default", "dynamic", "headroom", "none"):
        return None if word == "default" else word
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise ConfigError(
            f"--loss-scale {word!r}: expected default, dynamic, headroom, none or a positive number "
            f"from {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}"
        )
    return word


def _job(recipe: Recipe, order: _TrainOrder, device: torch.device, data: str | None) -> _RecipeJob:
    from halfstep import devices
    from halfstep.formats import dtype_name
    from halfstep.recipes.runs import TrainSetting, tune_recipe

    if order.steps is not None and order.epochs is not None:
        raise ConfigError("--steps and --epochs were both given; choose one")
    dtypes = order.dtypes or (dtype_name(devices.default_dtype(device)),)
    settings: list[TrainSetting] = []
    for level in order.levels:
        if level == "O0":
            settings.append(TrainSetting("O0", None))
            continue
        if level == AUTO:
            print(f"tuning {recipe.name}", file=sys.stderr, flush=True)
            dtype = order.dtypes[0] if order.dtypes else None
            settings.append(TrainSetting.of(tune_recipe(recipe, device, dtype=dtype, folder=data)))
            continue
        for dtype in dtypes:
            devices.check_dtype(device, dtype)
            scales = recipe.scales if order.demo and recipe.scales and dtype == "fp16" else order.scales
            settings.extend(TrainSetting(level, dtype, scale, order.plan) for scale in scales)
    steps = order.steps or (recipe.demo_steps if order.demo else recipe.steps)
    if order.epochs is not None:
        steps = order.epochs * len(recipe.task(data).train(0))
    return _RecipeJob(recipe, tuple(settings), steps)


def _machine(device: torch.device, kept: bool) -> dict[str, Any]:
    from halfstep import __version__, devices

    facts = {
        "command": shlex.join(["halfstep", *sys.argv[1:]]),
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "halfstep": __version__,
        "torch": torch.__version__,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "freed_memory_kept": kept,
        **devices.machine(device),
    }
    slow = {}
    for name in ("bf16", "fp16"):
        found = devices.capability(device, name)
        if found.status == "slow":
            slow[name] = found.why
    return facts | {"slow": slow}


def _print(document: Comparison, report: Path | None) -> None:
    from rich.text import Text

    from halfstep.report.words import cells, columns, recommended, verdict

    out = console()
    for recipe in document.recipes:
        out.print(f"{recipe.name}: {verdict(recipe)}", style="bold", markup=False, soft_wrap=True)
        title = f"{recipe.name}: {recipe.about} ({recipe.data}, {recipe.trained})"
        heads = columns(recipe.metric)
        best = recommended(recipe)
        rows = [
            [Text(cell, "bold" if row is best else "") for cell in cells(row, recipe.metric, document.slow)]
            for row in recipe.rows
        ]
        out.print(table(title, heads, rows, ",".join(heads[1:])))
        for row in recipe.rows:
            if row.why:
                out.print(f"{row.label}: {row.why}", markup=False, highlight=False)
            if row.failed:
                out.print(f"{row.label} failed: {row.failed}", style="red", markup=False)
            if row.stopped:
                out.print(f"{row.label} {row.stopped}", style="red", markup=False)
            for message in dict.fromkeys(text for run in row.runs for text in run.warnings):
                out.print(f"{row.label}: {message}", style="yellow", markup=False)
    used = {row.dtype for recipe in document.recipes for row in recipe.rows}
    for name, why in ((n, w) for n, w in document.slow.items() if n in used):
        out.print(
            f"{name} is slow here ({why}): inputs and outputs are rounded to {name}, the arithmetic is fp32."
        )
    kept = document.machine["freed_memory_kept"]
    out.print(
        "peak: tensors alive during a step; saved: kept between forward and backward, parameters not counted"
        + ("; freed memory is kept for the next tensor (mallopt)." if kept else ".")
    )
    if report is not None:
        out.print(f"report: {report}")
