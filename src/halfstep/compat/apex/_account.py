"""What one optimizer's gradients carry between `scale_loss` and `step()`: a scale, a sum, a step to skip.

Gradients of earlier losses are set aside before a backward, so that each loss is unscaled by its own scale
and checked alone, and added again afterwards.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.compat.apex._options import AmpError
from halfstep.errors import HalfstepWarning
from halfstep.gradients.unscale import any_of, unscale_
from halfstep.optim import MasterWeights
from halfstep.optim.masters import weight_of
from halfstep.trees import all_finite

CHANGED = (
    "gradients of 16-bit weights were changed between scale_loss and step() while they carry the loss scale: "
    "clipping then cuts far too much. Clip amp.master_params(optimizer) instead (said once)"
)


class Owner(Protocol):
    """What an account asks of the state it belongs to; `told` holds what was said already."""

    told: set[str]

    def say(self, text: str) -> None:
        """Print, unless silent."""
        ...

    def unscaled_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step found fresh gradients that no `scale_loss` announced."""
        ...


class Account:
    """One optimizer under `amp`. `skip` holds the message of a step that must not be taken.

    `inside`: how many `scale_loss` bodies that name it are running. `announced`: one named it since its last
    step; `owner` is told where a step finds fresh gradients without.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owner: Owner) -> None:
        self.optimizer, self._owner = optimizer, owner
        self.announced = False
        self._stepped: tuple[int, int] | None = None
        self.masters: MasterWeights | None = None
        self.scaled, self.inside = False, 0
        self.skip: str | None = None
        self._aside: dict[Tensor, Tensor] = {}
        self._left: list[tuple[Tensor, Tensor, int]] = []
        mine: weakref.ref[Account] = weakref.ref(self)
        # Before the masters' own hook: a skipped step then widens nothing.
        self._handles = [
            optimizer.register_step_pre_hook(lambda o, args, kwargs: _before_step(mine, args, kwargs)),
            optimizer.register_step_post_hook(lambda o, args, kwargs: _after_step(mine)),
        ]

    def remove(self) -> None:
        """Take the hook and the masters off the optimizer."""
        self.settle()
        for handle in self._handles:
            handle.remove()
        if self.masters is not None:
            self.masters.revert()

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """The model's weights that have masters, and the optimizer's other parameters."""
        groups = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.masters is None:
            return [], groups
        pairs = self.masters.pairs()
        own = {id(master) for _, master in pairs}
        return [weight for weight, _ in pairs], [p for p in groups if id(p) not in own]

    def mark(self) -> tuple[int, int] | None:
        """What tells a gradient from the one of the last step; None where there is none."""
        owned = (weight_of(p).grad for group in self.optimizer.param_groups for p in group["params"])
        first = next((grad for grad in owned if grad is not None), None)
        return None if first is None else (id(first), first._version)

    def look(self) -> None:
        """Tell of gradients that are there without a `scale_loss`, unless the last step had them already."""
        if not self.announced and (mark := self.mark()) is not None and mark != self._stepped:
            self._owner.unscaled_step(self.optimizer)

    def stepped(self) -> None:
        """Remember which gradients this step had."""
        self.announced, self._stepped = False, self.mark()

    def before_backward(self) -> None:
        """Set finished gradients aside; those of delayed losses stay, to be accumulated on."""
        if self.scaled:
            return
        self.settle()
        low, others = self.weights()
        for p in (*low, *others):
            if p.grad is not None:
                self._aside[p] = p.grad
                p.grad = None

    @torch.no_grad()
    def after_backward(self, inv_scale: Tensor) -> Tensor:
        """Unscale the new gradients (those of masters when next read); a flag: some are not finite."""
        self.scaled = False
        low, others = self.weights()
        fresh = [p for p in others if p.grad is not None]
        found = unscale_([p.grad for p in fresh], inv_scale)
        new = [p.grad for p in low if p.grad is not None]
        found = any_of([found, ~all_finite(new)]) if new else found
        self._left = [(p, p.grad, p.grad._version) for p in low if p.grad is not None]
        for p in low:
            if p.grad is None and p in self._aside:
                p.grad = self._aside.pop(p)
        if self._left and self.masters is not None:
            self.masters.link.finish = lambda: self._finish(inv_scale)
        self._add_aside([p for p in others if p in self._aside])
        return found

    def settle(self) -> None:
        """Unscale what `after_backward` left with the weights."""
        if self.masters is not None and self.masters.link.finish is not None:
            self.masters.link.widen()

    @torch.no_grad()
    def _finish(self, inv_scale: Tensor) -> None:
        current = [p for p, grad, _ in self._left if p.grad is grad]
        if "changed" not in self._owner.told and any(g._version != v for _, g, v in self._left):
            self._owner.told.add("changed")
            warnings.warn(CHANGED, HalfstepWarning, stacklevel=2)
        self._left = []
        assert self.masters is not None
        self.masters.link.widen()
        unscale_([p.grad for p in current], inv_scale)
        self._add_aside([p for p in current if p in self._aside])
        self._aside.clear()

    def _add_aside(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            before = self._aside.pop(p)
            p.grad = before if p.grad is None else p.grad + before


def _before_step(account: weakref.ref[Account], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    self = account()
    if self is None:
        return
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        raise AmpError("amp does not support closures with optimizers: call step() without one")
    if self.inside:
        raise AmpError(
            f"{type(self.optimizer).__name__}.step() inside amp.scale_loss: the gradients carry the loss "
            "scale until the `with` ends, so step after it"
        )
    if self.scaled:
        raise AmpError(
            "step() after scale_loss(..., delay_unscale=True): the gradients are still scaled; "
            "the last backward before a step must not delay"
        )
    self.look()
    if self.skip is not None:
        self._owner.say(self.skip)
        self.skip = None
        # Without gradients torch's optimizers change nothing: no update, no decay, no step count.
        low, others = self.weights()
        for p in (*low, *others):
            p.grad = None


def _after_step(account: weakref.ref[Account]) -> None:
    self = account()
    if self is not None:
        self.stepped()
