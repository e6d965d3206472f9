"""Reductions over ranks: the finite flag, norms of sharded gradients, and gradients that travel in 16 bits.

Every function is a no-op where torch.distributed is absent, not initialised, or has one rank. Nothing here
but `gather` reads a value back to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import ConfigError, UnsupportedError
from halfstep.formats import dtype_name, parse_dtype

Group = Any  #: torch.distributed.ProcessGroup; the class is absent from builds without distributed
Hook = Callable[[Any, Any], Any]


def world_size(group: Group | None = None) -> int:
    """Return the number of ranks in `group` (default: all), 1 without an initialised process group."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def rank() -> int:
    """Return this process's rank, 0 without an initialised process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_ranks(found_inf: Tensor, group: Group | None = None) -> Tensor:
    """Return the OR over ranks of a 0-d flag (bool, or 0 and 1), in its dtype: one MAX all-reduce.

    Every rank of the group must call it, or those that do wait for ever.
    """
    if world_size(group) == 1:
        return found_inf
    # int32 and not bool or uint8: every backend reduces it; MAX and not SUM, so that no flag is ever a count.
    flag = _to_backend((found_inf != 0).to(torch.int32).reshape(1), group)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag.reshape(()).to(found_inf.device, found_inf.dtype, non_blocking=True)


def global_norm(norm: Tensor, group: Group | None = None) -> Tensor:
    """Return the 2-norm over ranks that each hold a different shard, from each rank's local 2-norm.

    Ranks' norms are divided by their largest before squaring, so that squares do not overflow float32.
    Replicated gradients (DDP) need no reduction: their local norm is the global one.
    """
    if world_size(group) == 1:
        return norm
    peak = global_max(norm, group)
    usable = torch.isfinite(peak) & (peak > 0)
    ratio = torch.where(usable, norm / peak, torch.zeros_like(norm))
    squares = _to_backend(ratio.square().reshape(1), group)
    dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=group)
    total = squares.reshape(()).to(norm.device, non_blocking=True).sqrt() * peak
    return torch.where(usable, total, peak)


def global_max(value: Tensor, group: Group | None = None) -> Tensor:
    """Return the largest of a 0-d value over ranks; NaN on any rank gives NaN everywhere.

    (MAX all-reduce treats NaN differently from backend to backend, so NaN travels as a flag of its own.)
    """
    if world_size(group) == 1:
        return value
    nan = torch.isnan(value)
    pair = torch.stack([torch.where(nan, 0.0, value), nan.to(value.dtype)])
    pair = _to_backend(pair, group)
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    pair = pair.to(value.device, non_blocking=True)
    return torch.where(pair[1] > 0, torch.full_like(pair[0], torch.nan), pair[0])


def gather(value: Any, group: Group | None = None) -> list[Any]:
    """Return every rank's `value` (anything that pickles), in the order of ranks.

    Every rank of the group must call it, or those that do wait for ever.
    """
    if world_size(group) == 1:
        return [value]
    everyone: list[Any] = [None] * world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def shard_groups(t: Tensor) -> tuple[Group, ...]:
    """Return the process groups over which a DTensor is split; empty for ordinary and replicated tensors."""
    placements, mesh = getattr(t, "placements", None), getattr(t, "device_mesh", None)
    if placements is None or mesh is None:
        return ()
    return tuple(mesh.get_group(dim) for dim, p in enumerate(placements) if p.is_shard())


def _to_backend(t: Tensor, group: Group | None) -> Tensor:
    """Move a small tensor where the group's backend can reduce it (NCCL knows no CPU tensors)."""
    kinds = {device.type for device in (group or dist.group.WORLD)._device_types}  # pyright: ignore
    # A process group written as one class (a vendor's, in Python) names no devices: it takes its own.
    if not kinds or t.device.type in kinds:
        return t
    return t.to("cpu" if "cpu" in kinds else next(iter(kinds)))


@dataclass
class Traffic:
    """Bytes of gradients handed to the collective by this rank, and what fp32 would have handed over."""

    sent_bytes: int = 0
    fp32_bytes: int = 0

    @property
    def share(self) -> float:
        """`sent_bytes` as a share of `fp32_bytes` (1.0 before anything was sent)."""
        return self.sent_bytes / self.fp32_bytes if self.fp32_bytes else 1.0


def compress_hook(dtype: str | torch.dtype, group: Group | None = None) -> Hook:
    """Return a DDP communication hook that averages gradients in `dtype` ("bf16" or "fp16").

    `ddp.register_comm_hook(None, compress_hook("bf16"))`. Each rank divides by the number of ranks in the
    gradients' own dtype before rounding, so that the 16-bit sum stays below the largest single gradient; the
    mean comes back in the gradients' dtype. An fp32 gradient beyond the 16-bit range arrives as inf on every
    rank, which the finite check then sees. Works with every backend that reduces `dtype`, gloo included
    (torch's own bf16 hook insists on NCCL). `hook.traffic` counts the bytes. Raises ConfigError for other
    dtypes.
    """
    low = parse_dtype(dtype)
    if low not in (torch.float16, torch.bfloat16):
        raise ConfigError(f"compress_hook takes 'bf16' or 'fp16', got {dtype_name(low)}")
    traffic = Traffic()

    def average(state: object, bucket: Any) -> Any:
        ranks = world_size(group)
        buffer: Tensor = bucket.buffer()
        small = (buffer / ranks).to(low)
        traffic.sent_bytes += small.numel() * small.element_size()
        traffic.fp32_bytes += small.numel() * 4

        def put_back(done: Any) -> Tensor:
            return buffer.copy_(done.value()[0])

        return _all_reduce(small, group).then(put_back)

    # DDP compares annotations with the classes themselves, which string annotations are not.
    average.__annotations__ = {}
    average.__name__ = f"average_in_{dtype_name(low)}"
    cast(Any, average).traffic = traffic
    return average


def _all_reduce(t: Tensor, group: Group | None) -> Any:
    try:
        work: Any = dist.all_reduce(t, group=group, async_op=True)
    except RuntimeError as error:
        raise UnsupportedError(
            f"the {dist.get_backend(group)} backend does not reduce {dtype_name(t.dtype)} here ({error}); "
            "choose the other 16-bit dtype or leave the hook out"
        ) from error
    return work.get_future()
