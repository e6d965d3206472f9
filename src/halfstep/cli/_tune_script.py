"""`halfstep tune SCRIPT.py`: the script runs a few steps under each choice, in processes of its own.

The script is not changed: inside such a process `prepare` takes the choice's level, dtype and layout instead
of the script's, and everything ends after the last step that is timed. Runs take turns. Precision by module
is not tried, since a script's step cannot be taken again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from halfstep.cli._progress import Tell
from halfstep.cli._tune_in_script import TuneOrder, too_long
from halfstep.doctor.process import started
from halfstep.errors import ConfigError
from halfstep.formats import dtype_name, parse_dtype
from halfstep.tuning.choices import LevelChoice, Trial, decide, distance
from halfstep.tuning.search import NEAR, Tuning

#: Steps of one run: the first ones warm up and are compared, the others are timed.
STEPS, WARM = 8, 3

#: Seconds that a script may take to its first step's end, and a step under way when the time is over; between
#: two looks at it.
START, LAST_STEP, WATCH = 900.0, 30.0, 0.05

#: Times that every choice takes its turn.
TURNS = 3


def _untold(name: str) -> None:
    """Where nobody watches."""


def tune_script(
    path: Path, args: Sequence[str], dtype: str | None, seconds: float, tell: Tell = _untold
) -> Tuning:
    """Run the script under O0, O1, O2 and channels_last for the fastest, and decide; each run is told.

    Raises:
        ConfigError: no such script, it never calls `hs.prepare`, takes too few steps, or fails in fp32.
    """
    if not path.is_file():
        raise ConfigError(f"no script {path}; expected a recipe or the path of a .py file")
    began = time.perf_counter()
    runs = _Runs(path, args, seconds, tell)
    base = runs.trial(LevelChoice("O0"))
    if base.failed is not None:
        raise ConfigError(f"{path} cannot be tuned: {base.failed}")
    low = runs.dtype if dtype is None else dtype_name(parse_dtype(dtype))
    trials = [base, *(runs.trial(LevelChoice(level, low)) for level in ("O1", "O2"))]
    if runs.has_convolutions:
        for one in sorted((t for t in trials if t.seconds), key=lambda t: t.time)[:2]:
            trials.append(runs.trial(replace(one.choice, layout="channels_last")))
    best = min(t.time for t in trials)
    for turn in range(2, TURNS + 1):
        for index, trial in enumerate(trials):
            if index == 0 or trial.time <= NEAR * best:
                again = runs.trial(trial.choice, turn)
                trials[index] = replace(trial, seconds=(*trial.seconds, *again.seconds))
    return Tuning(tuple(trials), decide(trials), time.perf_counter() - began)


class _Runs:
    """Runs of one script; the first, in fp32, is what the others are compared with."""

    def __init__(self, path: Path, args: Sequence[str], seconds: float, tell: Tell = _untold) -> None:
        self.path, self.args, self.seconds, self.tell = path, list(args), seconds, tell
        self.dtype, self.has_convolutions = "bf16", False
        self._base: dict[str, Any] | None = None

    def trial(self, choice: LevelChoice, turn: int = 1) -> Trial:
        """Run the script under a choice."""
        self.tell(f"under {choice.label}, turn {turn} of at most {TURNS}")
        found = self._child(choice)
        if found["failed"] is not None:
            return Trial(choice, failed=found["failed"])
        if self._base is None:
            self._base = found
            self.dtype, self.has_convolutions = found["dtype"], found["convolutions"]
        errors = distance(found["loss"], found["gradients"], self._base["loss"], self._base["gradients"])
        return Trial(choice, (median(found["seconds"]),), *errors)

    def _child(self, choice: LevelChoice) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            result, begun = folder / "found", folder / "begun"
            order = TuneOrder(
                str(self.path), tuple(self.args), choice, STEPS, WARM, self.seconds, str(begun), str(result)
            )
            with (folder / "errors").open("w+") as errors:
                child = started(order, errors, os.environ)
                try:
                    late = _late(child, begun, self.seconds)
                finally:
                    child.kill()
                    child.wait()
                if result.exists():
                    return pickle.loads(result.read_bytes())
                errors.seek(0)
                return {"failed": late or (errors.read().strip().splitlines() or ["no message"])[-1]}


def _late(child: subprocess.Popen[bytes], begun: Path, seconds: float) -> str | None:
    """Wait for the child; why it was given up, or None where it ended.

    Its start (imports, data, kernels that compile) is no part of the seconds.
    """
    started = time.perf_counter()
    while not begun.exists():
        if time.perf_counter() - started > START:
            return f"it took no step in {START:.0f} s"
        if _ended(child, WATCH):
            return None
    return None if _ended(child, seconds + LAST_STEP) else too_long(STEPS, seconds)


def _ended(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
