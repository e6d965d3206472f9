"""Gradients on their way between ranks: in 16 bits, or added in the order of ranks.

`ddp.register_comm_hook(None, hook)` takes what is made here; every hook works with gloo as with NCCL.
"""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.reduce import Group, world_size
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.formats import dtype_name, parse_dtype

Hook = Callable[[Any, Any], Any]


@dataclass
class Traffic:
    """Bytes of gradients handed to the collective by this rank, and what fp32 would have handed over."""

    sent_bytes: int = 0
    fp32_bytes: int = 0

    @property
    def share(self) -> float:
        """`sent_bytes` as a share of `fp32_bytes` (1.0 before anything was sent)."""
        return self.sent_bytes / self.fp32_bytes if self.fp32_bytes else 1.0


@functools.cache
def _collect_at_exit() -> None:
    """A DDP model with a Python hook that outlives the interpreter aborts: gloo's threads want its lock."""
    atexit.register(gc.collect)


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
    _collect_at_exit()

    def average(state: object, bucket: Any) -> Any:
        ranks = world_size(group)
        buffer: Tensor = bucket.buffer()
        small = (buffer / ranks).to(low)
        traffic.sent_bytes += small.numel() * small.element_size()
        traffic.fp32_bytes += small.numel() * 4

        def put_back(done: Any) -> Tensor:
            return buffer.copy_(done.value()[0])

        return _all_reduce(small, group).then(put_back)

    cast(Any, average).traffic, cast(Any, average).dtype = traffic, low
    return _for_ddp(average, f"average_in_{dtype_name(low)}")


def ordered_hook(group: Group | None = None) -> Hook:
    """Return a DDP communication hook whose mean is added in the order of ranks, in the gradients' dtype.

    `ddp.register_comm_hook(None, ordered_hook())`. A backend adds four or more ranks in an order of its own
    (of two it does not matter); with this hook the weights are those of one process that adds up the same
    micro-batches one after the other, bit for bit. Each rank sends as many bytes as an all-reduce: its parts
    to their owners, who add, and the owner's sum to all.
    """
    _collect_at_exit()

    def average(state: object, bucket: Any) -> Any:
        buffer: Tensor = bucket.buffer()
        return _as_future(buffer.copy_(_mean_in_rank_order(buffer, group)))

    return _for_ddp(average, "average_in_order")


def _mean_in_rank_order(buffer: Tensor, group: Group | None) -> Tensor:
    ranks = world_size(group)
    if ranks == 1:
        return buffer
    share = -(-buffer.numel() // ranks)
    padded = torch.nn.functional.pad(buffer / ranks, (0, share * ranks - buffer.numel()))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=group)
    total = _sum_in_order(parts, ranks)
    whole = [torch.empty_like(total) for _ in range(ranks)]
    dist.all_gather(whole, total, group=group)
    return torch.cat(whole)[: buffer.numel()]


def _sum_in_order(parts: Tensor, ranks: int) -> Tensor:
    """Return the sum over ranks in fp32 at least, one after the other, rounded once (law 18)."""
    total, *others = parts.view(ranks, -1).unbind()
    total = total.to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in others:
        total += part
    return total.to(parts.dtype)


class OrderedReduceScatter:
    """`fully_shard`'s reduction of gradients as a mean that is added in the order of ranks.

    For `FSDPModule.set_custom_reduce_scatter`, in gradients' reduce dtype; each rank divides by the number of
    ranks first, so torch must not (`set_gradient_divide_factor(1.0)`): `hs.distributed.shard` sees to that.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory for gradients on their way."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Any:
        """Fill `output_tensor` with this rank's part of the mean of all ranks' `input_tensor`.

        With `async_op` something to wait for is returned, as from torch's own.
        """
        ranks = world_size(group)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor / ranks, group=group)
        output_tensor.copy_(_sum_in_order(parts, ranks))
        return _as_future(output_tensor) if async_op else None


def _as_future(value: Tensor) -> Any:
    """Return a future of what has been computed, or will be on a device that runs apart from the host."""
    done: Any = torch.futures.Future(devices=[] if value.device.type == "cpu" else [value.device])
    done.set_result(value)
    return done


def _for_ddp(hook: Hook, name: str) -> Hook:
    # DDP compares annotations with the classes themselves, which string annotations are not.
    hook.__annotations__, hook.__name__ = {}, name
    return hook


def _all_reduce(t: Tensor, group: Group | None) -> Any:
    try:
        work: Any = dist.all_reduce(t, group=group, async_op=True)
    except RuntimeError as error:
        raise UnsupportedError(
            f"the {dist.get_backend(group)} backend does not reduce {dtype_name(t.dtype)} here ({error}); "
            "choose the other 16-bit dtype or leave the hook out"
        ) from error
    return work.get_future()
