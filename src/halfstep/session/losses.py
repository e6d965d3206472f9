"""Several losses, each with a loss scale of its own: whose gradients held inf, and which scale answers.

One loss's gradients carry its scale until the step. Where a second loss reaches the same optimizer, those
that are there are unscaled, set aside and added again afterwards, so that each loss is looked at alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from halfstep.distributed import local_of
from halfstep.errors import ConfigError, show
from halfstep.gradients.stats import AnyStats
from halfstep.optim.masters import weight_of
from halfstep.scaling.loss_scale import LossScale
from halfstep.session.gradient_state import OF_A_BACKWARD, Carried, Scaled, Share, StepState, Unscaled
from halfstep.session.steppers import Stepper, parameters_of
from halfstep.trees import all_finite

Flag = bool | Tensor


def check_loss_id(loss_id: int, count: int) -> None:
    """Raise ConfigError unless it is the number of one of `count` losses."""
    whole = isinstance(loss_id, int) and not isinstance(loss_id, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not (whole and 0 <= loss_id < count):
        raise ConfigError(
            f"loss_id={show(loss_id)}: this session has {count} loss scale{'s' * (count > 1)}, "
            "numbered from 0; give prepare(loss_scale=[...]) one for each loss"
        )


def mixing(state: StepState, indices: Sequence[int], loss: int) -> list[int]:
    """Which of these optimizers hold gradients of another loss, to which this one's would be added."""
    return [i for i in indices if _mixes(state.carried[i], loss)] if state.more_scales else []


def _mixes(before: Carried, loss: int) -> bool:
    if isinstance(before, Unscaled):
        return bool(before.shares)
    return isinstance(before, Scaled) and before.loss != loss


def look(stepper: Stepper, scale: LossScale, group: frozenset[int], device: torch.device) -> Share:
    """Unscale an optimizer's gradients, all of one loss, where they lie, in fp32; what they held."""
    if not stepper.releases and not stepper.gradients():
        return Share(scale, group, False)
    inverse = scale.inverse(device)
    peak = stepper.measure(inverse, True).amax if scale.needs_amax else None
    found = stepper.unscale(inverse)
    return Share(scale, group, bool(found) if device.type == "cpu" else found, peak)


def settled(before: Scaled, loss_scales: int, share: Share, edited: bool) -> Unscaled:
    """What gradients of one loss are after `look`."""
    known = before.found is not None
    whole = share
    if before.found is not None:
        whole = share._replace(found=share.found | before.found, settled=True)
    shares = {before.loss: whole} if loss_scales > 1 else {}
    found = None if known and loss_scales > 1 else before.found
    finite = inverse(share.found)
    return Unscaled(before.scale, before.group, finite, edited, found, before.loss, shares)


def joined(before: Unscaled, loss: int, share: Share) -> Unscaled:
    """The same with one loss's share added; a loss that is there already found what either did."""
    mine = before.shares.get(loss)
    if mine is not None:
        peak = _larger(mine.amax, share.amax)
        share = Share(share.scale, mine.group | share.group, mine.found | share.found, peak)
    shares = {**before.shares, loss: share}
    finite = before.finite & inverse(share.found)
    return before._replace(scale=share.scale, group=before.group | share.group, finite=finite, shares=shares)


@contextmanager
def set_aside(steppers: Sequence[Stepper]) -> Generator[list[tuple[Tensor, Tensor]]]:
    """Within, the optimizers' weights have no gradients; gives what they had. An error puts it back."""
    weights = [weight_of(p) for stepper in steppers for p in parameters_of(stepper.optimizer)]
    before = [(w, w.grad) for w in weights if w.grad is not None]
    for w, _ in before:
        w.grad = None
    try:
        yield before
    except BaseException:
        for w, grad in before:
            w.grad = grad
        raise


@torch.no_grad()
def add_again(before: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add what was set aside to the gradients of now."""
    here = [(w, grad) for w, grad in before if w.grad is not None]
    for w, grad in before:
        if w.grad is None:
            w.grad = grad
    dense = [(w.grad, grad) for w, grad in here if _dense(w.grad) and _dense(grad)]
    if dense:
        torch._foreach_add_(*map(list, zip(*dense)))  # pyright: ignore
    for w, grad in here:
        if not (_dense(w.grad) and _dense(grad)):
            w.grad = w.grad + grad  # pyright: ignore[reportOptionalOperand]


def shares_of(pending: Scaled | Unscaled, measured: AnyStats) -> dict[int, Share]:
    """Each loss's part of gradients about to be used; inf that no loss brought counts with all of them."""
    bad = inverse(measured.finite)
    if not (isinstance(pending, Unscaled) and pending.shares):
        known = pending.found is not None
        found = bad if isinstance(pending, Scaled) else bad | inverse(pending.finite)
        found = found | pending.found if pending.found is not None else found
        return {pending.loss: Share(pending.scale, pending.group, found, measured.amax, known)}
    brought = _any([share.found for share in pending.shares.values()])
    later = bad & inverse(brought)
    return {loss: share._replace(found=share.found | later) for loss, share in pending.shares.items()}


def settle(
    state: StepState,
    steppers: Sequence[Stepper],
    index: int,
    shares: Mapping[int, Share],
    device: torch.device,
    over_ranks: Callable[[Tensor], Tensor] | None,
) -> tuple[StepState, dict[int, Share], Flag]:
    """Whether a step is to be skipped, and each loss's share as all see it; who shares a loss is told.

    A loss found inf where any optimizer that it trains did, on any rank where there is `over_ranks` (law 3).
    """
    if len(shares) == 1 and over_ranks is None:
        [share] = shares.values()
        if len(share.group) == 1:  # nobody to ask, nobody to tell
            return state, dict(shares), share.found
    open_ = {loss: share for loss, share in shares.items() if not share.settled}
    siblings = {loss: _siblings(state, index, loss, share.group) for loss, share in open_.items()}
    flags: list[Flag] = []
    for loss, share in open_.items():
        theirs = [_found(held, loss, steppers[other], device) for other, held in siblings[loss]]
        flags.append(_any([share.found, *theirs]))
    if over_ranks is not None and flags:
        told = over_ranks(torch.stack([torch.as_tensor(flag, device=device) for flag in flags]))
        flags = [bool(flag) if isinstance(mine, bool) else flag for mine, flag in zip(flags, told)]
    answered = {
        loss: share if found is share.found else share._replace(found=found)
        for (loss, share), found in zip(open_.items(), flags)
    }
    for loss, share in answered.items():
        for other, _ in siblings[loss]:
            state = state.carrying(other, _told(state.carried[other], loss, share.found))
    known = {**shares, **answered}
    return state, known, _any([share.found for share in known.values()])


def adjusted(state: StepState, shares: Mapping[int, Share]) -> StepState:
    """The state in which the scale of each of these losses has taken in what was found, once."""
    for loss, share in shares.items():
        if not share.settled:
            state = state.rescaled(loss, state.loss_scales[loss].adjust(inverse(share.found), share.amax))
    return state


def carried_value(pending: Scaled | Unscaled) -> float | Tensor:
    """The scale that a step's gradients carried; of several losses the lowest, read only on the host."""
    if not isinstance(pending, Unscaled) or not pending.shares:
        return pending.scale.value
    scales = [share.scale for share in pending.shares.values()]
    values = [scale.value for scale in scales]
    on_device = [value for value in values if isinstance(value, Tensor)]
    if len(values) == 1 or not on_device:
        return values[0] if len(values) == 1 else min(map(float, values))
    return torch.stack([scale.tensor(on_device[0].device) for scale in scales]).amin()


def inverse(flag: Flag) -> Flag:
    """Not, of a bool or a tensor."""
    return ~flag if isinstance(flag, Tensor) else not flag


def _siblings(
    state: StepState, index: int, loss: int, group: frozenset[int]
) -> list[tuple[int, Scaled | Unscaled]]:
    """Other optimizers that still hold gradients of the loss."""
    found: list[tuple[int, Scaled | Unscaled]] = []
    for other in sorted(group - {index}):
        carried = state.carried[other]
        if isinstance(carried, Unscaled) and carried.shares:
            if loss in carried.shares:
                found.append((other, carried))
        elif isinstance(carried, OF_A_BACKWARD) and carried.loss == loss:
            found.append((other, carried))
    return found


def _found(theirs: Scaled | Unscaled, loss: int, stepper: Stepper, device: torch.device) -> Flag:
    if isinstance(theirs, Unscaled) and theirs.shares:
        return theirs.shares[loss].found
    bad = ~all_finite(stepper.gradients())
    return bool(bad) if device.type == "cpu" else bad.to(device)


def _told(carried: Carried, loss: int, found: Flag) -> Carried:
    if isinstance(carried, Unscaled) and carried.shares:
        share = carried.shares[loss]._replace(found=found, settled=True)
        return carried._replace(shares={**carried.shares, loss: share})
    return carried._replace(found=found) if isinstance(carried, OF_A_BACKWARD) else carried


def _any(flags: Sequence[Flag]) -> Flag:
    result: Flag = False
    for flag in flags:
        result = result | flag
    return result


def _dense(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout == torch.strided and local_of(grad) is grad


def _larger(first: float | Tensor | None, second: float | Tensor | None) -> float | Tensor | None:
    if first is None or second is None:
        return first if second is None else second
    if isinstance(first, Tensor):
        return first.maximum(torch.as_tensor(second, device=first.device))
    return max(first, float(second))
