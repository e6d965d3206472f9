"""What a session remembers between calls, as one frozen value: loss scale, counts, what gradients carry.

event             from                    to
backward(loss)    any                     Scaled; gradients that carry another scale are brought to it
unscale           Scaled                  Unscaled, or an error without gradients of ours under a scale
                  Unscaled                itself
step              Scaled, Unscaled        Empty, or Kept with zero_grad=False
                  Empty, Kept             an error under a scale; without one as after a backward
optimizer.step()  Empty, Unscaled, Kept(1) allowed; refused where gradients carry a scale
load_state_dict, revert   any             Empty
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.errors import CheckpointError
from halfstep.optim.masters import weight_of
from halfstep.scaling.loss_scale import LossScale, NoLossScale
from halfstep.scaling.skips import SkipCount
from halfstep.session.steppers import parameters_of

#: One gradient as it was: which tensor, its dtype, how often it was changed in place.
GradientVersion = tuple[int, torch.dtype, int]


@dataclass(frozen=True)
class Empty:
    """No gradients of ours."""


EMPTY = Empty()


class Share(NamedTuple):
    """What one of several losses put into an optimizer's gradients, looked at before it was added to them."""

    scale: LossScale
    group: frozenset[int]
    found: bool | Tensor
    """Whether it held inf or NaN."""
    amax: float | Tensor | None = None
    """Its largest magnitude without the scale, None where its scale does not ask."""
    settled: bool = False
    """Whether `found` is known over all optimizers of the loss, and its scale adjusted."""


class Scaled(NamedTuple):
    """Gradients of a backward: they carry `scale`; the optimizers in `group` share a loss."""

    scale: LossScale
    group: frozenset[int]
    marks: tuple[GradientVersion, ...] = ()
    found: bool | Tensor | None = None
    """Whether inf or NaN was found by an optimizer of the same loss that stepped before; None if none did."""
    loss: int = 0
    """Which of the session's loss scales it is."""


class Unscaled(NamedTuple):
    """The same after `unscale`: `finite` is what dividing `scale` out found."""

    scale: LossScale
    group: frozenset[int]
    finite: bool | Tensor
    edited: bool = False
    found: bool | Tensor | None = None
    loss: int = 0
    shares: Mapping[int, Share] = MappingProxyType({})
    """Each loss's part by its number, where the session has several loss scales."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Gradients left by `step(zero_grad=False)`, which carry `scale`."""

    scale: LossScale


Carried = Empty | Scaled | Unscaled | Kept
"""What the gradients of one optimizer carry."""

OF_A_BACKWARD = (Scaled, Unscaled)


def scale_of(carried: Carried) -> LossScale | None:
    """The scale that gradients carry now; None where there are none."""
    if isinstance(carried, Empty):
        return None
    return NoLossScale() if isinstance(carried, Unscaled) else carried.scale


def joining(before: Carried, scale: LossScale, group: frozenset[int], loss: int = 0) -> Scaled:
    """What backward at `scale` makes of it; who shared a loss before the step still does."""
    if isinstance(before, OF_A_BACKWARD):
        group = group | before.group
    return Scaled(scale, group, loss=loss)


class StepState(NamedTuple):
    """All that a session remembers from one call to the next; each call replaces it."""

    loss_scale: LossScale
    skips: SkipCount
    carried: tuple[Carried, ...]
    """One an optimizer."""
    steps: int = 0
    told: frozenset[str] = frozenset()
    """What was said once."""
    more_scales: tuple[LossScale, ...] = ()
    """The scales of the second and further losses."""

    @property
    def loss_scales(self) -> tuple[LossScale, ...]:
        """The scale of every loss, by its number."""
        return self.loss_scale, *self.more_scales

    @property
    def needs_amax(self) -> bool:
        """Whether a scale asks for the gradients' largest magnitude."""
        if not self.more_scales:
            return self.loss_scale.needs_amax
        return any(scale.needs_amax for scale in self.loss_scales)

    def rescaled(self, loss: int, scale: LossScale) -> StepState:
        """The state in which loss number `loss` has `scale`."""
        if scale is self.loss_scales[loss]:
            return self
        first, *more = (*self.loss_scales[:loss], scale, *self.loss_scales[loss + 1 :])
        return StepState(first, self.skips, self.carried, self.steps, self.told, tuple(more))

    def counted(self) -> StepState:
        """The state after one more step."""
        return self._replace(steps=self.steps + 1)

    def stepped(self, index: int, value: Carried) -> StepState:
        """The state after one more step, which left optimizer `index` carrying `value`."""
        carried = (*self.carried[:index], value, *self.carried[index + 1 :])
        return StepState(self.loss_scale, self.skips, carried, self.steps + 1, self.told, self.more_scales)

    @property
    def awaits_step(self) -> bool:
        """Whether an optimizer has gradients of a backward that no step has used."""
        return any(isinstance(carried, OF_A_BACKWARD) for carried in self.carried)

    def carrying(self, index: int, value: Carried) -> StepState:
        """The state in which optimizer `index` carries `value`."""
        carried = (*self.carried[:index], value, *self.carried[index + 1 :])
        return StepState(self.loss_scale, self.skips, carried, self.steps, self.told, self.more_scales)

    def emptied(self) -> StepState:
        """The state in which no optimizer has gradients of ours."""
        return self._replace(carried=(EMPTY,) * len(self.carried))

    def saved(self) -> dict[str, Any]:
        """As plain values; gradients are not part of it."""
        more = [scale.state_dict() for scale in self.more_scales]
        return {
            "loss_scale": self.loss_scale.state_dict(),
            **({"more_loss_scales": more} if more else {}),
            "steps": self.steps,
            "skips_in_row": self.skips.in_row,
            "skips": self.skips.total,
        }

    def restored(self, state: Mapping[str, Any]) -> StepState:
        """The state that `saved` gave, without gradients; CheckpointError where it cannot be read."""
        try:
            scale = LossScale.from_state(state["loss_scale"])
            more = tuple(LossScale.from_state(one) for one in state.get("more_loss_scales", ()))
            steps, in_row, total = (int(state[key]) for key in ("steps", "skips_in_row", "skips"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"a session state that cannot be read ({error}): save it again") from error
        if len(more) != len(self.more_scales):
            raise CheckpointError(
                f"this state was saved with {1 + len(more)} loss scales, the session has "
                f"{len(self.loss_scales)}: prepare with as many to resume"
            )
        skips = replace(self.skips, in_row=in_row, total=total, steps=steps)
        return self.emptied()._replace(loss_scale=scale, more_scales=more, skips=skips, steps=steps)


def marks(optimizer: torch.optim.Optimizer) -> list[GradientVersion]:
    """What tells later whether the gradients of an optimizer were changed in place; reads no values."""
    weights = (weight_of(p) for p in parameters_of(optimizer))
    return [(id(g), g.dtype, g._version) for w in weights if (g := w.grad) is not None]


def changed(before: Collection[GradientVersion], now: Sequence[GradientVersion]) -> bool:
    """Whether a gradient that is still the same tensor was changed in place."""
    versions = {mark[:2]: mark[2] for mark in before}
    return any(versions.get(mark[:2], mark[2]) != mark[2] for mark in now)
