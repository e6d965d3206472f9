"""Optimizer states of DTensors (fully_shard, tensor parallel): placed like their parameter, stepped locally.

A step works on the memory of each rank's part (`distributed.local_of`); the states are DTensors around that
memory. Norm, finite flag and largest magnitude cross ranks in one collective for each set of groups over
which parameters are split.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.distributed import local_of, sums_over
from halfstep.distributed.reduce import groups_of_shards
from halfstep.errors import CheckpointError, UnsupportedError
from halfstep.gradients.stats import GradStats, HostStats
from halfstep.kernels import codes as L
from halfstep.optim import arguments, split, storage
from halfstep.torch_private import place_of_shard
from halfstep.trees import as_float32

PLAIN = frozenset({Tensor, nn.Parameter})
"""Of tensors whose memory is their own; asking for the type is faster than for parts."""


def any_shard(params: Sequence[Tensor]) -> bool:
    """Whether one of the parameters is a DTensor."""
    return not PLAIN.issuperset(map(type, params)) and any(local_of(p) is not p for p in params)


def check_blocks(group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
    """Raise UnsupportedError where 8-bit blocks of a shard would not be those of the whole tensor."""
    if group["state_dtype"] != "8bit":
        return
    for p in params:
        local = local_of(p)
        kind = arguments.state_kind_of(p, "8bit")
        if local is p or kind == arguments.state_kind_of(local, "8bit") != L.STATE_8BIT:
            continue
        placements = getattr(p, "placements", ())
        # is_shard leaves strided ones out
        by_rows = all(getattr(placement, "dim", 0) == 0 for placement in placements)
        if not by_rows or p.dim() < 2 or storage.width_of(local) != math.prod(p.shape[1:]):
            raise UnsupportedError(
                f"state_dtype='8bit' over shards wants tensors cut between rows, so that every block of "
                f"elements with one exponent lies on one rank; one of shape {list(p.shape)} is placed "
                f"{placements}: give it a parameter group with state_dtype='bf16'"
            )


def add_partial_sums(params: Sequence[Tensor]) -> None:
    """Place gradients of DTensors as their parameters are: partial sums are added up, a collective each.

    All are, in the order of the parameters and once, so that every rank takes part in as many.
    """
    for p in params:
        grad: Any = p.grad
        if grad is not None and local_of(p) is not p and hasattr(grad, "redistribute"):
            dtensor: Any = p
            if grad.placements != dtensor.placements:
                p.grad = grad.redistribute(dtensor.device_mesh, dtensor.placements)


def sets_of(params: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return the sets of process groups over which parameters are split, the same on every rank."""
    return list(dict.fromkeys(groups_of_shards(params)))


def combine_stats(
    sums: Sequence[tuple[Any, float, float]], params: Sequence[Tensor], inv_scale: float
) -> HostStats:
    """Return the answer over all ranks, from this rank's sums of squares and peaks of each set of groups.

    NaN wins over inf.
    """
    totals = [(squares, peak) for _, squares, peak in sums]
    if any_shard(params):
        totals = [
            _reduce_over(group_set, [values for groups, *values in sums if groups == group_set])
            for group_set in sets_of(params)
        ]
    total, largest = totals[0] if totals else (0.0, 0.0)
    for squares, peak in totals[1:]:
        total, largest = total + squares, float(np.maximum(largest, peak))
    norm, amax = as_float32(total**0.5 * inv_scale), as_float32(largest * inv_scale)
    return GradStats(math.isfinite(largest), norm, amax)


def _reduce_over(groups: tuple[Any, ...], local_sums: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The sum of squares and the largest magnitude of this rank's sums and peaks and those of other ranks."""
    squares, peaks = sum(a for a, _ in local_sums), [b for _, b in local_sums]
    peak = math.nan if any(map(math.isnan, peaks)) else max(peaks, default=0.0)
    if not groups:
        return squares, peak
    wide = torch.tensor([squares, peak], dtype=torch.float64, device="cpu")
    total, largest = sums_over(groups, wide[0], wide[1])
    return float(total), float(largest)


# ---- entries of the state ---------------------------------------------------------------------------------


@contextmanager
def local_entry(entry: dict[str, Any], p: Tensor) -> Generator[dict[str, Any]]:
    """An entry as this rank's tensors; what is changed in it becomes DTensors placed like `p`."""
    if local_of(p) is p:
        yield entry
        return
    local_state = {key: local_part(key, value, p) for key, value in entry.items()}
    yield local_state
    show(local_state, entry, p)


def show(local_state: Mapping[str, Any], entry: dict[str, Any], p: Tensor) -> None:
    """Make an entry of the state what `local_state`, of this rank's tensors, says."""
    for key in entry.keys() - local_state.keys():
        del entry[key]
    if type(p) in PLAIN or local_of(p) is p:
        entry.update(local_state)
        return
    for key, value in local_state.items():
        old_value = entry.get(key)
        if (
            not isinstance(old_value, Tensor)
            or local_of(old_value) is not value
            or not is_placed_as(old_value, p)
        ):
            entry[key] = as_dtensor(key, value, p)


def is_placed_as(value: Any, p: Any) -> bool:
    """Whether a state is placed as its parameter: on the same ranks, or both on this one alone."""
    return getattr(value, "placements", None) == getattr(p, "placements", None)


def as_dtensor(key: str, value: Any, p: Tensor) -> Any:
    """Return a state of this rank's part of `p` as the user sees it: a DTensor where it is cut as `p` is."""
    if local_of(p) is p or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    from torch.distributed.tensor import DTensor

    dtensor: Any = p
    shape, stride = p.shape, p.stride()
    if key.endswith(storage.EXPONENTS):  # a line for each row
        shape, stride = torch.Size((p.shape[0], value.shape[1])), (value.shape[1], 1)
    elif value.shape != local_of(p).shape:
        return value
    return DTensor.from_local(
        value, dtensor.device_mesh, dtensor.placements, run_check=False, shape=shape, stride=stride
    )


def local_part(key: str, value: Any, p: Tensor) -> Any:
    """This rank's part of a state: of a DTensor placed in any way, or of a whole tensor."""
    if type(p) in PLAIN and type(value) in PLAIN:
        return value
    if local_of(p) is p:
        return local_of(value) if isinstance(value, Tensor) else value
    if key == "weight":
        return {**value, "sum": split.UNSUMMED}
    if not isinstance(value, Tensor):
        return value
    dtensor: Any = p
    if local_of(value) is not value:
        shard: Any = value
        return local_of(
            shard if is_placed_as(shard, p) else shard.redistribute(dtensor.device_mesh, dtensor.placements)
        )
    if value.dim() == 0 or value.shape == local_of(p).shape != p.shape:
        return value
    whole = value.shape[:1] == p.shape[:1] if key.endswith(storage.EXPONENTS) else value.shape == p.shape
    if not whole:
        raise CheckpointError(
            f"a saved state has shape {list(value.shape)}, the sharded parameter {list(p.shape)} (here "
            f"{list(local_of(p).shape)}): save and load with Session.save and Session.load"
        )
    shape, offsets = place_of_shard(value.shape, dtensor.device_mesh, dtensor.placements)
    return value[tuple(slice(o, o + n) for o, n in zip(offsets, shape))].to(local_of(p).device).contiguous()
