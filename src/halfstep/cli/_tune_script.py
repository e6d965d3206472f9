"""`halfstep tune SCRIPT.py`: the script runs a few steps under each choice, in processes of its own.

The script is not changed: inside such a process `prepare` takes the choice's level, dtype and layout instead
of the script's, and everything ends after the last step that is timed. A script that never calls `prepare` is
tried at O1 (`_foreign_script.py`). Runs take turns. Precision by module is not tried, since a script's step
cannot be taken again.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import halfstep
from halfstep.cli._foreign_script import ForeignScript
from halfstep.cli._progress import Tell
from halfstep.convert.layout import convolution_weights
from halfstep.doctor.process import Enough, in_words, run_in_process, run_main, seed
from halfstep.errors import ConfigError
from halfstep.formats import dtype_name, parse_dtype
from halfstep.recipes.measure import memory_peak
from halfstep.session.prepare import arguments_of
from halfstep.session.session import Session
from halfstep.trainer import loop
from halfstep.tuning.choices import LevelChoice, Trial, decide, distance
from halfstep.tuning.engine import clock_of
from halfstep.tuning.search import NEAR, Tuning

#: Steps of one run: the first ones warm up and are compared, the others are timed.
STEPS, WARM = 8, 3

#: Steps of a script that does not use halfstep, whose losses are compared as well.
FOREIGN_STEPS = 40

#: Seconds that a script may take to its first step's end, and a step under way when the time is over; between
#: two looks at it.
START, LAST_STEP, WATCH = 900.0, 30.0, 0.05

#: Times that every choice takes its turn.
TURNS = 3


def tune_script(
    path: Path, args: Sequence[str], dtype: str | None, seconds: float, tell: Tell = lambda name: None
) -> Tuning:
    """Run the script under O0, O1, O2 and channels_last for the fastest, and decide; each run is told.

    One that never calls `hs.prepare` runs as it is and at O1 in bf16 and fp16 (or `dtype`).

    Raises:
        ConfigError: no such script, it cannot be tried, takes too few steps, or fails in fp32.
    """
    if not path.is_file():
        raise ConfigError(f"no script {path}; expected a recipe or the path of a .py file")
    began = time.perf_counter()
    runs = _Runs(path, args, seconds, tell)
    base = runs.trial(LevelChoice("O0"))
    if base.failed is not None:
        raise ConfigError(f"{path} cannot be tuned: {base.failed}")
    low = runs.dtype if dtype is None else dtype_name(parse_dtype(dtype))
    if runs.foreign:
        choices = [LevelChoice("O1", name) for name in (("bf16", "fp16") if dtype is None else (low,))]
    else:
        choices = [LevelChoice(level, low) for level in ("O1", "O2")]
    trials = [base, *map(runs.trial, choices)]
    if not runs.foreign and runs.has_convolutions:
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

    def __init__(self, path: Path, args: Sequence[str], seconds: float, tell: Tell) -> None:
        self.path, self.args, self.seconds, self.tell = path, list(args), seconds, tell
        self.dtype, self.has_convolutions = "bf16", False
        self.foreign: bool | None = None  # whether it never calls hs.prepare; None before the first run
        self._base: dict[str, Any] | None = None

    def trial(self, choice: LevelChoice, turn: int = 1) -> Trial:
        """Run the script under a choice."""
        self.tell(f"under {choice.label}, turn {turn} of at most {TURNS}")
        found = self._child(choice)
        if found["failed"] is not None:
            return Trial(choice, failed=found["failed"])
        if self._base is None:
            self._base = found
            self.foreign = found.get("losses") is not None
            self.dtype, self.has_convolutions = found.get("dtype", "bf16"), found.get("convolutions", False)
        errors = distance(found["loss"], found["gradients"], self._base["loss"], self._base["gradients"])
        more = {key: found[key] for key in ("losses", "peak_bytes", "skipped", "uses") if key in found}
        return Trial(choice, (median(found["seconds"]),), *errors, **more)

    def _child(self, choice: LevelChoice) -> dict[str, Any]:
        late: list[str | None] = []
        with tempfile.TemporaryDirectory() as folder:
            begun = Path(folder) / "begun"
            found, said = run_in_process(
                partial(timed, str(self.path), self.args, choice, self.seconds, begun, self.foreign),
                os.environ,
                wait=lambda child: late.append(_late(child, begun, self.seconds)),
            )
        last = (said.strip().splitlines() or ["no message"])[-1]
        if found is None:
            return {"failed": late[0] or last}
        if said.strip() and str(found["failed"]).startswith("SystemExit"):
            found["failed"] += f"; the last line of its standard error: {last}"
        return found


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


class _Timer:
    """Prepares what the script prepares, as the choice says, and times the steps of its session.

    Before a session is made, and where none is, it tries what `foreign` tries and times the steps of that.
    After `seconds` from the end of its first step, which may compile, it ends with what it has; at that end
    it makes the file `begun`.
    """

    def __init__(self, choice: LevelChoice, seconds: float, begun: Path) -> None:
        self.choice, self.seconds, self.begun = choice, seconds, begun
        self.until = float("inf")
        self.session: Session | None = None
        self.foreign: ForeignScript | None = None
        self.memory, self.peak = ExitStack(), list[int]()
        self.ends: list[float] = []
        self.loss: float | None = None
        self.gradients: list[Tensor | None] = []

    def install(self, foreign: bool = False) -> None:
        """Put `prepare` of this process in the place of halfstep's; `foreign`: it may never be called."""
        if foreign:
            dtype = None if self.choice.dtype is None else parse_dtype(self.choice.dtype)
            self.foreign = ForeignScript(dtype, self._stepped)
            self.foreign.install()
        own: Any = importlib.import_module("halfstep.session.prepare")
        original, backward = own.prepare, Session.backward

        def prepare(model: Any, optimizer: Any = None, **given: Any) -> Session:
            asked = ("level", "dtype", "layout", "plan", "step", "batch", "seconds")
            kept = {key: value for key, value in given.items() if key not in asked}
            plan = given.get("plan") if getattr(given.get("plan"), "settings", None) is None else None
            session = original(model, optimizer, **arguments_of(self.choice, kept, plan))
            if self.session is None:
                if self.foreign is not None:
                    self.foreign.close()
                self.session, self.foreign = session, None
                session.early_listeners.append(self._look)
                session.listeners.append(self._ended)
            return session

        def noted(session: Session, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.loss is None and loss.numel() == 1:
                self.loss = float(loss.detach())
            backward(session, loss, *args, **kwargs)

        Session.backward = noted  # type: ignore[method-assign]
        for place in (own, halfstep.session, halfstep, loop):  # pyright: ignore[reportAttributeAccessIssue]
            place.prepare = prepare  # pyright: ignore[reportAttributeAccessIssue]

    def _look(self, session: Session, optimizer: torch.optim.Optimizer) -> None:
        taken = any(bool(outcome.taken) for outcome in session.history)
        if not taken and optimizer is session.optimizers[0]:
            scale = session.loss_scale.read()
            parameters = [p for model in session.models for p in model.parameters()]
            self.gradients = [
                None if p.grad is None else p.grad.detach().float().clone() / scale for p in parameters
            ]

    def _ended(self, session: Session, outcome: Any) -> None:
        self._end(session.device, len(session.history) % len(session.optimizers) == 0)

    def _stepped(self) -> None:
        """A script without a session has stepped; memory is counted in the last step that is not timed."""
        assert self.foreign is not None
        self.memory.close()
        resident = self.foreign.resident()
        self._end(resident[0].device)
        if len(self.ends) == WARM - 1:
            self.peak = self.memory.enter_context(memory_peak(resident, resident[0].device))

    def _end(self, device: torch.device, whole: bool = True) -> None:
        """An optimizer has stepped; `whole`: the last one of a step."""
        if whole:
            self.ends.append(clock_of(device)())
        if self.ends and self.until == float("inf"):
            self.until = time.perf_counter() + self.seconds
            self.begun.touch()
        last = STEPS + 1 if self.foreign is None else FOREIGN_STEPS
        if len(self.ends) >= last or time.perf_counter() > self.until:
            raise Enough

    def found(self, failed: str | None) -> dict[str, Any]:
        """What goes back to the command."""
        self.memory.close()
        seconds = [b - a for a, b in zip(self.ends, self.ends[1:])][WARM - 1 :]
        if self.foreign is not None:
            failed = self.foreign.refused or failed
        if failed is None and self.session is None and not self.ends:
            failed = "it neither calls hs.prepare nor steps a torch optimizer (weights updated by hand?)"
        if failed is None and not seconds and time.perf_counter() > self.until:
            failed = too_long(WARM + 1, self.seconds)
        if failed is None and not seconds:
            taken = "1 step" if len(self.ends) == 1 else f"{len(self.ends)} steps"
            failed = f"it took {taken}, and {WARM + 1} are needed"
        if failed is not None:
            return {"failed": failed}
        return {"failed": None, "seconds": seconds, **self._seen()}

    def _seen(self) -> dict[str, Any]:
        if self.foreign is not None:
            losses = [float(loss) for loss in self.foreign.losses]
            return {
                "loss": next(iter(losses), None),
                "gradients": self.foreign.gradients,
                "losses": losses,
                "peak_bytes": self.peak[0],
                "skipped": self.foreign.skipped,
                "uses": frozenset(self.foreign.uses),
            }
        assert self.session is not None
        return {
            "loss": self.loss,
            "gradients": self.gradients,
            "dtype": dtype_name(halfstep.devices.default_dtype(self.session.device)),
            "convolutions": bool(convolution_weights(self.session.models)),
        }


def too_long(steps: int, seconds: float) -> str:
    """That steps did not fit into the seconds, and what to give."""
    return (
        f"{steps} steps take longer than --seconds {seconds:g}, counted from its first step's end: give more"
    )


def timed(
    script: str,
    args: Sequence[str],
    choice: LevelChoice,
    seconds: float,
    begun: Path,
    foreign: bool | None = None,
) -> dict[str, Any]:
    """Runs a script in this process under a choice; what it raises is part of what was found.

    `foreign`: whether it never calls `hs.prepare`, where that is known.
    """
    timer = _Timer(choice, seconds, begun)
    timer.install(foreign is not False)
    seed(0)
    error = run_main(script, args)
    return timer.found(error and in_words(error, len(timer.ends)))
