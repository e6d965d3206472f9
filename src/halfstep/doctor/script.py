"""The doctor's way with a script: run it watched in a process of its own, then with the tape armed.

The script is not changed. A step ends where a Session, a GradScaler or an optimizer is stepped. The second
run repeats the first (same seeds), and the tape is on for one step of it: the first bad one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError


def examine_script(path: Path, args: Sequence[str], steps: int, seed: int) -> dict[str, Any]:
    """Runs the script twice and returns the doctor's document.

    Raises:
        ConfigError: no such script, it is not Python, it fails before its first step, or never trains.
    """
    from halfstep.numerics.lint import lint_source

    if not path.is_file():
        raise ConfigError(f"no script {path}; expected a recipe or the path of a .py file")
    try:
        findings = lint_source(path.read_text(encoding="utf-8"), path.name)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a Python script: {error}") from error
    watched = _child(order_for(path, args, steps, seed, None))
    if watched["steps"] == 0:
        why = watched["error"] or "it ended without stepping an optimizer, GradScaler or Session"
        raise ConfigError(f"{path} took no training step: {why}")
    armed = watched["first_bad"]
    notes = []
    if armed is None:
        armed = min(1, watched["steps"] - 1)
    traced = _child(order_for(path, args, armed + 1, seed, armed))
    document = traced["document"] or watched["document"]
    for bad in document["bad"][:1]:
        _try_cures(bad, path, args, armed, seed)
    if traced["document"] is None:
        notes.append("the traced run did not reach that step: the script is not deterministic")
    elif watched["first_bad"] is not None and not document["bad"]:
        notes.append(
            f"step {armed + 1} was bad in the first run and not when it was traced: nondeterminism, or a "
            "compiled region that differs from eager"
        )
    return _merged(path, watched, document, findings, notes)


def _merged(
    path: Path, watched: dict[str, Any], traced: dict[str, Any], findings: Sequence[Any], notes: Sequence[str]
) -> dict[str, Any]:
    from halfstep.doctor.document import verdict_of

    document = dict(watched["document"])
    document["target"] = path.name
    document["steps"] = watched["steps"]
    document["bad"], document["counts"] = traced["bad"], traced["counts"]
    document["lint"] = [*(f.__dict__ for f in findings), *traced["lint"]]
    document["notes"], document["error"] = list(notes), watched["error"]
    for bad in document["bad"]:
        bad["harmless"] = _is_harmless(bad, watched)
    serious = [b for b in document["bad"] if not b["harmless"]]
    ill = bool(serious) or bool(document["lint"]) or bool(watched["error"])
    document["healthy"] = not ill and (watched["first_bad"] is None or bool(document["bad"]))
    document["verdict"] = verdict_of(document)
    return document


def _try_cures(bad: dict[str, Any], path: Path, args: Sequence[str], armed: int, seed: int) -> None:
    """Runs the script again with each cure in place for the bad step, and writes down whether it helped."""
    for cure in bad["cures"]:
        for spec in cure["specs"]:
            cured = _child(order_for(path, args, armed + 1, seed, armed, tuple(spec)))
            helped = cured["document"] is not None and not cured["document"]["bad"] and not cured["error"]
            if cured["applied"]:
                cure["status"] = "works" if helped else "does not help"
            if helped:
                break


def _is_harmless(bad: dict[str, Any], watched: dict[str, Any]) -> bool:
    """A backward overflow that a dynamic loss scale skipped: few of them, and nothing lasting spoiled."""
    lowered = any(c["kind"] == "loss_scale" for c in bad["cures"])
    few = watched["skips"] <= max(3, watched["steps"] // 4)
    return bad["phase"] == "backward" and lowered and few and not bad["spoiled_lasting"]


def order_for(
    path: Path,
    args: Sequence[str],
    steps: int,
    seed: int,
    armed: int | None,
    cure: tuple[Any, ...] | None = None,
) -> dict[str, Any]:
    """What the process that runs the script is told; `armed` is the step to tape, `cure` to try, if any."""
    order = {"script": str(path), "args": list(args), "steps": steps, "seed": seed}
    return order | {"armed": armed, "cure": cure}


def _child(order: dict[str, Any]) -> dict[str, Any]:
    """One run of the script in a process of its own; what it found comes back through a file."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found"
        orders = Path(folder) / "orders"
        orders.write_bytes(pickle.dumps(order | {"result": str(result)}))
        command = [sys.executable, "-m", "halfstep.doctor.in_script", str(orders)]
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ, text=True
        )
        if not result.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ConfigError(f"{order['script']} could not be run: {last}")
        return pickle.loads(result.read_bytes())
