"""Learning rates as lists with one number for each step, as MindSpore's functions give them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfstep.errors import ConfigError


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
