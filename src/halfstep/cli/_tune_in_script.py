"""What runs inside the process of a script that is tuned: `prepare` with another level, a clock, an end."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import halfstep
from halfstep.convert.layout import convolution_weights
from halfstep.doctor.process import Enough, in_words, run_main
from halfstep.formats import dtype_name
from halfstep.session.prepare import arguments_of
from halfstep.session.session import Session
from halfstep.trainer import loop
from halfstep.tuning.choices import LevelChoice


class Timer:
    """Prepares what the script prepares, as the choice says, and times the steps of its session.

    After `seconds` from the end of its first step, which may compile, it ends with what it has; at that end
    it makes the file `begun`.
    """

    def __init__(
        self,
        choice: LevelChoice,
        steps: int,
        warm: int,
        seconds: float = float("inf"),
        begun: Path | None = None,
    ) -> None:
        self.choice, self.steps, self.warm = choice, steps, warm
        self.seconds, self.begun = seconds, begun
        self.until = float("inf")
        self.session: Session | None = None
        self.ends: list[float] = []
        self.loss: float | None = None
        self.gradients: list[Tensor | None] = []

    def install(self) -> None:
        """Put `prepare` of this process in the place of halfstep's."""
        own: Any = importlib.import_module("halfstep.session.prepare")
        original, backward = own.prepare, Session.backward

        def prepare(model: Any, optimizer: Any = None, **given: Any) -> Session:
            asked = ("level", "dtype", "layout", "plan", "step", "batch", "seconds")
            kept = {key: value for key, value in given.items() if key not in asked}
            plan = given.get("plan") if getattr(given.get("plan"), "settings", None) is None else None
            session = original(model, optimizer, **arguments_of(self.choice, kept, plan))
            if self.session is None:
                self.session = session
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
        if session.device.type != "cpu":
            torch.accelerator.synchronize(session.device)
        alone = session.device.type == "cpu" and torch.get_num_threads() == 1
        if len(session.history) % len(session.optimizers) == 0:
            self.ends.append(time.process_time() if alone else time.perf_counter())
        if self.ends and self.until == float("inf"):
            self.until = time.perf_counter() + self.seconds
            if self.begun is not None:
                self.begun.touch()
        if len(self.ends) > self.steps or time.perf_counter() > self.until:
            raise Enough

    def found(self, failed: str | None) -> dict[str, Any]:
        """What goes back to the command."""
        seconds = [b - a for a, b in zip(self.ends, self.ends[1:])][self.warm - 1 :]
        if failed is None and self.session is None:
            failed = "it never calls hs.prepare"
        if failed is None and not seconds and time.perf_counter() > self.until:
            failed = too_long(self.warm + 1, self.seconds)
        if failed is None and not seconds:
            failed = f"it took {len(self.ends)} steps, and {self.warm + 1} are needed"
        if failed is not None or self.session is None:
            return {"failed": failed}
        return {
            "failed": None,
            "seconds": seconds,
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


@dataclass(frozen=True)
class TuneOrder:
    """A script to run under a choice: `warm` steps, then up to `steps` that are timed."""

    script: str
    args: tuple[str, ...]
    choice: LevelChoice
    steps: int
    warm: int
    seconds: float
    begun: str
    result: str

    def run(self) -> dict[str, Any]:
        """Carries it out in this process; what the script raises is part of what was found."""
        timer = Timer(self.choice, self.steps, self.warm, self.seconds, Path(self.begun))
        timer.install()
        torch.manual_seed(0)
        error = run_main(self.script, self.args)
        return timer.found(error and in_words(error, len(timer.ends)))
