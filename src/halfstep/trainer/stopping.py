"""Ending a training before its last step: by a callback, by early stopping, or by SIGTERM with a save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from halfstep.errors import ConfigError
from halfstep.trainer.records import Callback

if TYPE_CHECKING:
    from halfstep.trainer.loop import Trainer


class Terminated:
    """Whether SIGTERM has arrived; a second one ends the process as it would have without us."""

    def __init__(self) -> None:
        self.arrived = False

    @contextmanager
    def watched(self, wanted: bool) -> Generator[None]:
        """Within, the first SIGTERM is noted, where `wanted` and nobody else handles it."""
        main = threading.current_thread() is threading.main_thread()
        if not (wanted and main) or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.arrived = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class EarlyStopping(Callback):
    """Stops a training whose metric has not improved for `patience` evaluations; over ranks all decide alike.

    Args:
        loader: what `Trainer.evaluate` is called with, after every pass over the training data or, with
            `every`, after so many steps.
        metric: "loss", or the name of one of the Trainer's metrics.
        patience: evaluations in a row without improvement that end the training.
        higher_is_better: what improvement means; None takes lower for "loss" and higher for any other.
        least: an improvement smaller than this is none.
        every: steps between evaluations; None evaluates at the end of each pass, which over ranks needs
            loaders of one length.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        metric: str = "loss",
        *,
        patience: int = 3,
        higher_is_better: bool | None = None,
        least: float = 0.0,
        every: int | None = None,
    ) -> None:
        if patience < 1 or (every is not None and every < 1):
            raise ConfigError(f"patience={patience}, every={every}: expected 1 or more")
        self.loader, self.metric, self.patience, self.least, self.every = (
            loader,
            metric,
            patience,
            least,
            every,
        )
        higher = metric != "loss" if higher_is_better is None else higher_is_better
        self._sign = 1.0 if higher else -1.0
        self.best: float | None = None
        self._waited = 0

    def on_step_end(self, trainer: Trainer) -> None:
        """Evaluate where `every` says so."""
        if self.every is not None and trainer.step % self.every == 0:
            self._evaluate(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Evaluate where `every` was not given."""
        if self.every is None:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        values = trainer.evaluate(self.loader)
        if self.metric not in values:
            raise ConfigError(f"EarlyStopping(metric={self.metric!r}): the Trainer measures {sorted(values)}")
        value = values[self.metric]
        if self.best is None or self._sign * (value - self.best) > self.least:
            self.best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            trainer.stop(f"{self.metric} has not improved on {self.best:.6g} for {self._waited} evaluations")
