"""How each kind of optimizer takes a checked step: one-pass ones, and torch ones with or without masters.

A stepper measures the gradients of one optimizer and then updates or skips. `Session` decides when; what the
numbers mean (scales, ranks, outcomes) is decided there, never here.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halfstep.optim._gradients import GradStats, measure
from halfstep.unscale import unscale_


class Stepper(Protocol):
    """What `Session` needs of an optimizer, whatever its kind."""

    optimizer: torch.optim.Optimizer

    def gradients(self) -> list[Tensor]:
        """The gradients as backward left them."""
        ...

    def measure(self, inv_scale: Tensor | None) -> GradStats:
        """Finite flag, norm and largest magnitude of the gradients times `inv_scale`; changes nothing."""
        ...

    def update(self, stats: GradStats, clip_norm: float | None, found_inf: bool | Tensor) -> Tensor:
        """Clip and update, or skip where `found_inf` is set; returns the norm before clipping."""
        ...

    def clear(self) -> None:
        """Drop the gradients."""
        ...


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors in the optimizer's groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients_of(tensors: list[Tensor]) -> list[Tensor]:
    """The gradients of those tensors that have one."""
    return [p.grad for p in tensors if p.grad is not None]


class OnePassStepper:
    """An optimizer of `halfstep.optim`: unscale, clip, skip and update happen in its own single pass."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer: Any = optimizer
        self._inv_scale: Tensor | None = None

    def gradients(self) -> list[Tensor]:
        """The gradients as backward left them."""
        return gradients_of(parameters_of(self.optimizer))

    def measure(self, inv_scale: Tensor | None) -> GradStats:
        """Finite flag, norm and largest magnitude of the gradients times `inv_scale`."""
        self._inv_scale = inv_scale
        return self.optimizer.measure(inv_scale=inv_scale)

    def update(self, stats: GradStats, clip_norm: float | None, found_inf: bool | Tensor) -> Tensor:
        """Clip and update, or skip; returns the norm before clipping."""
        clip = None if clip_norm is None else torch.clamp(clip_norm / (stats.norm + 1e-6), max=1.0)
        self.optimizer.step(inv_scale=self._inv_scale, clip_coef=clip, found_inf=found_inf)
        return stats.norm

    def clear(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)


class TorchStepper:
    """A torch optimizer, with or without masters; skipping reads one flag."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._inv_scale: Tensor | None = None

    def gradients(self) -> list[Tensor]:
        """The gradients as backward left them."""
        return gradients_of(parameters_of(self.optimizer))

    def measure(self, inv_scale: Tensor | None) -> GradStats:
        """Finite flag, norm and largest magnitude of the gradients times `inv_scale`."""
        self._inv_scale = inv_scale
        return measure(self.gradients(), inv_scale)

    def update(self, stats: GradStats, clip_norm: float | None, found_inf: bool | Tensor) -> Tensor:
        """Clip and update, or skip; returns the norm before clipping."""
        if found_inf:
            return stats.norm
        if self._inv_scale is not None:
            unscale_(self.gradients(), self._inv_scale)
        norm = stats.norm
        if clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(parameters_of(self.optimizer), clip_norm)
        self.optimizer.step()
        return norm

    def clear(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
