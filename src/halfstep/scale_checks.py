"""What may be a loss scale: its range in float32, and errors for anything else.

A scale and its reciprocal must both be normal float32 numbers. No scale is made here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halfstep.errors import ConfigError

#: The largest power of two in float32: no scale lies above.
LARGEST_SCALE = 2.0**127
#: Smallest scale whose reciprocal is a normal float32.
SMALLEST_SCALE = 2.0**-126


def is_number(value: Any) -> bool:
    """Whether `value` is a Python number, NaN and infinities included."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_scale(owner: str, value: Any, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a number within [low, high]."""
    if not (is_number(value) and low <= value <= high):
        raise ConfigError(f"{owner}: the scale must be a number in [{low:g}, {high:g}], got {value!r}")


def check_count(owner: str, name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{owner}: {name} must be an integer of at least 1, got {value!r}")


def check_bounds(owner: str, low: float, high: float) -> None:
    """Raise ConfigError unless `low` and `high` are scales, in this order."""
    if not (is_number(low) and is_number(high)) or not SMALLEST_SCALE <= low <= high <= LARGEST_SCALE:
        raise ConfigError(
            f"{owner}: expected {SMALLEST_SCALE:g} <= min <= max <= {LARGEST_SCALE:g}, "
            f"got min={low!r}, max={high!r}"
        )


def check_one(value: float | Tensor) -> None:
    """Raise ConfigError for a tensor that is not one real number without a gradient; nothing is read."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.requires_grad or value.is_complex()):
        raise ConfigError(
            "new_scale should be a float or a 1-element tensor with requires_grad=False, got "
            f"{value.dtype} of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
        )
