"""Where an optimizer finds its gradients: at its own parameters, or at those whose shards it updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from halfstep.gradients import cpu as cpus_
from halfstep.gradients.stats import HostStats

Found = tuple[int, float, float]
"""A set of gradients by number, the sum of its squares (unscaled) and its largest magnitude."""


class Source(Protocol):
    """Gradients of parameters, and what was found in them."""

    def of(self, p: Tensor) -> Tensor | None:
        """The gradient of `p`, None where it has none or no elements to update."""
        ...

    def of_all(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """`of` each; `params` is the same list at every step."""
        ...

    def set_of(self, p: Tensor) -> int:
        """The number of the set that p's gradient is measured with."""
        ...

    def combined(self, found: Sequence[Found], inv_scale: float) -> HostStats:
        """The answer for all gradients times `inv_scale`, those of other ranks included."""
        ...


class OwnGradients:
    """Gradients that lie at the parameters themselves."""

    def of(self, p: Tensor) -> Tensor | None:
        """`p.grad`."""
        return p.grad

    def of_all(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Each one's `grad`."""
        return [p.grad for p in params]

    def set_of(self, p: Tensor) -> int:
        """All are one set."""
        return 0

    def combined(self, found: Sequence[Found], inv_scale: float) -> HostStats:
        """The answer for all."""
        return cpus_.combined([(squares, peak) for _, squares, peak in found], inv_scale)
