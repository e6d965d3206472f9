"""The cells that managers hand out in MindSpore to move a loss scale, and how a step follows such a cell."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from halfstep.compat.mindspore._loss_scale import WindowLossScale
from halfstep.compat.mindspore._tensor import as_tensor
from halfstep.compat.mindspore.nn._cell import Cell
from halfstep.scaling.loss_scale import LossScale


class FixedLossScaleUpdateCell(Cell):
    """`cell(loss_scale, overflow)` gives `overflow` back and leaves the scale alone."""

    def __init__(self, loss_scale_value: float) -> None:
        super().__init__()
        self.loss_scale_value = loss_scale_value

    def get_loss_scale(self) -> float:
        """The scale to begin with."""
        return self.loss_scale_value

    def construct(self, loss_scale: torch.Tensor, overflow: Any) -> Any:
        """`loss_scale`: a 0-d or 1-element tensor."""
        return overflow


class DynamicLossScaleUpdateCell(Cell):
    """`cell(loss_scale, overflow)` writes the next scale into `loss_scale` and gives `overflow` back.

    An overflow divides by `scale_factor`, down to 1; `scale_window` steps without one multiply by it.

    Raises:
        ValueError: a scale below 1.
    """

    def __init__(self, loss_scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__()
        self.loss_scale_value, self.scale_factor, self.scale_window = (
            loss_scale_value,
            scale_factor,
            scale_window,
        )
        self._rule = WindowLossScale(float(loss_scale_value), scale_factor, scale_window)

    def get_loss_scale(self) -> float:
        """The scale to begin with."""
        return self.loss_scale_value

    def construct(self, loss_scale: torch.Tensor, overflow: Any) -> Any:
        """`loss_scale`: a 0-d or 1-element tensor; `overflow`: a bool or such a tensor, which is not read."""
        flag = torch.as_tensor(overflow).detach().reshape(()).bool()
        before = loss_scale.detach().reshape(()).float().clone()
        self._rule = replace(self._rule, current=before).adjust(~flag)
        with torch.no_grad():
            loss_scale.copy_(self._rule.tensor(loss_scale.device).reshape(loss_scale.shape))
        return overflow


@dataclass(frozen=True)
class CellLossScale(LossScale):
    """A loss scale that any Cell of (loss_scale, overflow) with `get_loss_scale()` moves."""

    cell: Any
    current: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def value(self) -> float | torch.Tensor:
        """The scale: the cell's first at first."""
        return float(self.cell.get_loss_scale()) if self.current is None else self.current

    def adjust(self, finite: bool | torch.Tensor, amax: float | torch.Tensor | None = None) -> CellLossScale:
        """Ask the cell."""
        flag = torch.as_tensor(finite).detach().reshape(()).bool()
        moved = as_tensor(self.tensor(flag.device).clone())
        self.cell(moved, as_tensor(~flag))
        return replace(self, current=moved.as_subclass(torch.Tensor))
