"""`halfstep tune RECIPE | SCRIPT.py`: measure what trains it fastest here, print it, write the plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import tyro

from halfstep import devices
from halfstep.cli import _tune_script
from halfstep.cli._options import Flag, check_report, computing_device, set_threads, with_metavar
from halfstep.cli._output import console, print_json, table
from halfstep.cli._progress import progress
from halfstep.errors import ConfigError
from halfstep.ratios import number, speed_in_words
from halfstep.recipes import recipe_of, runs
from halfstep.tuning.choices import Trial
from halfstep.tuning.search import Tuning


def run(
    target: tyro.conf.Positional[Annotated[str, with_metavar("RECIPE|SCRIPT.py")]],
    args: tyro.conf.Positional[Annotated[tuple[str, ...], with_metavar("[ARGUMENT ...]")]] = (),
    dtype: Annotated[str | None, with_metavar("DTYPE")] = None,
    out: Annotated[Path | None, with_metavar("FILE")] = None,
    seconds: Annotated[float, with_metavar("SECONDS")] = 60.0,
    device: Annotated[str | None, with_metavar("DEVICE")] = None,
    threads: Annotated[int | None, with_metavar("COUNT")] = None,
    compile: Flag = False,
    json: Flag = False,
) -> None:
    """Measure which level, layout and plan by module train fastest on this machine.

    A script that does not use halfstep is tried too, 40 steps as it is and in bf16 and fp16: loss, time
    and memory are printed side by side, and the lines to write.

    Args:
        target: A recipe (digits-mlp, text-gpt ...) or a training script ending in .py.
        args: The script's own arguments, after `--`.
        dtype: 16-bit dtype to try: bf16 or fp16. Default: what the device prefers, or both for a script
            without halfstep.
        out: Write the plan to this TOML file, for hs.prepare(plan=...).
        seconds: Measure a recipe no longer than this; of a script, each run, from its first step on.
        device: cpu, cuda, ... for a recipe. Default: the accelerator if there is one.
        threads: CPU threads of torch for a recipe. Default: torch's own.
        compile: Also try model.compile() for the two fastest levels of a recipe, while --seconds allow.
        json: Print JSON instead of the table.
    """
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--seconds {seconds:g}: expected seconds above 0")
    if dtype not in (None, "bf16", "fp16"):
        raise ConfigError(f"--dtype {dtype}: expected bf16 or fp16")
    if compile and target.endswith(".py"):
        raise ConfigError(f"--compile is for recipes: {target} decides itself what it compiles")
    check_report(out, "--out")
    with progress(f"tuning {target}", quiet=json) as report:
        if target.endswith(".py"):
            tuning = _tune_script.tune_script(Path(target), args, dtype, seconds, report)
        else:
            if args:
                raise ConfigError(
                    f"{target} is a recipe and takes no arguments of its own, given {args[0]!r}"
                )
            recipe = recipe_of(target)
            set_threads(threads)
            where = computing_device(device)
            if where.type == "cpu":
                devices.keep_freed_memory()
            tuning = runs.tune_recipe(recipe, where, dtype=dtype, seconds=seconds, compile=compile)
    if tuning.interrupted:
        out = None  # no plan from half of the measurements
    if out is not None:
        out.write_text(tuning.to_toml(), encoding="utf-8")
    if json:
        print_json(_document(target, tuning))
    else:
        _print(target, tuning, out)
    if tuning.interrupted:
        raise KeyboardInterrupt


def _document(target: str, tuning: Tuning) -> dict[str, Any]:
    settings = tuning.plan.settings
    assert settings is not None
    return {
        "target": target,
        "chosen": settings.to_table(),
        "measured": [
            vars(row) | {"loss": loss, "peak_bytes": trial.peak_bytes, "skipped": trial.skipped}
            for row, loss, trial in zip(settings.measured, last_losses(tuning.trials), tuning.trials)
        ],
        "rules": [{"pattern": rule.pattern, "reason": rule.reason} for rule in tuning.plan.rules],
        "lines": _lines(tuning),
        "seconds": tuning.seconds,
    }


def last_losses(trials: Sequence[Trial]) -> list[float | None]:
    """The mean of each trial's losses over the last quarter of those that all have; None without any."""
    count = min((len(trial.losses) for trial in trials if trial.losses), default=0)
    last = slice(count - max(1, count // 4), count)
    return [mean(trial.losses[last]) if trial.losses else None for trial in trials]


def _print(target: str, tuning: Tuning, out: Path | None) -> None:
    settings = tuning.plan.settings
    assert settings is not None
    base, lines, rows = settings.measured[0].milliseconds, _lines(tuning), list[list[str]]()
    for row, loss, trial in zip(settings.measured, last_losses(tuning.trials), tuning.trials):
        compared = "" if row.milliseconds is None or not base else speed_in_words(row.milliseconds / base)
        step, error = number(row.milliseconds, "{:,.4g} ms"), number(row.gradient_error, "{:.2g}")
        skipped = f"steps skipped on inf or NaN gradients: {trial.skipped}" if trial.skipped else ""
        of_script = [number(loss, "{:.5g}"), number(trial.peak_bytes, "{:,.4g} MB", 1e-6)] if lines else []
        rows.append([row.setting, *of_script, step, compared, error, row.note or skipped])
    heads = [*(["loss", "peak memory"] if lines else []), "step", "against fp32", "gradient error"]
    terminal = console()
    title = f"{target}: what trains it fastest here"
    terminal.print(table(title, ["setting", *heads, ""], rows, ",".join(heads)))
    chosen = "fastest so far, of what was measured" if tuning.interrupted else "chosen"
    terminal.print(f"{chosen}: {settings.reason}", markup=False, highlight=False)
    for rule in tuning.plan.rules:
        terminal.print(f"  {rule.pattern}: {rule.reason}", markup=False, highlight=False)
    if lines:
        terminal.print(lines, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        terminal.print(f"plan: {out}", markup=False, soft_wrap=True)


def _lines(tuning: Tuning) -> str | None:
    """What to write into a script without halfstep for the fastest 16-bit setting; None for any other."""
    if not tuning.trials[0].losses:
        return None
    usable = [t for t in tuning.trials[1:] if t.usable]
    if not usable:
        return "loss: the mean of the last quarter of all losses"
    dtype, base = min(usable, key=lambda trial: trial.time).choice.dtype, tuning.trials[0]
    anyway = "" if tuning.choice.dtype else " all the same (for its memory, or on another machine)"
    return f"""loss: the mean of the last quarter of {len(base.losses)} losses
to train in {dtype}{anyway}, import halfstep as hs and write:
{_code(str(dtype), base.uses)}"""


def _code(dtype: str, uses: Collection[str]) -> str:
    """The lines for a script that uses these things of torch, each with its place; they do what was tried."""
    several, clips = "several optimizers" in uses, "clip_grad_norm_" in uses
    names, where, each = "model, optimizer", "once both are made", list[str]()
    if several:
        names, where, each = "models, optimizers", "lists of them all", ["optimizer"]
    clip, in_place = (["clip_norm=max_norm"], ", clip_grad_norm_") if clips else ([], "")
    lines = [
        (f'amp = hs.prepare({names}, level="O1", dtype="{dtype}")', where),
        ("with amp.autocast():", "around each call of a model"),
        ("    output = model(input)", ""),
        ("loss = loss_of(output.float())", "outside, from fp32 outputs"),
        (f"amp.backward({', '.join(['loss', *each])})", "in place of loss.backward()"),
        (f"amp.step({', '.join([*each, *clip])})", f"in place of optimizer.step(){in_place}, zero_grad()"),
    ]
    if several:
        lines.insert(5, ("", "(optimizer: the one, or a list of those, that the loss trains)"))
    if "clip_grad_value_" in uses:
        lines.insert(-1, (f"amp.unscale({', '.join(each)})", "before clip_grad_value_"))
    if "GradScaler" in uses:
        lines.append(("", "without the script's own GradScaler: amp scales the loss itself"))
    return "\n".join(f"  {code:<64}{place and '# '}{place}".rstrip() for code, place in lines)
