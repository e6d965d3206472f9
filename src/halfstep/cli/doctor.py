"""`halfstep doctor RECIPE | SCRIPT.py`: run some steps watched, describe the numbers, write a report."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from halfstep.cli._options import Flag, check_report, computing_device, with_metavar
from halfstep.cli._output import clean, console, print_json, table
from halfstep.distributed import joined, rank, started_by_torchrun
from halfstep.doctor.document import INTERRUPT, Document
from halfstep.doctor.process import can_copy
from halfstep.doctor.script import examine_script
from halfstep.errors import ConfigError
from halfstep.formats import parse_dtype
from halfstep.policy.levels import level_of
from halfstep.recipes import as_script, recipe_of
from halfstep.report.doctor import write_doctor
from halfstep_command import INTERRUPTED

FAULT = 1


def run(
    target: tyro.conf.Positional[Annotated[str, with_metavar("RECIPE|SCRIPT.py")]],
    args: tyro.conf.Positional[Annotated[tuple[str, ...], with_metavar("[ARGUMENT ...]")]] = (),
    level: Annotated[str, with_metavar("LEVEL")] = "O1",
    dtype: Annotated[str | None, with_metavar("DTYPE")] = None,
    loss_scale: Annotated[str | None, with_metavar("SCALE")] = None,
    steps: Annotated[int, with_metavar("COUNT")] = 40,
    seed: Annotated[int, with_metavar("NUMBER")] = 0,
    device: Annotated[str | None, with_metavar("DEVICE")] = None,
    report: Annotated[Path | None, with_metavar("FILE")] = None,
    diff: Flag = False,
    write_plan: Annotated[Path | None, with_metavar("FILE")] = None,
    json: Flag = False,
    module: Annotated[Flag, tyro.conf.arg(aliases=["-m"])] = False,
    exit_zero: Flag = False,
) -> int:
    """Run some steps under watch and name what goes wrong: exit code 0 when nothing does, else 1.

    Under torchrun a script is examined on all ranks together, and the first one gives the one verdict.

    Args:
        target: A recipe (digits-mlp, text-gpt ...) or a training script ending in .py.
        args: The script's own arguments, after `--`.
        level: Precision level of a recipe: O0, O1, O2, O3. A script chooses its own.
        dtype: 16-bit dtype of a recipe: bf16 or fp16. Default: what the device prefers.
        loss_scale: Loss scale of a recipe: dynamic, headroom, none or a number. Default: the level's.
        steps: Training steps to watch; 0 follows a script to its end. Ctrl-C tells what was seen until then.
        seed: Seed of the recipe, or of a script's random generators.
        device: cpu, cuda, ... for a recipe. Default: the accelerator if there is one.
        report: Write the HTML report to this file.
        diff: Print a unified diff that writes the cures into the script; the verdict goes to standard error.
        write_plan: Write the cures that a plan can say to this TOML file, for hs.prepare(plan=...).
        json: Print JSON instead of the verdict.
        module: What is given is the name of a module, package.module, to be run as `python -m` does.
        exit_zero: Exit with code 0 also where something is wrong; torchrun takes another for a crash.
    """
    if steps < 0:
        raise ConfigError(f"--steps {steps}: expected 1 or more, or 0 for all steps that a script takes")
    if target.endswith(".ipynb"):
        raise ConfigError(
            f"{target} is a notebook, expected a script: `jupyter nbconvert --to script {target}` writes "
            "one; in the notebook itself hs.doctor.examine(step, x, y) examines a step"
        )
    check_report(report)
    check_report(write_plan, "--write-plan")
    if module or target.endswith(".py"):
        path = _file_of(target) if module else Path(target)
        name = target if module else ""
        name += ".__main__" if module and path.stem != target.rpartition(".")[2] else ""
        document = _examine_script(path, args, steps, seed, diff, write_plan is not None, name)
        if document is None:
            return 0
    else:
        if started_by_torchrun() > 1:
            raise ConfigError(f"{target} is a recipe, which one process examines: start it without torchrun")
        if args:
            raise ConfigError(f"{target} is a recipe and takes no arguments of its own, given {args[0]!r}")
        if diff or write_plan is not None:
            raise ConfigError(f"{target} is a recipe: --diff and --write-plan expect a script, ending in .py")
        if steps == 0:
            raise ConfigError(
                f"--steps 0: {target} is a recipe, which trains without end; expected 1 or more"
            )
        where = computing_device(device)
        document = _examine_recipe(recipe_of(target).name, level, dtype, loss_scale, steps, seed, where)
    if report is not None:
        write_doctor(document.as_dict(), report)
    if write_plan is not None and document.plan:
        write_plan.write_text(document.plan, encoding="utf-8")
        document.notes.append(f"plan: {write_plan}")
    if json:
        print_json(document.as_dict())
    else:
        _print(document, report, console(stderr=diff))
        sys.stdout.write(document.diff)
    if document.ended_by == INTERRUPT:
        return INTERRUPTED
    return 0 if document.healthy or exit_zero else FAULT


def _file_of(name: str) -> Path:
    """Return the file that `python -m name` runs, found without importing what it belongs to."""
    path = Path(*name.split("."))
    files = [path.with_suffix(".py"), path / "__main__.py"]
    found = (root / file for root in map(Path, ["", *sys.path]) for file in files if (root / file).is_file())
    if (file := next(found, None)) is None:
        raise ConfigError(
            f"-m {name}: no {files[0]} or {files[1]} here or on sys.path; expected a module, as for python -m"
        )
    return file


def _examine_script(
    path: Path, args: Sequence[str], steps: int, seed: int, diff: bool, plan: bool, module: str
) -> Document | None:
    """Return what all ranks of torchrun found, on rank 0; None on the others, which have nothing to say."""
    with joined(torch.device("cpu")):
        try:
            document = examine_script(
                path, args, steps, seed, forked=can_copy(), diff=diff, plan=plan, module=module
            )
        except ConfigError:
            if rank() == 0:
                raise
            return None
        return document if rank() == 0 else None


def _examine_recipe(
    name: str, level: str, dtype: str | None, scale: str | None, steps: int, seed: int, where: torch.device
) -> Document:
    """Examines the recipe's training as any script."""
    row = level_of(level)[0]
    if dtype is not None:
        parse_dtype(dtype)
    args = (name, level, dtype or "", scale or "", str(seed), str(where))
    document = examine_script(Path(as_script.__file__), args, steps, seed, forked=can_copy(), label=name)
    document.ended_by = ""  # no recipe ends by itself
    document.target = f"{name} {row.name}" + ("" if row.name == "O0" else f" {document.format}")
    return document


def _print(document: Document, report: Path | None, out: Any) -> None:
    for line in document.verdict:
        out.print(clean(line), markup=False, highlight=False, soft_wrap=True)
    if document.audit:
        out.print(clean(f"audit:\n{document.audit}"), markup=False, highlight=False, soft_wrap=True)
    rows = _dtypes(document.counts)
    if rows:
        out.print(table("", ("dtype", "ops that ran in it, most frequent first"), rows))
    for note in document.notes:
        out.print(clean(note), markup=False)
    if report is not None:
        out.print(f"report: {report}", markup=False, soft_wrap=True)


def _dtypes(counts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    by_dtype: dict[str, Counter[str]] = {}
    for row in counts:
        by_dtype.setdefault(row["dtype"], Counter())[row["op"]] += row["count"]
    lines = []
    for dtype, ops in sorted(by_dtype.items()):
        shown = ", ".join(f"{op} {n}" for op, n in ops.most_common(8))
        lines.append((dtype, shown + (f" and {len(ops) - 8} more" if len(ops) > 8 else "")))
    return lines
