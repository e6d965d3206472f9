"""What a session refuses or warns of: wrong arguments, steps past it, missing, foreign or bad gradients.

Every function checks before anything changes; the messages to users are here too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from halfstep.convert.sharded import shards_of
from halfstep.distributed import local_of
from halfstep.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    ScalerStateError,
    UnsupportedError,
    show,
    warn,
)
from halfstep.names import named_parameters
from halfstep.numerics.uncast import zero_epsilons
from halfstep.optim.loading import MasterHolder
from halfstep.optim.masters import weight_of
from halfstep.policy.levels import LOW_DTYPES, Level
from halfstep.policy.policy import Policy
from halfstep.scaling.loss_scale import LossScale, NoLossScale, StaticLossScale
from halfstep.session.precision import Precision
from halfstep.session.steppers import Stepper, weights_of
from halfstep.trees import each_parameter

if TYPE_CHECKING:
    from halfstep.session.round import Loss

LEFTOVER_GRADIENTS = (
    "the gradients of this {} (optimizer {}) are the sum of its own loss's and of what the backward() of "
    "another loss left there. Call its zero_grad() before its backward(), or, of several optimizers, name "
    "the one that a loss trains: amp.backward(loss, optimizer) (said once)"
)

BROKEN_OFF = (
    "halfstep: this backward() broke off, so the gradients of its optimizers, those of earlier passes since "
    "their step too, were cleared: no step can take a part of them"
)
"""A note of the error that it broke off with."""

SKIPPED_IN_A_ROW = 5
SKIPPING = (
    "{} steps in a row were skipped, up to step {}: their gradients hold inf or NaN{}. A loss scale that is "
    "finding its value skips a few at the start; more come of NaN in the data or of an op that overflows: "
    "`halfstep doctor` or `amp.replayable` name it (said once; {} in a row raise LossScaleCollapsed)"
)

UNSCALED = (
    "{}.step() was called on gradients that did not come through the session and do not carry its loss "
    "scale: small ones are lost in fp16. Write amp.backward(loss); amp.step() for loss.backward(); "
    "optimizer.step(), or give prepare loss_scale='none' where a GradScaler has one (said once)"
)


# ---- arguments ------------------------------------------------------------------------------------------


def check_loss_id(loss_id: int, count: int) -> None:
    """Raise ConfigError unless it is the number of one of `count` losses."""
    whole = isinstance(loss_id, int) and not isinstance(loss_id, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not (whole and 0 <= loss_id < count):
        raise ConfigError(
            f"loss_id={show(loss_id)}: this session has {count} loss scale{'s' * (count > 1)}, "
            "numbered from 0; give prepare(loss_scale=[...]) one for each loss"
        )


def check_scheduler(scheduler: Any) -> None:
    """Raise ConfigError for what cannot be advanced by `step()` alone."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "step(scheduler=...) got a ReduceLROnPlateau, which wants a metric: "
            "call scheduler.step(metric) yourself, after an evaluation"
        )
    wrong = isinstance(scheduler, (type, torch.optim.Optimizer))
    if wrong or not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"step(scheduler={show(scheduler)}): expected a scheduler made of its class and the optimizer, "
            "such as StepLR(optimizer, 30)"
        )


def check_state(state: Any, level: Level, policy: Policy) -> None:
    """Raise CheckpointError unless it is the state of a session of this level and policy."""
    if not isinstance(state, Mapping) or state.get("format") != 1:
        content = f"the keys {list(state)}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise CheckpointError(f"not a session state of format 1 but {content}: pass what state_dict() gave")
    for what, value in (("level", level.name), ("policy", str(policy))):
        if state.get(what) != value:
            raise CheckpointError(
                f"this state was saved with {what} {state.get(what)}, the session has {value}: prepare with "
                f"that {what} to resume. To go on in another, prepare as it was saved, load, revert(), and "
                "prepare as you like"
            )


def check_parameters(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ConfigError where an optimizer updates what is not the models', or no longer is."""
    mine = {*map(id, each_parameter(models)), *(id(p) for model in models for p in shards_of(model))}
    for optimizer in optimizers:
        params, kind = weights_of(optimizer), type(optimizer).__name__
        strangers = [p for p in params if id(p) not in mine]
        if strangers:
            raise ConfigError(
                f"{len(strangers)} of {len(params)} parameters of this {kind} are not the model's, the first "
                f"of shape {list(strangers[0].shape)}: build the optimizer from the model that is prepared, "
                "after sharding it (fully_shard and tensor parallel replace parameters). To add a layer "
                "amp.revert(), add it to the model and to the optimizer, and prepare again"
            )


def check_expanded(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise UnsupportedError for a weight whose elements share memory: torch's fused steps write past it."""
    for weight in (w for optimizer in optimizers for w in weights_of(optimizer) if w.requires_grad):
        strides = weight.stride() if weight.layout is torch.strided else ()
        if 0 in strides and any(n > 1 and step == 0 for n, step in zip(weight.shape, strides)):
            raise UnsupportedError(
                f"parameter {name_of(models, weight)!r} of shape {[*weight.shape]} is an expanded tensor, "
                "of which no optimizer can update elements that share memory: give the model and its "
                "optimizer a clone() of it, or the tensor before expand() as the parameter"
            )


def check_sharing(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    masters: bool,
    becomes: Mapping[Tensor, torch.dtype] = MappingProxyType({}),
) -> None:
    """Raise ConfigError where two optimizers would each keep an fp32 master of one 16-bit weight.

    `masters`: torch's optimizers have them; `becomes`: the dtypes that weights will have. An update of one
    optimizer moves its own master, which the other takes for the weight only where it changes the 16 bits.
    """
    holders: dict[Tensor, str] = {}
    for index, optimizer in enumerate(optimizers if len(optimizers) > 1 else ()):
        has_masters = isinstance(optimizer, MasterHolder)
        mine = f"optimizer {index} ({type(optimizer).__name__})"
        for group in optimizer.param_groups:
            keeps = group["master"] in ("exact", "fp32") if has_masters else masters
            trains = (w for w in map(weight_of, group["params"]) if w.requires_grad)
            low = (w for w in trains if becomes.get(w, w.dtype) in LOW_DTYPES)
            for weight in low if keeps else ():
                if (other := holders.setdefault(weight, mine)) != mine:
                    raise ConfigError(
                        f"parameter {name_of(models, weight)!r} is in {other} and in {mine}, and each would "
                        "keep an fp32 master of it, in which the updates of the other are lost: leave it in "
                        "one of them, or prepare at O1, where weights are fp32"
                    )


def indices_of(
    optimizers: Sequence[torch.optim.Optimizer],
    named: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[int]:
    """Return the numbers of optimizers, all for None; ConfigError for one that is not of the session."""
    if named is None:
        return list(range(len(optimizers)))
    listed = list(named) if isinstance(named, list | tuple) else [named]
    return [index_of(optimizers, optimizer) for optimizer in listed]


def index_of(optimizers: Sequence[torch.optim.Optimizer], optimizer: Any) -> int:
    """Return the number of an optimizer; None is the only one, ConfigError if there are several."""
    if optimizer is None:
        if not optimizers:
            raise ConfigError(
                "this session has no optimizer, it only evaluates: give prepare(model, optimizer) one"
            )
        if len(optimizers) != 1:
            raise ConfigError(f"this session has {len(optimizers)} optimizers: name the one to step")
        return 0
    for index, mine in enumerate(optimizers):
        if mine is optimizer:
            return index
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"got {show(optimizer)} as the optimizer: expected one that was given to prepare(). Other "
            "arguments go by name: amp.step(clip_norm=1.0)"
        )
    raise ConfigError(f"this {type(optimizer).__name__} was not given to prepare()")


# ---- gradients ------------------------------------------------------------------------------------------


def refuse_direct_steps(session: Any) -> list[RemovableHandle]:
    """Make `optimizer.step()` an error while its gradients carry a session's loss scale; returns the hooks.

    The first such step on gradients that did not come through the session warns, since nothing scales its
    losses. The session is held weakly, so that an optimizer does not keep it alive.
    """
    weak = weakref.ref(session)

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        live_session, name = weak(), type(optimizer).__name__
        if live_session is None:
            return
        gradient_scale = live_session.state.gradient_scales[index_of(live_session.optimizers, optimizer)]
        if gradient_scale is None:
            if UNSCALED not in live_session.state.warned and any(
                w.grad is not None for w in weights_of(optimizer)
            ):
                live_session.state = live_session.state.with_warned(UNSCALED)
                warn(UNSCALED.format(name))
        elif gradient_scale.read() != 1.0:
            raise ScalerStateError(
                f"{name}.step() was called on gradients that carry the session's loss scale "
                f"{gradient_scale.read():g}: call amp.step(), which divides it out (and amp.backward() "
                "without GradScaler)"
            )

    return [optimizer.register_step_pre_hook(refuse) for optimizer in session.optimizers]


def check_gradients(stepper: Stepper, after_backward: bool) -> None:
    """Raise ScalerStateError where a step has nothing to work on; reads no values."""
    if after_backward and stepper.releases:
        return
    if stepper.has_gradients():
        return
    why = "call backward(loss) on this session first"
    if after_backward:
        kind = type(stepper.optimizer).__name__
        why = (
            f"the loss does not depend on the parameters of this {kind} (is it computed from this model?), "
            "or they were cleared after backward(): zero_grad() belongs before it, or nowhere (step() clears)"
        )
    raise ScalerStateError(f"step() found no gradients: {why}")


def name_of(models: Sequence[nn.Module], weight: Tensor) -> str:
    """Return a weight's name in the models."""
    names = (name for model in models for name, p in named_parameters(model).items() if p is weight)
    return next(names, f"a parameter of shape {list(weight.shape)}")


def has_nonzero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's gradients hold anything but zeros (reads)."""
    grads = [w.grad for w in weights_of(optimizer) if w.grad is not None]
    return any(bool(local_of(g.detach()).any()) for g in grads)


def no_optimizer(precision: Precision, scale: LossScale) -> str:
    """Say what a session without optimizers leaves to its caller; None where that is nothing."""
    scaled = "" if isinstance(scale, NoLossScale) else f"nothing divides the loss scale {scale.read():g} out"
    low = f"{precision.level.name}'s 16-bit weights have no fp32 masters" if precision.masters else ""
    what = " and ".join(filter(None, (scaled, low)))
    return what and (
        f"backward() on a session without an optimizer: {what}. Give prepare(model, optimizer) the one that "
        "steps, or prepare at O1 with loss_scale='none'"
    )


def one_loss(loss: Any, options: Mapping[str, Any]) -> Tensor:
    """Return one loss, or the sum in fp32 of several; ConfigError for what backward cannot start from."""
    if isinstance(loss, list | tuple):
        places = [i for i, item in enumerate(loss) if not isinstance(item, Tensor) or item.numel() != 1]
        if places or not loss:
            raise ConfigError(
                f"backward got {len(loss)} losses, those at {places} are no scalar tensors: give at least "
                "one, each reduced to one number"
            )
        loss = torch.stack([item.float().reshape(()) for item in loss]).sum()
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"backward got {loss!r:.60} of type {type(loss).__name__}, expected the loss as a tensor (not "
            "its item()), or several in a list"
        )
    if not loss.requires_grad:
        raise ConfigError(
            "backward got a loss that no parameter can learn from (requires_grad is False): "
            "compute it with gradients enabled and without detach()"
        )
    if loss.numel() != 1 and "gradient" not in options:
        raise ConfigError(
            f"backward got a loss of shape {tuple(loss.shape)}, expected one number: "
            "reduce it (loss.mean()) or pass gradient="
        )
    return loss


# ---- gradients that are not finite ---------------------------------------------------------------------

CHOICES = ("raise", "skip", "continue")


def skips_of(on_nonfinite: str | None, skip_nonfinite: bool | None, scaled: bool) -> bool:
    """Whether steps on such gradients are skipped; ConfigError for choices that contradict each other."""
    if skip_nonfinite is not None and not isinstance(skip_nonfinite, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"skip_nonfinite={show(skip_nonfinite)}: expected True, False or None")
    if on_nonfinite is not None and on_nonfinite not in CHOICES:
        raise ConfigError(f"on_nonfinite={show(on_nonfinite)}: expected 'raise', 'skip', 'continue' or None")
    if on_nonfinite is None:
        return scaled if skip_nonfinite is None else skip_nonfinite
    skips = on_nonfinite != "continue"
    if skip_nonfinite not in (None, skips) or (on_nonfinite == "raise" and skip_nonfinite is not None):
        raise ConfigError(
            f"on_nonfinite={show(on_nonfinite)} with skip_nonfinite={skip_nonfinite}: drop one of them"
        )
    if scaled and not skips:
        raise ConfigError(
            "on_nonfinite='continue' with a loss scale: a scale finds its value by skipping steps that "
            "overflow; pass loss_scale='none' or leave on_nonfinite out"
        )
    return skips


#: Says what was wrong with a step of this number; the flag: whether it was taken.
Report = Callable[[int | None, bool], None]


class NonFinite:
    """What a session does with nonfinite gradients, and the warnings it has issued.

    An overflow under a loss scale that can still go down is that scale's work, NaN too: inf minus inf and
    inf times 0 make it of an overflow. So "raise" is about losses that are not finite themselves, and about
    gradients that are not although their loss scale is as low as it goes.
    """

    def __init__(
        self, choice: str | None, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._choice, self._models, self._optimizers = choice, models, optimizers
        self._said = False
        self._losses: list[Tensor] = []

    def backward(self, loss: Tensor) -> None:
        """Remember a loss of the coming step."""
        if self._choice == "raise":
            self._losses.append(loss.detach())

    def make_report(
        self, optimizer: torch.optim.Optimizer, found_inf: bool | Tensor, losses: Sequence[Loss], skips: bool
    ) -> Report | None:
        """Return what to call once gradients are known to be bad; note which are while they exist."""
        values, self._losses = self._losses, []
        if found_inf is False or self._said or self._choice in ("skip", "continue"):
            return None
        if skips and self._choice is None:
            return None  # only of steps that are taken there is something to say
        where = self._where(optimizer) if found_inf is True else ""
        return partial(self._raise, where, values, losses) if self._choice else partial(self._warn, where)

    def _where(self, optimizer: torch.optim.Optimizer) -> str:
        weight_grads = [(w, w.grad) for w in weights_of(optimizer) if w.grad is not None]
        bad = [w for w, g in weight_grads if not bool(local_of(g.detach()).float().abs().sum().isfinite())]
        if not bad:
            return ""
        return f"of {len(bad)} of {len(weight_grads)} parameters (first: {name_of(self._models, bad[0])}) "

    def _warn(self, where: str, step: int | None, taken: bool) -> None:
        if taken and not self._said:
            self._said = True
            cures = (f"{place}: {text}: {cure}" for place, text, cure in zero_epsilons(self._optimizers))
            doctor = (
                "`halfstep doctor` names the op that made them; on_nonfinite='skip' in prepare(), a Trainer "
                "or a host's adapter skips such steps"
            )
            warn(
                f"step {step}: gradients {where}hold inf or NaN and the step was taken, as plain "
                f"PyTorch does; {next(cures, doctor)} (said once)"
            )

    def _raise(
        self, where: str, values: list[Tensor], losses: Sequence[Loss], step: int | None, taken: bool
    ) -> None:
        bad = [loss for loss in values if not bool(loss.isfinite().all())]
        lowest = [loss.scale for loss in losses if bool(loss.found_inf) and loss.scale.at_lowest]
        if not bad and not lowest:
            return
        what = f"gradients {where}hold inf or NaN"
        if bad:
            what = f"the loss is {float(bad[0].float().sum())}"
        elif not isinstance(lowest[0], NoLossScale | StaticLossScale):
            what += f" although the loss scale is down to {lowest[0].read():g}"
        raise NonFiniteError(
            f"step {step}: {what}; the step was not taken, weights are those before it "
            "(on_nonfinite='raise'). `amp.replayable` or `halfstep doctor` name the op"
        )
