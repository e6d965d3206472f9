"""Where an optimizer finds its gradients: at its own parameters, or at those whose shards it updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.errors import ConfigError, UnsupportedError
from halfstep.gradients import cpu as cpus_
from halfstep.gradients.stats import HostStats
from halfstep.optim import storage
from halfstep.optim.tensor_facts import Gradients, gradients_of, likeness_of

SetSums = tuple[int, float, float]
"""A set of gradients by number, the sum of its squares (unscaled) and its largest magnitude."""


class Source(Protocol):
    """Gradients of parameters, and what was found in them."""

    def of(self, p: Tensor) -> Tensor | None:
        """The gradient of `p`, None where it has none or no elements to update."""
        ...

    def of_all(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """`of` each; `params` is the same list at every step."""
        ...

    def watched(self, params: Sequence[Tensor]) -> Gradients:
        """The gradients of parameters that have one, to be looked at again at every step."""
        ...

    def set_of(self, p: Tensor) -> int:
        """The number of the set that p's gradient is measured with."""
        ...

    def combined(self, found: Sequence[SetSums], inv_scale: float) -> HostStats:
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

    def watched(self, params: Sequence[Tensor]) -> Gradients:
        """They lie at `params`."""
        return gradients_of(params)

    def set_of(self, p: Tensor) -> int:
        """All are one set."""
        return 0

    def combined(self, found: Sequence[SetSums], inv_scale: float) -> HostStats:
        """The answer for all."""
        return cpus_.combined([(squares, peak) for _, squares, peak in found], inv_scale)


class ListedGradients:
    """`Gradients` that a source lists anew at every step."""

    def __init__(self, source: Source, params: Sequence[Tensor]) -> None:
        self._source, self._params = source, params
        self.likeness = likeness_of([g for g in source.of_all(params) if g is not None])
        self.addresses: Any = self.likeness.addresses

    def alike(self) -> bool:
        """See `Gradients`."""
        return self.likeness.alike(self._source.of_all(self._params))


def dense_grad(p: Tensor, grad: Tensor, name: Callable[[], str]) -> Tensor | None:
    """The gradient `grad` of `p` in p's memory order and a dtype that the kernels read, or None.

    Raises:
        UnsupportedError: a gradient that is not dense or not of floating numbers. ConfigError: one of another
            shape or device than p's, as after `p.data = ...`.
    """
    if p.numel() == 0:
        return None
    if grad.layout is not torch.strided:
        raise UnsupportedError(f"halfstep.optim takes dense gradients, not {grad.layout}: use torch.optim")
    if grad.shape != p.shape or grad.device != p.device:
        raise ConfigError(
            f"the gradient of {name()} has shape {list(grad.shape)} on {grad.device}, the parameter "
            f"{list(p.shape)} on {p.device}: call zero_grad() where you replace the parameter's data"
        )
    if not grad.dtype.is_floating_point:
        raise UnsupportedError(f"the gradient of {name()} is {grad.dtype}, expected floating numbers")
    weight, grad = storage.local_tensor(p), storage.local_tensor(grad).detach().resolve_neg()
    if not (weight.is_contiguous() and grad.is_contiguous()):
        storage.check_dense(weight)
        if grad.stride() != weight.stride():
            grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
    return grad if grad.dtype in cpus_.GRADS else grad.to(torch.float32)
