"""`halfstep train RECIPE`: train at several precisions and seeds, compare in one table, write a report."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.text import Text

from halfstep import __version__, devices
from halfstep.cli._options import Flag, check_report, computing_device, set_threads, with_metavar
from halfstep.cli._output import console, print_json, table
from halfstep.cli._progress import progress
from halfstep.distributed import joined, rank, started_by_torchrun
from halfstep.errors import ConfigError
from halfstep.formats import dtype_name
from halfstep.policy.levels import LEVELS, LOW_DTYPES, dtype_of, level_of
from halfstep.policy.plan import Plan
from halfstep.recipes import RECIPES, Recipe, recipe_of
from halfstep.recipes.runs import Pace, TrainSetting, run_recipe, seconds_of, tune_recipe
from halfstep.report import write_report
from halfstep.report.comparison import Comparison, RecipeRows
from halfstep.report.words import cells, columns, find_recommended, verdict
from halfstep.scaling.loss_scale import LARGEST_SCALE, SMALLEST_SCALE

AUTO = "auto"


def run(
    recipe: tyro.conf.Positional[Annotated[str, with_metavar("RECIPE")]],
    level: Annotated[str | None, with_metavar("LEVELS")] = None,
    dtype: Annotated[str | None, with_metavar("DTYPES")] = None,
    loss_scale: Annotated[str, with_metavar("SCALES")] = "default",
    seeds: Annotated[int | None, with_metavar("COUNT")] = None,
    steps: Annotated[int | None, with_metavar("COUNT")] = None,
    epochs: Annotated[int | None, with_metavar("COUNT")] = None,
    device: Annotated[str | None, with_metavar("DEVICE")] = None,
    threads: Annotated[int | None, with_metavar("COUNT")] = None,
    data: Annotated[str | None, with_metavar("FOLDER")] = None,
    plan: Annotated[Path | None, with_metavar("FILE")] = None,
    time_limit: Annotated[float | None, with_metavar("SECONDS")] = None,
    report: Annotated[Path | None, with_metavar("FILE")] = None,
    json: Flag = False,
) -> None:
    """Train a recipe at several precisions and compare them. Lists are separated by commas.

    Under torchrun the ranks share each batch (DistributedDataParallel), and the first one reports.

    Args:
        recipe: digits-mlp, digits-faint, digits-cnn, text-gpt, several separated by commas, or demo (all).
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
        time_limit: Seconds for all; the rows of a table are interleaved, and where time is short they end
            early at the same step. Default: no limit; 165 for demo.
        report: Write an HTML report to this file.
        json: Print JSON instead of the table.
    """
    demo = recipe == "demo"
    seeds = _at_least_one("seeds", seeds if seeds is not None else (2 if demo else 1))
    recipes = _recipes(recipe)
    precisions = _Precisions.read(level, dtype, loss_scale, plan, demo)
    limit = _time_limit(time_limit, demo)
    check_report(report)
    set_threads(threads)
    where = computing_device(device)
    memory_kept = where.type == "cpu" and devices.keep_freed_memory()
    lengths = [_steps(each_recipe, steps, epochs, data, demo) for each_recipe in recipes]
    jobs = [
        (each_recipe, precisions.settings(each_recipe, where, data), length)
        for each_recipe, length in zip(recipes, lengths)
    ]
    with joined(where):
        quiet = json or rank() != 0
        pace = Pace(None, [1.0] * len(jobs))
        if limit is not None:
            with progress("timing a few steps", quiet):
                pace = _time_jobs(jobs, seeds, limit, where, data, may_change_threads=threads is None)
            if not quiet:
                count = torch.get_num_threads()
                print(f"computing on {count} thread{'s' if count > 1 else ''}", file=sys.stderr)
        document = Comparison(_machine(where, memory_kept), results := list[RecipeRows]())
        interrupted = False
        for each_recipe, settings, length in jobs:
            with progress(f"training {each_recipe.name}", quiet) as on_step:
                result = run_recipe(
                    each_recipe,
                    settings,
                    seeds=seeds,
                    steps=length,
                    device=where,
                    folder=data,
                    rounds=12 if demo else 24,
                    on_step=on_step,
                    pace=pace,
                )
            if result.rows:
                results.append(result)
                if not quiet:
                    _print_table(result, document.slow)
            interrupted = result.interrupted
            if interrupted:
                break
        if rank() == 0:
            if report is not None:
                write_report(document, report)
            if json:
                print_json(document.as_dict())
            else:
                _print_remarks(document, limit, report)
    if interrupted:
        raise KeyboardInterrupt


_Jobs = Sequence[tuple[Recipe, list[TrainSetting], int]]
"""Of each recipe the settings and the steps to train."""


def _time_jobs(
    jobs: _Jobs, seeds: int, limit: float, device: torch.device, data: str | None, may_change_threads: bool
) -> Pace:
    """Time a few steps of each recipe; return when each is to end.

    Threads wait for each other at every op. Beside other work one thread may be many times faster than all of
    them: then one is used from here on.
    """
    began, count = time.monotonic(), torch.get_num_threads()
    times: dict[int, list[float]] = {}
    for threads in {count, 1} if may_change_threads and device.type == "cpu" else {count}:
        torch.set_num_threads(threads)
        times[threads] = [seconds_of(*job[:2], seeds, job[2], device, data) for job in jobs]
    best = min(times, key=lambda threads: sum(times[threads]))
    torch.set_num_threads(best)
    return Pace(limit - (time.monotonic() - began), times[best])


def _recipes(names: str) -> list[Recipe]:
    listed = list(RECIPES) if names == "demo" else _list(names, "recipe")
    if "demo" in listed:
        raise ConfigError(f"recipe list {names!r}: demo is all recipes, give it alone")
    return [recipe_of(name) for name in listed]


def _steps(recipe: Recipe, steps: int | None, epochs: int | None, data: str | None, demo: bool) -> int:
    if steps is not None and epochs is not None:
        raise ConfigError("--steps and --epochs were both given; choose one")
    if epochs is not None:
        return _at_least_one("epochs", epochs) * len(recipe.task(data).train(0))
    if steps is not None:
        return _at_least_one("steps", steps)
    return recipe.demo_steps if demo else recipe.steps


@dataclass(frozen=True)
class _Precisions:
    """Levels, dtypes and loss scales to compare, read from the command line."""

    levels: list[str]
    dtypes: list[str]
    scales: list[str | None]
    plan: Plan | None
    demo: bool

    @classmethod
    def read(
        cls, level: str | None, dtype: str | None, loss_scale: str, plan: Path | None, demo: bool
    ) -> _Precisions:
        level_words = _list(("O0,O1,O2,O3" if demo else "O0,O1") if level is None else level, "level")
        words = {word: level_of(word) for word in level_words if word != AUTO}
        levels = list(dict.fromkeys(words[word][0].name if word in words else AUTO for word in level_words))
        named = _list(("bf16,fp16" if demo else "default") if dtype is None else dtype, "dtype")
        dtypes = [dtype_of(word) for word in named if word != "default"]
        if levels == ["O0"]:
            for chosen in dtypes:
                LEVELS["O0"].check_dtype(chosen)
            dtypes = []
        for chosen in dtypes:
            if chosen not in LOW_DTYPES:
                raise ConfigError(f"--dtype {dtype_name(chosen)}: expected bf16 or fp16 (fp32 is --level O0)")
        dtypes += [low for _, low in words.values() if low is not None]
        return cls(
            levels,
            list(dict.fromkeys(map(dtype_name, dtypes))),
            [_scale(word) for word in _list(loss_scale, "loss scale")],
            _plan(plan),
            demo,
        )

    def settings(self, recipe: Recipe, device: torch.device, data: str | None) -> list[TrainSetting]:
        """Return what one recipe is trained at; level auto is measured now."""
        settings: list[TrainSetting] = []
        for level in self.levels:
            if level == "O0":
                settings.append(TrainSetting("O0", None))
                continue
            if level == AUTO:
                print(f"tuning {recipe.name}", file=sys.stderr, flush=True)
                first = next(iter(self.dtypes), None)
                tuned = tune_recipe(recipe, device, dtype=first, folder=data)
                settings.append(TrainSetting(tuned.choice.level, tuned.choice.dtype, plan=tuned.plan))
                continue
            for dtype in self.dtypes or [dtype_name(devices.default_dtype(device))]:
                devices.check_dtype(device, dtype)
                scales = recipe.scales if self.demo and recipe.scales and dtype == "fp16" else self.scales
                settings.extend(TrainSetting(level, dtype, scale, self.plan) for scale in scales)
        return settings


def _plan(file: Path | None) -> Plan | None:
    """Return the rules of a file; ConfigError where it holds a level as well, which only hs.prepare reads."""
    plan = None if file is None else Plan.read(file)
    if plan is not None and plan.settings is not None:
        raise ConfigError(
            f"--plan {file}: its [settings], as `halfstep tune` writes them, are for hs.prepare(plan=...); "
            "here --level and --dtype say them: give a plan of [[rule]] tables alone"
        )
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


_DEMO_SECONDS = 165.0


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


def _machine(device: torch.device, memory_kept: bool) -> dict[str, Any]:
    facts = {
        "command": shlex.join(["halfstep", *sys.argv[1:]]),
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "halfstep": __version__,
        "torch": torch.__version__,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "freed_memory_kept": memory_kept,
        **devices.machine(device),
    }
    capabilities = {name: devices.capability(device, name) for name in ("bf16", "fp16")}
    return facts | {"slow": {name: c.why for name, c in capabilities.items() if c.status == "slow"}}


def _print_table(recipe: RecipeRows, slow: Mapping[str, str]) -> None:
    out = console()
    out.print(f"{recipe.name}: {verdict(recipe)}", style="bold", markup=False, soft_wrap=True)
    title = f"{recipe.name}: {recipe.about} ({recipe.data}, {recipe.trained})"
    heads = columns(recipe.metric)
    best = find_recommended(recipe)
    rows = [
        [Text(cell, "bold" if row is best else "") for cell in cells(row, recipe.metric, slow)]
        for row in recipe.rows
    ]
    out.print(table(title, heads, rows, ",".join(heads[1:])))
    for row in recipe.rows:
        remarks = [(f": {row.why}", "")] if row.why else []
        remarks += [(f" failed: {row.failed}", "red")] if row.failed else []
        remarks += [(f": {text}", "yellow") for run in row.runs for text in run.warnings]
        for text, style in dict.fromkeys(remarks):
            out.print(row.label + text, style=style, markup=False)


def _print_remarks(document: Comparison, limit: float | None, report: Path | None) -> None:
    out = console()
    used = {row.dtype for recipe in document.recipes for row in recipe.rows}
    for name, why in ((n, w) for n, w in document.slow.items() if n in used):
        out.print(
            f"{name} is slow here ({why}): inputs and outputs are rounded to {name}, the arithmetic is fp32."
        )
    if any(recipe.shortened for recipe in document.recipes):
        out.print(
            f"Trainings were shortened to end within {limit:g} s; --time-limit SECONDS gives them more."
        )
    memory_kept = document.machine["freed_memory_kept"]
    out.print(
        "peak: tensors alive during a step; saved: kept between forward and backward, parameters not counted"
        + ("; freed memory is kept for the next tensor (mallopt)." if memory_kept else ".")
    )
    if report is not None:
        out.print(f"report: {report}")
