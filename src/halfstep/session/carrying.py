"""The gradients of a session's optimizers: brought to another scale, unscaled, marked, asked what they carry.

Each function gives the next state; what a state means is `gradient_state.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfstep.errors import ScalerStateError
from halfstep.scaling.loss_scale import LossScale, NoLossScale, StaticLossScale
from halfstep.session import losses
from halfstep.session.gradient_state import (
    EMPTY,
    OF_A_BACKWARD,
    Scaled,
    StepState,
    Unscaled,
    changed,
    joining,
    marks,
    scale_of,
)
from halfstep.session.guards import check_gradients
from halfstep.session.steppers import Stepper


def opened(
    state: StepState, steppers: Sequence[Stepper], indices: Sequence[int], group: frozenset[int], loss_id: int
) -> StepState:
    """Note which scale the coming gradients carry; bring older ones to it."""
    scale = state.loss_scales[loss_id]
    for index in indices:
        before = state.carried[index]
        if before is not EMPTY:
            carried = scale_of(before)
            if carried is not None and carried is not scale:
                _rescale(steppers[index], carried, scale)
        state = state.carrying(index, joining(before, scale, group, loss_id))
    return state


def _rescale(stepper: Stepper, old: LossScale, new: LossScale) -> None:
    gradients = stepper.gradients()
    if gradients:
        home = gradients[0].device
        factor = new.tensor(home) * old.inverse(home)
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


def unscaled(state: StepState, steppers: Sequence[Stepper], index: int, device: torch.device) -> StepState:
    """Divide out the scale that an optimizer's gradients carry; nothing where it was done."""
    carried, stepper = state.carried[index], steppers[index]
    if not isinstance(carried, Scaled):
        return state
    edited = changed(carried.marks, marks(stepper.optimizer))
    share = losses.look(stepper, carried.scale, carried.group, device)
    return state.carrying(index, losses.settled(carried, len(state.loss_scales), share, edited))


def ours(state: StepState, steppers: Sequence[Stepper], index: int) -> Scaled | Unscaled:
    """What an optimizer's gradients carry; ScalerStateError where there are none, or none of ours."""
    carried = state.carried[index]
    backward = isinstance(carried, OF_A_BACKWARD)
    check_gradients(steppers[index], backward)
    if backward:
        return carried
    if not all(isinstance(scale, NoLossScale) for scale in state.loss_scales):
        raise ScalerStateError(
            "step() found gradients that were not scaled: use amp.backward(loss), not loss.backward()"
        )
    return Scaled(state.loss_scale, frozenset({index}))


def marked(
    state: StepState, optimizers: Sequence[torch.optim.Optimizer], indices: Sequence[int]
) -> StepState:
    """Note the gradients as they are where they carry a scale, so that later changes are seen."""
    for index in indices:
        seen = state.carried[index]
        if isinstance(seen, Scaled) and seen.scale not in (NoLossScale(), StaticLossScale(1.0)):
            state = state.carrying(index, seen._replace(marks=tuple(marks(optimizers[index]))))
    return state


def was_edited(pending: Scaled | Unscaled, optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients were changed while they carried a scale."""
    if isinstance(pending, Unscaled):
        return pending.edited
    return bool(pending.marks) and changed(pending.marks, marks(optimizer))
