"""What backward left with an optimizer's gradients: which scale they carry, who shares their loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep.optim.masters import weight_of
from halfstep.scaling.loss_scale import LossScale, NoLossScale
from halfstep.session.steppers import parameters_of

#: One gradient as it was: which tensor, its dtype, how often it was changed in place.
Mark = tuple[int, torch.dtype, int]


@dataclass
class Pending:
    """What backward left behind for one optimizer: the scale its gradients carry, who shares its loss."""

    scale: LossScale
    group: frozenset[int]
    found_inf: bool | Tensor | None = None
    finite: bool | Tensor | None = None
    """Whether they were finite when `unscale` divided the scale out; None where they still carry it."""
    marks: list[Mark] = field(default_factory=list[Mark])
    edited: bool = False

    @property
    def carried(self) -> LossScale:
        """The scale that the gradients carry now."""
        return self.scale if self.finite is None else NoLossScale()


def marks(optimizer: torch.optim.Optimizer) -> list[Mark]:
    """What tells later whether the gradients of an optimizer were changed in place; reads no values."""
    weights = (weight_of(p) for p in parameters_of(optimizer))
    return [(id(g), g.dtype, g._version) for w in weights if (g := w.grad) is not None]


def changed(before: Collection[Mark], now: Sequence[Mark]) -> bool:
    """Whether a gradient that is still the same tensor was changed in place."""
    versions = {mark[:2]: mark[2] for mark in before}
    return any(versions.get(mark[:2], mark[2]) != mark[2] for mark in now)
