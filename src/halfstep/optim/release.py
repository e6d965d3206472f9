"""Gradient release: update each parameter as backward reaches it, and free its gradient at once.

What changes with it: a gradient that is not finite skips its own tensor only (tensors updated earlier in
the same backward stay updated; the next `measure` says `finite=False`, so that a loss scale backs off), and
clipping uses the norm of the previous step, since this step's is not known before backward ends. A backward
that breaks off leaves the tensors that it had reached updated.
"""

import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.errors import warn
from halfstep.gradients.decision import check_clip
from halfstep.gradients.stats import AnyStats, GradStats, as_tensors, combine

if TYPE_CHECKING:
    from halfstep.optim.base import OnePassOptimizer

#: Why a step with released gradients counts as skipped.
PARTLY = (
    "skipped the tensors whose gradients hold inf or NaN; tensors whose gradients were released before them "
    "were updated"
)
#: Said once: the norm of all gradients is known only after backward has applied them.
UNCLIPPED = (
    "clip_norm with released gradients: this first step was not clipped, and each later step is clipped by "
    "the norm of the step before it; leave release_gradients out where each step needs its own norm"
)


class GradientRelease:
    """The hooks of one optimizer, the scale and clip norm they use, and what they saw since the last step."""

    def __init__(self, optimizer: "OnePassOptimizer") -> None:
        self._optimizer = weakref.ref(optimizer)
        self._watched = WeakTensorKeyDictionary()
        """The parameters that have the hook."""
        self._holding = False
        self._seen: list[AnyStats] = []
        self._inv_scale: float | Tensor | None = None
        self.clip_norm: float | None = None
        self._last_norm: Tensor | None = None

    def watch(self, params: list[Tensor]) -> None:
        """Install the hook on each parameter that needs a gradient.

        gc does not see what a parameter's hooks refer to, so they refer to nothing that leads back to it.
        """
        weak = weakref.ref(self)

        def release(p: Tensor) -> None:
            if (owner := weak()) is not None:
                owner._on_gradient(p)

        for p in params:
            if p.requires_grad and p not in self._watched:
                p.register_post_accumulate_grad_hook(release)
                self._watched[p] = True

    def configure(self, inv_scale: float | Tensor | None = None, clip_norm: float | None = None) -> None:
        """Set what the next backward passes use: the inverse loss scale, and the norm to clip to.

        With `inv_scale` given, or with `skip_nonfinite` in a group of the optimizer, a tensor whose gradient
        is not finite is skipped. `clip_norm` replaces that of the groups.
        """
        check_clip(clip_norm)
        self._inv_scale, self.clip_norm = inv_scale, clip_norm

    @contextmanager
    def pause(self) -> Generator[None]:
        """Only add up gradients in backward passes of the block: for all micro-batches but the last."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    def memory(self) -> Callable[[], None]:
        """Note what `state` leaves out, the step that is under way; the result puts it back."""
        past_stats, inv_scale = list(self._seen), self._inv_scale

        def restore() -> None:
            self._seen, self._inv_scale = list(past_stats), inv_scale

        return restore

    def state(self) -> dict[str, float | None]:
        """Return the last step's norm and what the next is clipped to, for a checkpoint; reads the device."""
        last = None if self._last_norm is None else float(self._last_norm)
        return {"last_norm": last, "clip_norm": self.clip_norm}

    def load(self, state: Mapping[str, float | None]) -> None:
        """Continue from `state()`."""
        last, self.clip_norm = state["last_norm"], state["clip_norm"]
        home = next((p.device for p in self._watched), torch.device("cpu"))
        self._last_norm = None if last is None else torch.tensor(last, device=home)

    def _on_gradient(self, p: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or self._holding:
            return
        if p.grad is not None and p.grad_dtype is torch.float32 and optimizer.accumulate is None:
            p.grad_dtype = None
            p.grad = p.grad.to(p.dtype)  # a sum of micro-batches, rounded once, as a kept one is
        stats = optimizer._release_one(p, self._inv_scale, self._last_norm, self.clip_norm)
        if stats is not None:
            self._seen.append(stats)
            p.grad = None

    def stats(self, rest: AnyStats | None) -> GradStats | None:
        """Return the stats since the last step combined with `rest`; None where there are none."""
        parts = [*self._seen, *([rest] if rest is not None else [])]
        return as_tensors(combine(parts)) if parts else None

    def forget(self) -> None:
        """Forget the stats since the last step: a backward pass broke off, and no step ends it."""
        self._seen = []

    def finish(self, clips: bool) -> None:
        """End the step: remember its norm for the next one's clipping (`clips`: there is a limit)."""
        if (stats := self.stats(None)) is not None:
            if clips and self._last_norm is None:
                warn(UNCLIPPED)
            is_finite = torch.isfinite(stats.norm)
            last = stats.norm if self._last_norm is None else self._last_norm
            self._last_norm = torch.where(is_finite, stats.norm, last)
            self._seen = []
