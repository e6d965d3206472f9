"""The state of a session between calls, as one frozen value, and what a call does to it and to gradients.

A round lasts from the first backward to the last step: the losses of which an optimizer holds gradients that
it has not stepped on, and the scale that each optimizer's gradients carry.

event             an optimizer's gradients afterwards
backward(loss)    carry the loss's scale; those there already are brought to it
unscale           carry none, and are known to be finite or not; an error where they are not of a backward
step              are gone, or stay with zero_grad=False; under a scale an error without a backward
optimizer.step()  as before; refused where gradients carry a scale
load_state_dict, revert   nothing is known of them

Where gradients of a second loss with a scale of its own would be added, those that are there are unscaled,
stashed and added again afterwards, so that each loss is checked alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from halfstep.distributed import local_of
from halfstep.errors import CheckpointError, ScalerStateError
from halfstep.gradients.stats import AnyStats, found_inf_of
from halfstep.optim.masters import weight_of
from halfstep.scaling.loss_scale import LossScale, NoLossScale
from halfstep.scaling.skips import SkipCount
from halfstep.session.checks import check_gradients
from halfstep.session.steppers import Stepper, weights_of
from halfstep.torch_private import foreach_mul_
from halfstep.trees import all_finite

Flag = bool | Tensor
Sizes = tuple[int, ...]
"""How many parameters each group of an optimizer has."""


class Loss(NamedTuple):
    """A loss of the round, or several of one scale that reach the same optimizers."""

    number: int
    """Which of the session's loss scales is its."""
    scale: LossScale
    pending: frozenset[int]
    """The optimizers that it trains and that have not stepped."""
    unchecked: frozenset[int]
    """Those of them whose gradients of it nobody has looked at."""
    found_inf: Flag = False
    """Whether inf or NaN was seen in its gradients."""
    amax: float | Tensor | None = None
    """The largest magnitude seen, without the scale; None where its scale does not ask."""
    adjusted: bool = False
    """Whether one of its optimizers has stepped: `found_inf` holds for all, and its scale is adjusted."""


class StepState(NamedTuple):
    """The state of a session from one call to the next; each call replaces it."""

    loss_scales: tuple[LossScale, ...]
    """The scale of every loss, by its number."""
    skips: SkipCount
    gradient_scales: tuple[LossScale | None, ...]
    """What each optimizer's gradients are multiplied by; None where none came through the session."""
    losses: tuple[Loss, ...] = ()
    """Those of the round."""
    steps: int = 0
    warned: frozenset[str] = frozenset()
    """What was said once."""
    leftovers: frozenset[int] = frozenset()
    """Optimizers whose gradients are added to those that another one's loss left, as in a GAN."""
    scales_used: tuple[LossScale, ...] = ()
    """The scales of the first and of the latest backward: what gradients outside the optimizers carry."""
    sizes: tuple[Sizes, ...] = ()
    """Of each optimizer, as far as its parameters are known."""

    @property
    def needs_amax(self) -> bool:
        """Whether a scale asks for the gradients' largest magnitude."""
        return any(scale.needs_amax for scale in self.loss_scales)

    def with_warned(self, text: str) -> StepState:
        """Return the state in which this warning is not issued again."""
        return self._replace(warned=self.warned | {text})

    def with_scale(self, index: int, scale: LossScale | None) -> StepState:
        """Return the state in which optimizer `index` has gradients that carry `scale`."""
        return self._replace(
            gradient_scales=(*self.gradient_scales[:index], scale, *self.gradient_scales[index + 1 :])
        )

    def after_backward(self, indices: Collection[int], number: int) -> StepState:
        """Return the state after a backward of loss `number` over these optimizers."""
        scale, those = self.loss_scales[number], frozenset(indices)
        loss = Loss(number, scale, those, those)
        rest: list[Loss] = []
        for other in self.losses:
            if other.number != number or other.pending.isdisjoint(those):
                rest.append(other)
                continue
            unchecked = loss.unchecked | (other.pending if other.adjusted else other.unchecked)
            loss = loss._replace(pending=loss.pending | other.pending, unchecked=unchecked)
            if not other.adjusted:
                loss = loss._replace(
                    found_inf=either(loss.found_inf, other.found_inf), amax=_larger(loss.amax, other.amax)
                )
        gradient_scales = tuple(scale if i in those else old for i, old in enumerate(self.gradient_scales))
        used = (*self.scales_used[:1], scale)
        return self._replace(gradient_scales=gradient_scales, losses=(*rest, loss), scales_used=used)

    def after_step(
        self, index: int, losses: Sequence[Loss], kept_scale: LossScale | None, measured: AnyStats
    ) -> StepState:
        """Return the state after a step on these losses; kept gradients of `index` carry `kept_scale`."""
        scales = [*self.loss_scales]
        for loss in losses:
            if not loss.adjusted:
                finite = finite_of(loss.found_inf, measured)
                scales[loss.number] = scales[loss.number].adjust(finite, loss.amax)
        adjusted_losses = [loss._replace(adjusted=True) for loss in losses]
        others = [loss for loss in self.losses if index not in loss.pending]
        rest = self._without(index, (*others, *adjusted_losses), kept_scale)
        return self._replace(loss_scales=(*scales,), steps=self.steps + 1, **rest)

    def without(self, index: int, kept_scale: LossScale | None = None) -> StepState:
        """Return the state in which optimizer `index` has no gradients, or some that carry `kept_scale`."""
        return self._replace(**self._without(index, self.losses, kept_scale))

    def _without(self, index: int, losses: Sequence[Loss], kept_scale: LossScale | None) -> dict[str, Any]:
        others = [
            loss._replace(pending=pending, unchecked=loss.unchecked - {index})
            for loss in losses
            if (pending := loss.pending - {index})
        ]
        gradient_scales = (*self.gradient_scales[:index], kept_scale, *self.gradient_scales[index + 1 :])
        leftovers = self.leftovers - {index}
        return {"losses": (*others,), "leftovers": leftovers, "gradient_scales": gradient_scales}

    def without_gradients(self) -> StepState:
        """Return the state in which no optimizer has gradients of ours."""
        none = (None,) * len(self.gradient_scales)
        return self._replace(gradient_scales=none, losses=(), leftovers=frozenset(), scales_used=())

    def to_plain(self) -> dict[str, Any]:
        """Return the state as plain values, without gradients."""
        first, *more = (scale.state_dict() for scale in self.loss_scales)
        return {
            "loss_scale": first,
            **({"more_loss_scales": more} if more else {}),
            "steps": self.steps,
            "skips_in_row": self.skips.in_row,
            "skips": self.skips.total,
        }

    def from_plain(self, state: Mapping[str, Any]) -> StepState:
        """Return the state that `saved` gave, without gradients; CheckpointError where it cannot be read."""
        try:
            saved = (state["loss_scale"], *state.get("more_loss_scales", ()))
            scales = tuple(map(LossScale.from_state, saved))
            steps, in_row, total = (int(state[key]) for key in ("steps", "skips_in_row", "skips"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"a session state that cannot be read ({error}): save it again") from error
        if len(scales) != len(self.loss_scales):
            raise CheckpointError(
                f"this state was saved with {len(scales)} loss scales, the session has "
                f"{len(self.loss_scales)}: prepare with as many to resume"
            )
        skips = replace(self.skips, in_row=in_row, total=total, steps=steps)
        return self.without_gradients()._replace(loss_scales=scales, skips=skips, steps=steps)


# ---- parameters that an optimizer is given later --------------------------------------------------------


def sizes_of(optimizer: torch.optim.Optimizer) -> Sizes:
    """Return how many parameters each of its groups has."""
    return tuple([len(group["params"]) for group in optimizer.param_groups])


def weights_added_since(optimizer: torch.optim.Optimizer, before: Sizes) -> list[Tensor]:
    """Return the weights after the first `before` parameters of each group."""
    old_sizes = (*before, *(0 for _ in optimizer.param_groups))
    return [weight_of(p) for n, group in zip(old_sizes, optimizer.param_groups) for p in group["params"][n:]]


def unscale_added(
    state: StepState, optimizer: torch.optim.Optimizer, index: int, name: Callable[[Tensor], str]
) -> StepState:
    """Unscale the gradients of weights that optimizer `index` was given since, as its others are.

    Backward gives gradients to weights that are in no optimizer as well; they add up there, and carry the
    scale of every backward so far, where that was one. ScalerStateError where it was not; gradients that hold
    inf or NaN are left to the step, which is skipped.
    """
    sizes = sizes_of(optimizer)
    added, used = weights_added_since(optimizer, state.sizes[index]), state.scales_used
    weights = [w for w in added if w.grad is not None and bool(local_of(w.grad).any())]
    gradients = [cast(Tensor, w.grad) for w in weights]
    several = len(state.loss_scales) > 1 or (bool(used) and used[0].read() != used[-1].read())
    if several and weights and all_finite(gradients):
        raise ScalerStateError(
            f"parameter {name(weights[0])!r} was added to optimizer {index} ({type(optimizer).__name__}) "
            "with a gradient that backward passes of several loss scales have added up: set its grad to None "
            "before the first backward pass that it is to train by"
        )
    state = state._replace(sizes=(*state.sizes[:index], sizes, *state.sizes[index + 1 :]))
    gradient_scale = state.gradient_scales[index]
    if weights and used and gradient_scale is None:
        return state.with_scale(index, used[-1])
    if weights and used and gradient_scale is not None and gradient_scale is not used[-1]:
        for w, gradient in zip(weights, gradients):
            w.grad_dtype = None  # any: torch otherwise wants the weight's own
            w.grad = gradient.float()
        rescale([cast(Tensor, w.grad) for w in weights], used[-1], gradient_scale)
    return state


def rescale(gradients: Sequence[Tensor], old: LossScale, new: LossScale) -> None:
    """Multiply gradients that carry `old`, in place, so that they carry `new`."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, those in by_device.items():
        foreach_mul_(those, new.tensor(device) * old.inverse(device))


# ---- backward -------------------------------------------------------------------------------------------


def begin_backward(
    state: StepState, steppers: Sequence[Stepper], indices: Collection[int], number: int
) -> StepState:
    """Rescale existing gradients to the scale of loss `number`, before its backward."""
    new = state.loss_scales[number]
    for index in indices:
        old = state.gradient_scales[index]
        gradients = steppers[index].gradients() if old is not None and old is not new else []
        if old is not None and gradients:
            rescale(gradients, old, new)
    return state.after_backward(indices, number)


def find_conflicting(state: StepState, indices: Collection[int], number: int) -> list[int]:
    """Return which of these optimizers hold gradients of another loss, to which this one's would be added."""
    if len(state.loss_scales) == 1:
        return []
    others = [loss.pending - (loss.unchecked if loss.number == number else set()) for loss in state.losses]
    return [index for index in indices if any(index in pending for pending in others)]


@contextmanager
def stash_gradients(weights: Collection[Tensor], add: bool) -> Generator[None]:
    """Stash the gradients of these weights for the block; put them back, plus the new ones with `add`."""
    before = [(w, w.grad) for w in weights]
    for w in weights:
        w.grad = None
    new: list[Tensor | None] = [None] * len(before)
    try:
        yield
        new = [w.grad if add else None for w in weights]
    finally:
        for (w, old), more in zip(before, new):
            w.grad = more if old is None else old if more is None else old.detach() + more.detach()


# ---- unscale and step -----------------------------------------------------------------------------------


def losses_to_step(state: StepState, stepper: Stepper, index: int) -> list[Loss]:
    """Return the losses of its gradients; ScalerStateError where there are none, or none of ours."""
    losses = [loss for loss in state.losses if index in loss.pending]
    check_gradients(stepper, bool(losses))
    if losses:
        return losses
    if not all(isinstance(scale, NoLossScale) for scale in state.loss_scales):
        raise ScalerStateError(
            "step() found gradients that were not scaled: use amp.backward(loss), not loss.backward()"
        )
    return [Loss(0, state.loss_scales[0], frozenset({index}), frozenset({index}))]


def unscale_gradients(state: StepState, stepper: Stepper, index: int, device: torch.device) -> StepState:
    """Divide out the scale that an optimizer's gradients carry, in fp32, unless that was done."""
    scale = state.gradient_scales[index]
    if scale is None or not any(index in loss.unchecked for loss in state.losses):
        return state
    found_inf, amax = False, None
    if stepper.releases or stepper.gradients():
        inv_scale = scale.inverse(device)
        amax = stepper.measure(stepper.collect(), inv_scale, True).amax if scale.needs_amax else None
        found_inf = stepper.unscale(inv_scale)
        found_inf = bool(found_inf) if device.type == "cpu" else found_inf
    losses = [
        loss
        if index not in loss.unchecked
        else loss._replace(
            unchecked=loss.unchecked - {index},
            found_inf=either(loss.found_inf, found_inf),
            amax=_larger(loss.amax, amax),
        )
        for loss in state.losses
    ]
    return state._replace(losses=tuple(losses)).with_scale(index, NoLossScale())


def check_unscaling(
    state: StepState,
    optimizers: Sequence[torch.optim.Optimizer],
    index: int,
    name: Callable[[Tensor], str],
) -> None:
    """Raise ScalerStateError where gradients of `index` that lie unscaled are also another optimizer's.

    That one would divide its loss scale out of them once more.
    """
    scaled = [n for n, scale in enumerate(state.gradient_scales) if not isinstance(scale, NoLossScale | None)]
    if index not in scaled or len(scaled) == 1:
        return
    mine = {w for w in weights_of(optimizers[index]) if w.grad is not None}
    for other in scaled:
        shared = mine.intersection(weights_of(optimizers[other])) if other != index else ()
        for weight in shared:
            raise ScalerStateError(
                f"parameter {name(weight)!r} is in optimizers {index} and {other}, and each would divide the "
                "loss scale out of its gradient: step with zero_grad=True and without unscale(), or leave it "
                "in one of them"
            )


def merge_found_inf(
    losses: Sequence[Loss],
    steppers: Sequence[Stepper],
    index: int,
    measured: AnyStats,
    device_of: Callable[[], torch.device],
    over_ranks: Callable[[Tensor], Tensor] | None,
    largest: Callable[[float | Tensor], float | Tensor],
) -> tuple[list[Loss], Flag]:
    """Return each loss of a step with the findings of its gradients, and whether to skip the step.

    A loss found inf if any optimizer that it trains did, on any rank where there is `over_ranks` (law 3);
    `largest` is then that of all ranks' values. `device_of`: where flags of several optimizers or ranks meet.
    Gradients that belong to none of several losses count with all of them.
    """
    before = reduce(either, (loss.found_inf for loss in losses))
    new = found_inf_of(measured)
    new = new if before is False else new & inverse(before)
    merged_losses: list[Loss] = []
    for loss in losses:
        found_inf = either(loss.found_inf, new)
        for other in () if loss.adjusted else sorted(loss.unchecked - {index}):  # nobody has looked at these
            bad = ~all_finite(steppers[other].gradients())
            device = device_of()
            found_inf = either(found_inf, bool(bad) if device.type == "cpu" else bad.to(device))
        amax = measured.amax if index in loss.unchecked else loss.amax
        merged_losses.append(loss._replace(found_inf=found_inf, amax=amax))
    asking = [at for at, loss in enumerate(merged_losses) if not loss.adjusted]
    if over_ranks is not None and asking:
        local_flags = [merged_losses[at].found_inf for at in asking]
        everyone = over_ranks(
            torch.stack([torch.as_tensor(flag, device=device_of()) for flag in local_flags])
        )
        for at, mine, flag in zip(asking, local_flags, everyone):
            amax, needed = merged_losses[at].amax, merged_losses[at].scale.needs_amax
            amax = largest(amax) if needed and amax is not None else amax  # parameters may be each rank's own
            merged_losses[at] = merged_losses[at]._replace(
                found_inf=bool(flag) if isinstance(mine, bool) else flag, amax=amax
            )
    return merged_losses, reduce(either, (loss.found_inf for loss in merged_losses))


def scale_of_gradients(losses: Sequence[Loss]) -> float | Tensor:
    """Return the scale that a step's gradients carried; of several losses the lowest, if on the host."""
    values = [loss.scale.value for loss in losses]
    if len(values) == 1:
        return values[0]
    home = next((value.device for value in values if isinstance(value, Tensor)), None)
    if home is None:
        return min(map(float, values))
    return torch.stack([loss.scale.tensor(home) for loss in losses]).amin()


def inverse(flag: Flag) -> Flag:
    """Return `not`, of a bool or a tensor."""
    return ~flag if isinstance(flag, Tensor) else not flag


def finite_of(found_inf: Flag, measured: AnyStats) -> Flag:
    """Return whether all was finite, without an op where `found_inf` is what was measured."""
    return measured.finite if found_inf is found_inf_of(measured) else inverse(found_inf)


def either(a: Flag, b: Flag) -> Flag:
    """Return an OR, without an op for what is False on the host."""
    return b if a is False else a if b is False else a | b


def _larger(first: float | Tensor | None, second: float | Tensor | None) -> float | Tensor | None:
    if first is None or second is None:
        return first if second is None else second
    if isinstance(first, Tensor):
        return first.maximum(torch.as_tensor(second, device=first.device))
    return max(first, float(second))
