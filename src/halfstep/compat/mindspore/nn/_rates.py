"""Learning rates by step: lists with one for each, and schedules that compute it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from halfstep.compat.mindspore._functions import signature_of
from halfstep.compat.mindspore._tensor import Tensor, as_tensor, check_kind, check_whole
from halfstep.compat.mindspore.nn._cell import Cell
from halfstep.errors import ConfigError

__all__ = [
    "CosineDecayLR",
    "ExponentialDecayLR",
    "InverseDecayLR",
    "LearningRateSchedule",
    "NaturalExpDecayLR",
    "PolynomialDecayLR",
    "WarmUpLR",
    "cosine_decay_lr",
    "exponential_decay_lr",
    "inverse_decay_lr",
    "natural_exp_decay_lr",
    "piecewise_constant_lr",
    "polynomial_decay_lr",
    "warmup_lr",
]


def piecewise_constant_lr(milestone: Sequence[int], learning_rates: Sequence[float]) -> list[float]:
    """`learning_rates[i]` up to step `milestone[i]`.

    Raises:
        ValueError: lists of different lengths, or milestones that do not grow.
    """
    if len(milestone) != len(learning_rates) or list(milestone) != sorted(set(milestone)):
        raise ConfigError(
            f"expected growing milestones and a rate for each, got {milestone}, {learning_rates}"
        )
    lengths = (now - before for before, now in zip((0, *milestone), milestone))
    return [rate for rate, length in zip(learning_rates, lengths) for _ in range(length)]


def exponential_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    """learning_rate * decay_rate^(epoch / decay_epoch), the exponent rounded down with `is_stair`."""
    exponents = (step // step_per_epoch / decay_epoch for step in range(total_step))
    return [learning_rate * decay_rate ** (math.floor(e) if is_stair else e) for e in exponents]


def inverse_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    """learning_rate / (1 + decay_rate * epoch / decay_epoch), the quotient rounded down with `is_stair`."""
    parts = (step // step_per_epoch / decay_epoch for step in range(total_step))
    return [learning_rate / (1 + decay_rate * (math.floor(p) if is_stair else p)) for p in parts]


def natural_exp_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    """learning_rate * e^(-decay_rate * epoch), the epoch a multiple of `decay_epoch` with `is_stair`."""
    epochs = (step // step_per_epoch for step in range(total_step))
    stairs = (epoch // decay_epoch * decay_epoch if is_stair else epoch for epoch in epochs)
    return [learning_rate * math.e ** (-decay_rate * epoch) for epoch in stairs]


def polynomial_decay_lr(
    learning_rate: float,
    end_learning_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    power: float,
    update_decay_epoch: bool = False,
) -> list[float]:
    """From `learning_rate` to `end_learning_rate` by (1 - epoch / decay_epoch)^power.

    With `update_decay_epoch` the decay grows by whole multiples so that no epoch lies behind it.
    """
    rates: list[float] = []
    for step in range(total_step):
        epoch, end = step // step_per_epoch, decay_epoch
        if update_decay_epoch:
            end *= max(math.ceil(epoch / decay_epoch), 1)
        share = (1 - min(epoch, end) / end) ** power
        rates.append((learning_rate - end_learning_rate) * share + end_learning_rate)
    return rates


def cosine_decay_lr(
    min_lr: float, max_lr: float, total_step: int, step_per_epoch: int, decay_epoch: int
) -> list[float]:
    """From `max_lr` to `min_lr` along half a cosine over `decay_epoch` epochs, and `min_lr` from there on."""
    epochs = (min(step // step_per_epoch, decay_epoch) for step in range(total_step))
    half = 0.5 * (max_lr - min_lr)
    return [min_lr + half * (1 + math.cos(math.pi * epoch / decay_epoch)) for epoch in epochs]


def warmup_lr(learning_rate: float, total_step: int, step_per_epoch: int, warmup_epoch: int) -> list[float]:
    """From 0 to `learning_rate` in equal steps over `warmup_epoch` epochs, and that from there on."""
    epochs = (min(step // step_per_epoch, warmup_epoch) for step in range(total_step))
    return [learning_rate * epoch / warmup_epoch for epoch in epochs]


class LearningRateSchedule(Cell):
    """A learning rate that an optimizer asks for at each step: write `construct(self, global_step)`.

    `global_step` is a 0-d int32 tensor that counts from 0; what comes back is a number or a 0-d tensor.
    """


def _check(owner: str, name: str, value: Any) -> None:
    if name in ("is_stair", "update_decay_steps"):
        check_kind(owner, name, value, bool)
    elif name.endswith("_steps"):
        check_whole(owner, name, value)
    else:
        check_kind(owner, name, value, float)
        from_zero = name in ("min_lr", "end_learning_rate")
        if value < 0 or (value == 0 and not from_zero):
            bound = ">= 0" if from_zero else "> 0"
            raise ConfigError(f"For '{owner}', the '{name}' must be {bound}, but got {value}.")


def _row(name: str, says: str, rate: Callable[..., torch.Tensor], **takes: Any) -> Any:
    """The class of schedules that compute this of the step (fp32) and of their arguments, in this order."""
    signature = signature_of(takes)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        LearningRateSchedule.__init__(self)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for argument, value in bound.arguments.items():
            _check(name, argument, value)
        vars(self).update(bound.arguments)

    def construct(self: Any, global_step: Any) -> Tensor:
        """The rate at a step."""
        step = torch.as_tensor(global_step).to(torch.float32)
        return as_tensor(rate(step, **{argument: getattr(self, argument) for argument in takes}))

    body = {"__init__": __init__, "construct": construct, "__doc__": says, "__module__": __name__}
    return type(name, (LearningRateSchedule,), body)


def _exponential(
    step: torch.Tensor, learning_rate: float, decay_rate: float, decay_steps: int, is_stair: bool
) -> torch.Tensor:
    exponent = step / decay_steps
    return learning_rate * decay_rate ** (exponent.floor() if is_stair else exponent)


def _natural(
    step: torch.Tensor, learning_rate: float, decay_rate: float, decay_steps: int, is_stair: bool
) -> torch.Tensor:
    step = torch.floor(step / decay_steps) * decay_steps if is_stair else step
    return learning_rate * torch.exp(-decay_rate * step)


def _inverse(
    step: torch.Tensor, learning_rate: float, decay_rate: float, decay_steps: int, is_stair: bool
) -> torch.Tensor:
    part = step / decay_steps
    return learning_rate / (1 + decay_rate * (part.floor() if is_stair else part))


def _cosine(step: torch.Tensor, min_lr: float, max_lr: float, decay_steps: int) -> torch.Tensor:
    done = step.clamp(max=decay_steps) / decay_steps
    return min_lr + 0.5 * (max_lr - min_lr) * (1 + torch.cos(math.pi * done))


def _polynomial(
    step: torch.Tensor,
    learning_rate: float,
    end_learning_rate: float,
    decay_steps: int,
    power: float,
    update_decay_steps: bool,
) -> torch.Tensor:
    end = decay_steps * (step / decay_steps).ceil().clamp(min=1) if update_decay_steps else decay_steps
    done = torch.minimum(step, torch.as_tensor(end)) / end
    return (learning_rate - end_learning_rate) * (1 - done) ** power + end_learning_rate


def _warm_up(step: torch.Tensor, learning_rate: float, warmup_steps: int) -> torch.Tensor:
    return learning_rate * (step.clamp(max=warmup_steps) / warmup_steps)


_DECAY: dict[str, Any] = {
    "learning_rate": ...,
    "decay_rate": ...,
    "decay_steps": ...,
    "is_stair": False,
}
ExponentialDecayLR = _row(
    "ExponentialDecayLR", "learning_rate * decay_rate^(step / decay_steps).", _exponential, **_DECAY
)
NaturalExpDecayLR = _row("NaturalExpDecayLR", "learning_rate * e^(-decay_rate * step).", _natural, **_DECAY)
InverseDecayLR = _row(
    "InverseDecayLR", "learning_rate / (1 + decay_rate * step / decay_steps).", _inverse, **_DECAY
)
CosineDecayLR = _row(
    "CosineDecayLR",
    "From max_lr to min_lr along half a cosine over decay_steps, and min_lr from there on.",
    _cosine,
    min_lr=...,
    max_lr=...,
    decay_steps=...,
)
PolynomialDecayLR = _row(
    "PolynomialDecayLR",
    "From learning_rate to end_learning_rate by (1 - step / decay_steps)^power.",
    _polynomial,
    learning_rate=...,
    end_learning_rate=...,
    decay_steps=...,
    power=...,
    update_decay_steps=False,
)
WarmUpLR = _row(
    "WarmUpLR",
    "From 0 to learning_rate in equal steps over warmup_steps, and that from there on.",
    _warm_up,
    learning_rate=...,
    warmup_steps=...,
)
