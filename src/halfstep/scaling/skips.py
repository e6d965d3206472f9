"""Count steps that were not taken, and end a run whose scale collapses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfstep.errors import LossScaleCollapsed
from halfstep.scaling.loss_scale import check_count


@dataclass(frozen=True)
class SkipCount:
    """How many steps were skipped: in a row, and since the beginning; an immutable host value.

    `limit` skips in a row are a collapsed loss scale: `after` then raises.
    """

    in_row: int = 0
    total: int = 0
    steps: int = 0
    limit: int = 50

    def __post_init__(self) -> None:
        check_count("skips in a row", "max_skips", self.limit)

    def after(self, taken: bool, *, scale: float | None = None) -> SkipCount:
        """Return the count after one more step.

        Raises LossScaleCollapsed when `limit` steps in a row were skipped; its message names `scale`.
        """
        counted = self.after_steps(taken)
        counted.check(scale=scale)
        return counted

    def after_steps(self, taken: bool) -> SkipCount:
        """Return the count after one more step, however many were skipped."""
        in_row = 0 if taken else self.in_row + 1
        return replace(self, in_row=in_row, total=self.total + (not taken), steps=self.steps + 1)

    def check(self, *, scale: float | None = None) -> None:
        """Raise LossScaleCollapsed where `limit` steps in a row were skipped."""
        if self.in_row >= self.limit:
            at = "" if scale is None else f" The loss scale is down to {scale:g}."
            raise LossScaleCollapsed(
                f"{self.in_row} steps in a row were skipped because the gradients held inf or NaN.{at}"
                " The cause is not the scale: look for NaN in the data, a division by zero or an op "
                "that overflows in the forward pass (`halfstep doctor` names it), or train in bf16."
            )
