"""What a session notices that is done past it: a direct step, gradients changed while they carry the scale.

And what keeps one loss from leaving gradients with the parameters of another's optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep.errors import ScalerStateError
from halfstep.optim.masters import weight_of
from halfstep.steppers import parameters_of

CHANGED = (
    "gradients were changed between backward() and step() while they carry the loss scale: clipping then "
    "cuts far too much. Use step(clip_norm=...), or call unscale() before you change them (said once)"
)

#: One gradient as it was: which tensor, its dtype, how often it was changed in place.
Mark = tuple[int, torch.dtype, int]


def refuse_direct_steps(
    optimizers: Sequence[torch.optim.Optimizer], carried: Callable[[int], float]
) -> list[RemovableHandle]:
    """Make `optimizer.step()` an error while its gradients carry a loss scale; returns the hooks.

    `carried(index)` gives the scale of an optimizer's gradients, 1 where they carry none; a method is held
    weakly, so that an optimizer does not keep its session alive.
    """
    weak = weakref.WeakMethod(carried)

    def hook_for(index: int) -> Callable[..., None]:
        def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            scale_of = weak()
            scale = 1.0 if scale_of is None else scale_of(index)
            if scale != 1.0:
                raise ScalerStateError(
                    f"{type(optimizer).__name__}.step() was called on gradients that carry the session's "
                    f"loss scale {scale:g}: call session.step(), which divides it out (and backward() "
                    "without GradScaler)"
                )

        return refuse

    return [o.register_step_pre_hook(hook_for(i)) for i, o in enumerate(optimizers)]


def marks(optimizer: torch.optim.Optimizer) -> list[Mark]:
    """What tells later whether the gradients of an optimizer were changed in place; reads no values."""
    weights = (weight_of(p) for p in parameters_of(optimizer))
    return [(id(g), g.dtype, g._version) for w in weights if (g := w.grad) is not None]


def changed(before: Collection[Mark], now: Sequence[Mark]) -> bool:
    """Whether a gradient that is still the same tensor was changed in place."""
    versions = {mark[:2]: mark[2] for mark in before}
    return any(versions.get(mark[:2], mark[2]) != mark[2] for mark in now)


@contextmanager
def kept_gradients(optimizers: Sequence[torch.optim.Optimizer], named: Collection[int]) -> Generator[None]:
    """Within, backward changes no gradient that belongs to none of the optimizers with these indices."""
    weights = [{weight_of(p) for p in parameters_of(o)} for o in optimizers]
    mine = set[Tensor]().union(*(weights[i] for i in named))
    others = set[Tensor]().union(*weights) - mine
    before = [(w, w.grad) for w in others]
    for w in others:
        w.grad = None
    try:
        yield
    finally:
        for w, grad in before:
            w.grad = grad
