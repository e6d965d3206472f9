"""ops that make or choose values: fill, select, identity, scalar_to_tensor."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.compat.mindspore._tensor import Tensor, as_tensor


def fill(type: torch.dtype | None, shape: Any, value: Any) -> Tensor:
    """A tensor of one value, rounded to `type` (too large a value is inf); None keeps the value's dtype.

    Raises:
        TypeError: a shape that is no tuple, list or tensor of integers.
    """
    if not isinstance(shape, tuple | list | torch.Tensor):
        raise TypeError(
            f"For 'fill', the `shape` must be a tuple or tensor with all Int elements, got {shape!r}"
        )
    sizes = [int(size) for size in shape]
    exact = torch.tensor(value, dtype=torch.float64) if isinstance(value, float) and type else value
    filled = torch.as_tensor(exact).to(type).expand(sizes)
    return as_tensor(filled.clone(memory_format=torch.contiguous_format))


def select(condition: torch.Tensor, input: Any, other: Any) -> Tensor:
    """`input` where the condition holds, else `other`: tensors that broadcast, or numbers.

    Raises:
        TypeError: a condition that is no bool tensor.
    """
    if not isinstance(condition, torch.Tensor) or condition.dtype != torch.bool:
        kind = getattr(condition, "dtype", type(condition).__name__)
        raise TypeError(f"For 'select', the condition must be a Tensor of bool, but got {kind}")
    return as_tensor(torch.where(condition, input, other))


def identity(x: Any) -> Any:
    """`x` itself."""
    return x


def scalar_to_tensor(input_x: bool | int | float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A 0-d tensor of a number, in fp32 unless told otherwise.

    Raises:
        TypeError: what is no number.
    """
    if not isinstance(input_x, bool | int | float):
        kind = type(input_x).__name__
        raise TypeError(
            f"For 'ScalarToTensor', the type of 'x' should be one of 'bool', 'int', 'float', but got '{kind}'"
        )
    return fill(dtype, (), input_x)
