"""What a training leaves behind and who hears of it: logs, history, callbacks, loggers, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.trainer.loop import Trainer

Metric = Callable[[Tensor, Tensor], Tensor | float]
"""(model output, target) -> 0-d tensor or number, the mean over the batch."""


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of positions whose largest entry of the last dimension is the target's; 0-d fp32."""
    return (output.argmax(-1) == target).float().mean()


@dataclass(frozen=True)
class StepLog:
    """One step as the host knows it: loss, whether it was taken, the scale its gradients carried."""

    step: int
    loss: float
    taken: bool
    scale: float
    grad_norm: float | None
    reason: str


@dataclass
class History:
    """What `fit` saw: a StepLog for each step, the wall time, and where the loss stopped being finite."""

    steps: list[StepLog] = field(default_factory=list)
    seconds: float = 0.0
    diverged_at: int | None = None
    stopped: str = ""
    """Why `fit` ended before its last step; empty where it did not."""

    @property
    def losses(self) -> list[float]:
        """The training loss of every step; over ranks that of this rank's own share of the batch."""
        return [log.loss for log in self.steps]

    @property
    def skipped(self) -> list[int]:
        """The numbers of the steps that were not taken."""
        return [log.step for log in self.steps if not log.taken]


class Logger(Protocol):
    """Where numbers go: anything with this method."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Called with the values of `step` every `read_every` steps and after an evaluation."""
        ...


class Callback:
    """Hooks into `Trainer.fit`; override what is needed. Values are on the host in `on_read` alone."""

    def on_fit_start(self, trainer: Trainer, steps: int) -> None:
        """Before the first step; `steps` is the number of the last one."""

    def on_step_end(self, trainer: Trainer) -> None:
        """After every step; `trainer.step` counts it."""

    def on_read(self, trainer: Trainer, logs: Sequence[StepLog]) -> None:
        """After losses and outcomes arrived on the host."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """After every pass over the loader; `trainer.epoch` counts it."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """After the last step, also when an error ends the loop."""


class ProgressBar(Callback):
    """A rich progress bar on standard error."""

    def on_fit_start(self, trainer: Trainer, steps: int) -> None:
        """Draw the bar."""
        from rich.console import Console
        from rich.progress import Progress, TextColumn

        columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]}"))
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("training", total=steps, completed=trainer.step, loss="")
        self._bar.start()

    def on_step_end(self, trainer: Trainer) -> None:
        """Advance."""
        self._bar.update(self._task, completed=trainer.step)

    def on_read(self, trainer: Trainer, logs: Sequence[StepLog]) -> None:
        """Show the last loss."""
        self._bar.update(self._task, loss=f"{logs[-1].loss:.4g}")

    def on_fit_end(self, trainer: Trainer) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()


class EarlyStopping(Callback):
    """Stops a training whose metric has not improved for `patience` evaluations; over ranks all decide alike.

    Args:
        loader: what `Trainer.evaluate` is called with.
        metric: "loss", or the name of one of the Trainer's metrics.
        patience: evaluations in a row without improvement that end the training.
        higher_is_better: what improvement means; None takes lower for "loss" and higher for any other.
        least: an improvement smaller than this is none.
        every: steps between evaluations; None evaluates after every pass over the training data, which over
            ranks needs loaders of one length.
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
        self.loader, self.metric, self.patience = loader, metric, patience
        self.least, self.every = least, every
        self._sign = 1.0 if (metric != "loss" if higher_is_better is None else higher_is_better) else -1.0
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
