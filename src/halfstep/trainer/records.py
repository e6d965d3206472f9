"""What a training leaves behind and who is told: logs, history, callbacks, loggers, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from halfstep.trainer.loop import Trainer

Metric = Callable[[Tensor, Tensor], Tensor]
"""(model output, target) -> 0-d tensor, the mean over the batch."""


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
        """Take the values of `step`; called every `read_every` steps and after an evaluation."""
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
