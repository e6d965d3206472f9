"""How each kind of optimizer takes a checked step: one-pass ones, and torch ones with or without masters.

A stepper measures the gradients of one optimizer and then updates or skips. `Session` decides when; what the
numbers mean (scales, ranks, outcomes) is decided there, never here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from halfstep.distributed import is_ordered, local_of, norms_of_stages, whole_norms
from halfstep.distributed.reduce import groups_of_shards
from halfstep.errors import ScalerStateError, UnsupportedError
from halfstep.gradients.decision import Clip, Decision, clip_coefficient
from halfstep.gradients.stats import (
    AnyStats,
    measure_shards,
    measure_whole,
    on_host_if_cpu,
)
from halfstep.gradients.unscale import unscale_
from halfstep.optim.arguments import limits_of
from halfstep.optim.bundles import TensorGroup
from halfstep.optim.loading import MasterHolder
from halfstep.optim.masters import Master, MasterWeights, weight_of
from halfstep.policy.levels import LOW_DTYPES
from halfstep.scaling.grad_scaler import attributes_kept
from halfstep.torch_private import foreach_mul_, step_hooks, takes_scale_and_flag
from halfstep.trees import gradients_of, home_device, move_to, needs_closure, parameters_of, scalar_on


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the model's weights that an optimizer updates, in order; not the masters in its groups."""
    return [weight_of(p) for p in parameters_of(optimizer)]


def goes_by_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is torch's own, which takes one group after the other, each parameter by itself."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


class Update(NamedTuple):
    """The result of an update."""

    unscaled: bool
    """Whether the gradients lie unscaled."""
    found_inf: bool | Tensor
    """Whether it was skipped, on the host where that was read."""
    norm: float | Tensor | None = None
    """What the gradients were clipped by, where it is not what was measured."""


class Stepper:
    """What `Session` needs of an optimizer, whatever its kind, without state; `norm_group` is `prepare`'s."""

    releases = False
    """Whether gradients are applied during backward."""
    fuses = False
    """Whether `update_and_measure` exists: one pass, for a decision that depends on no stats."""

    def __init__(self, optimizer: torch.optim.Optimizer, norm_group: Any = None) -> None:
        self.optimizer: Any = optimizer
        self.norm_group = norm_group

    def has_gradients(self) -> bool:
        """Whether there is anything to step on; changes nothing, reads no values."""
        return any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"])

    def gradients(self) -> list[Tensor]:
        """Return the gradients as backward left them; those of masters widened to fp32."""
        return gradients_of(self.optimizer)

    def round_sums(self) -> None:
        """Round sums to their weights' dtype, once, as ranks do that send 16 bits.

        Sums are those of micro-batches, and of the rows that a sparse gradient repeats.
        """
        if getattr(self.optimizer, "accumulate", None) == "fp32":
            return  # asked for whole sums
        for w in weights_of(self.optimizer):
            if (total := w.grad) is None or w.dtype not in LOW_DTYPES:
                continue
            repeats = total.is_sparse and not total.is_coalesced()
            if repeats or w.grad_dtype is torch.float32:
                total = total.float().coalesce() if repeats else total
                w.grad_dtype = None
                w.grad = total.to(w.dtype)

    def collect(self) -> list[TensorGroup]:
        """Return the tensors of a step where its passes share them; else none."""
        return []

    def limits(self, clip_norm: float | None) -> list[float | None]:
        """Return what the gradients of each parameter group are clipped to."""
        return [clip_norm] * len(self.optimizer.param_groups)

    def measure(self, groups: list[TensorGroup], inv_scale: Tensor | None, needs_amax: bool) -> AnyStats:
        """Return finite flag, norm and largest magnitude of gradients times `inv_scale`; change nothing."""
        raise NotImplementedError

    def update(self, groups: list[TensorGroup], decision: Decision, clears: bool) -> Update:
        """Unscale, clip and update, or skip, as decided.

        `clears`: the gradients are dropped afterwards, so that nobody asks whether they lie unscaled.
        Where they stay, they lie clipped as well after a step that was taken.
        """
        raise NotImplementedError

    def update_and_measure(self, decision: Decision) -> AnyStats:
        """Do `measure` and `update` in one pass, for a step that is taken and not clipped."""
        raise NotImplementedError

    def unscale(self, inv_scale: Tensor) -> Tensor:
        """Multiply the gradients by `inv_scale` where they lie, in fp32; a 0-d flag: one was not finite."""
        return unscale_(self.gradients(), inv_scale)

    def clear(self) -> None:
        """Drop the gradients, 15 us faster than torch's own zero_grad."""
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    def _of_all_stages(self, inv_scale: Tensor | None) -> AnyStats:
        """Return the stats over all ranks of `norm_group`, each of which holds other parameters."""
        params = parameters_of(self.optimizer)
        sets = dict.fromkeys(groups_of_shards(params))
        stats = measure_shards([p.grad for p in params], inv_scale, sets, stages=self.norm_group)
        return on_host_if_cpu(stats)


def _of_all_groups(decision: Decision) -> tuple[Tensor | None, Clip | None, bool | Tensor]:
    """Return inverse scale, clip and skip of a decision that is the same for all groups."""
    return cast(Any, (decision.inv_scale, decision.clips[0], decision.skip))


class OnePassStepper(Stepper):
    """An optimizer of `halfstep.optim`: unscale, clip, skip and update happen in its own single pass."""

    def __init__(self, optimizer: torch.optim.Optimizer, norm_group: Any = None) -> None:
        super().__init__(optimizer, norm_group)
        self.releases = self.optimizer.release is not None
        self.fuses = norm_group is None and not self.releases

    def during_backward(
        self, named: bool, more: bool, inv_scale: Tensor | None
    ) -> AbstractContextManager[None]:
        """Return the region for a backward pass of an optimizer that releases gradients.

        Gradients only add up where the loss is not this optimizer's (`named`) or `more` passes follow; else
        they are applied with `inv_scale`, clipped as the step before was.
        """
        release = self.optimizer.release
        if not named or more:
            return release.pause()
        if release.stats(None) is not None:
            raise ScalerStateError(
                "backward() ran again before step(), but gradients were released and applied already: pass "
                "more=True to every backward() of a step but the last. Where an interrupt came between "
                "backward() and step(), call step() once before you go on"
            )
        release.configure(inv_scale, release.clip_norm)
        return nullcontext()

    def collect(self) -> list[TensorGroup]:
        """Return what has a gradient, put together by how it is stored."""
        return self.optimizer._tensor_groups()

    def limits(self, clip_norm: float | None) -> list[float | None]:
        """Return `clip_norm`, or what the groups say; released gradients are clipped to it from now on."""
        if self.releases:
            self.optimizer.release.clip_norm = clip_norm
        return limits_of(self.optimizer.param_groups, clip_norm)

    def measure(self, groups: list[TensorGroup], inv_scale: Tensor | None, needs_amax: bool) -> AnyStats:
        """Measure by one pass of the optimizer's kernels over the gradients."""
        if self.norm_group is not None:
            return self._of_all_stages(inv_scale)
        return on_host_if_cpu(self.optimizer._stats_of(groups, inv_scale))

    def update(self, groups: list[TensorGroup], decision: Decision, clears: bool) -> Update:
        """Update by one pass of the optimizer's kernels over weights, gradients and states."""
        self.optimizer.step(decision=decision, groups=groups)
        return Update(False, decision.skip)

    def update_and_measure(self, decision: Decision) -> AnyStats:
        """Measure and update in one pass over gradients, weights and states."""
        stats = self.optimizer.step(decision=decision, measures=True)
        if stats is None:  # a wrapper around the optimizer's step kept them
            stats = self.optimizer._stats_of(self.collect(), decision.inv_scale)
        return on_host_if_cpu(stats)

    def clear(self) -> None:
        """Drop the gradients, and the stats of those that were released."""
        super().clear()
        if self.releases:
            self.optimizer.release.forget()

    def unscale(self, inv_scale: Tensor) -> Tensor:
        """Multiply the gradients by `inv_scale` where they lie, in fp32; a 0-d flag: one was not finite."""
        if self.releases:
            raise UnsupportedError(
                "gradients were released and applied during backward: build the optimizer without "
                "release_gradients to change them before the step"
            )
        for p in parameters_of(self.optimizer):
            if p.grad is not None and p.grad.dtype in LOW_DTYPES:
                p.grad_dtype = None  # any: torch otherwise wants the parameter's own
                p.grad = p.grad.float()
        return unscale_(self.gradients(), inv_scale)


class TorchStepper(Stepper):
    """A torch optimizer, with or without masters; where it cannot skip on the device one flag is read.

    `plain`: at O0 gradients are clipped by torch's own function, by the norm that it takes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: MasterWeights | None = None,
        ordered: bool = False,
        norm_group: Any = None,
        plain: bool = False,
    ) -> None:
        super().__init__(optimizer, norm_group)
        self._masters, self._ordered, self._plain = masters, ordered, plain
        self._needs_closure = needs_closure(optimizer)

    def has_gradients(self) -> bool:
        """Whether there is anything to step on; a master's own gradient would be widened by the look."""
        groups = self.optimizer.param_groups
        return any(weight_of(p).grad is not None for group in groups for p in group["params"])

    def measure(self, groups: list[TensorGroup], inv_scale: Tensor | None, needs_amax: bool) -> AnyStats:
        """Read the gradients once, twice where the largest magnitude is asked for."""
        if self._needs_closure:
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} needs a closure, to compute the loss several times a step, "
                "which a session's step does not run: use bf16 at O1 and call its own step(closure)"
            )
        if self._masters is not None and not self._can_part(self._masters):
            self._masters.link.widen()
        if self.norm_group is not None:
            return self._of_all_stages(inv_scale)
        grads = [w.grad for w in weights_of(self.optimizer) if w.grad is not None]
        return on_host_if_cpu(measure_whole(grads, inv_scale, needs_amax=needs_amax))

    def update(self, groups: list[TensorGroup], decision: Decision, clears: bool) -> Update:
        """Unscale and clip in place, then the optimizer's own step; both within it where it takes a flag."""
        if clears and self._masters is not None and self._can_part(self._masters):
            return self._update_in_parts(self._masters, decision)
        inv_scale, clip, skip = _of_all_groups(decision)
        if isinstance(skip, Tensor) and self._skips_on_device():
            if not clears and inv_scale is not None:  # those that stay carry no scale, skipped or not
                unscale_(self.gradients(), inv_scale)
                inv_scale = None
            self._step_with_flag(inv_scale, clip, skip)
            return Update(True, skip)
        if skip:
            return Update(False, True)
        if inv_scale is not None:
            unscale_(self.gradients(), inv_scale)
        norm = None if clip is None else self._clip(clip, self.gradients())
        self.optimizer.step()
        return Update(True, False, norm)

    def _can_part(self, masters: MasterWeights) -> bool:
        """Whether fp32 copies of the gradients need not all be there at once, and would be many.

        So it is where the step is torch's own and all gradients are dense and of whole parameters.
        """
        o = self.optimizer
        if self.norm_group is not None or not masters.link.is_large() or not goes_by_groups(o):
            return False
        hooks = (hook for held in step_hooks(o) for hook in held.values())
        return all(hook.__module__.startswith("halfstep.") for hook in hooks) and all(
            (g := w.grad) is None or (local_of(g) is g and not g.is_sparse and g.dtype.itemsize <= 4)
            for w in weights_of(o)
        )

    def _update_in_parts(self, masters: MasterWeights, decision: Decision) -> Update:
        """Do `update` with gradients widened, unscaled and clipped a bounded number at a time."""
        inv_scale, clip, skip = _of_all_groups(decision)

        def change(grads: list[Tensor]) -> None:
            if inv_scale is not None:
                unscale_(grads, inv_scale)
            self._clip(clip, grads)

        if isinstance(skip, Tensor) and self._skips_on_device():
            with masters.link.in_parts(lambda grads: None):
                self._step_with_flag(inv_scale, clip, skip)
            return Update(True, skip)
        if skip:
            return Update(False, True)
        wide = [p.grad for p in parameters_of(self.optimizer) if type(p) is not Master and p.grad is not None]
        if wide:
            change(wide)
        with masters.link.in_parts(change):
            self.optimizer.step()
        return Update(True, False)

    def _skips_on_device(self) -> bool:
        """Whether a flag on the device can skip the step: torch's fused optimizers, of whole parameters.

        Where some lie on the host torch's copy of the flag is used there before it has arrived.
        """
        if not takes_scale_and_flag(self.optimizer):
            return False
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                # The first step of torch's fused SGD leaves momentum unwritten where it is skipped.
                begins = group.get("momentum") and state.get(p, {}).get("momentum_buffer") is None
                grad = weight_of(p).grad
                if grad is not None and (begins or grad.is_cpu or local_of(grad) is not grad):
                    return False
        return all(group.get("fused") for group in self.optimizer.param_groups)

    def _step_with_flag(self, inv_scale: Tensor | None, clip: Clip | None, found_inf: Tensor) -> None:
        """Step by torch's fused pass, which divides by the scale, clips and skips by attributes it reads."""
        values: dict[str, Tensor] = {"found_inf": found_inf.float()}
        factor = inv_scale
        if clip is not None:
            coefficient = scalar_on(clip_coefficient(*clip), torch.float32, found_inf.device)
            factor = coefficient if inv_scale is None else move_to(inv_scale, found_inf.device) * coefficient
        if factor is not None:
            values["grad_scale"] = factor.reciprocal()
        with attributes_kept(self.optimizer):
            vars(self.optimizer).update(values)
            self.optimizer.step()

    def _clip(self, clip: Clip | None, gradients: list[Tensor]) -> Tensor | None:
        """Clip gradients to a norm, if any; returns their own where it is not the one measured."""
        if clip is None:
            return None
        norm, clip_norm = clip
        placed = any(local_of(g) is not g for g in gradients)
        sparse = any(g.is_sparse for g in gradients)
        whole = not placed and not sparse and self.norm_group is None
        if whole and self._plain:
            return nn.utils.clip_grad_norm_(parameters_of(self.optimizer), clip_norm)
        if not whole and not sparse and (self._ordered or not any(groups_of_shards(gradients))):
            ordered = self._norm_of_one_process(gradients)
            norm = torch.where(ordered.isinf(), scalar_on(norm, ordered.dtype, ordered.device), ordered)
        # else what was measured: torch's own has no norm of sparse gradients, and rounds that of each shard
        wide = any(g.dtype in (torch.float64, torch.complex128) for g in gradients)
        home = home_device(gradients)
        norm = scalar_on(norm, torch.float64 if wide else torch.float32, home)
        coefficient = scalar_on(clip_coefficient(norm, clip_norm), norm.dtype, home)
        for device in dict.fromkeys(g.device for g in gradients):
            factor = move_to(coefficient, device)
            mine = [local_of(g) for g in gradients if g.device == device]
            if sparse:
                for gradient in mine:
                    gradient.mul_(factor)
            else:
                foreach_mul_(mine, factor)
        return None

    def _norm_of_one_process(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm that `clip_grad_norm_` computes of whole gradients of all stages, bit for bit."""
        norms = whole_norms(gradients)
        if self.norm_group is not None:
            norms = norms_of_stages(norms, self.norm_group)
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device="cpu")


def steppers_of(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Mapping[int, MasterWeights],
    norm_group: Any,
    plain: bool,
) -> list[Stepper]:
    """Return the stepper of each optimizer; `norm_group` is `prepare`'s, `plain` at O0."""
    ordered = any(is_ordered(model) for model in models)
    return [
        OnePassStepper(optimizer, norm_group)
        if isinstance(optimizer, MasterHolder)
        else TorchStepper(optimizer, masters.get(index), ordered, norm_group, plain)
        for index, optimizer in enumerate(optimizers)
    ]
