"""Reductions over ranks: the finite flag, norms of sharded gradients, and who holds which shard.

Every function is a no-op where torch.distributed is absent, not initialised, or has one rank. Nothing here
but `gather` reads a value back to the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.torch_private import device_types, foreach_norm, local_tensor
from halfstep.trees import move_to

Group = Any  #: torch.distributed.ProcessGroup; the class is absent from builds without distributed


def world_size(group: Group | None = None) -> int:
    """Return the number of ranks in `group` (default: all), 1 without an initialised process group."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def rank(group: Group | None = None) -> int:
    """Return this process's place among the ranks of `group` (default: all), 0 without a process group."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def started_by_torchrun() -> int:
    """Return how many ranks torchrun has started, 1 where it has not started this process."""
    return int(os.environ.get("WORLD_SIZE") or 1) if "LOCAL_RANK" in os.environ else 1


@contextmanager
def joined(device: torch.device) -> Generator[None]:
    """Within, the ranks that torchrun started are one process group; with one rank nothing happens.

    Each computes on the accelerator of its own LOCAL_RANK, unless `device` names one.
    """
    if started_by_torchrun() == 1 or dist.is_initialized():
        yield
        return
    unnumbered = device.type != "cpu" and device == torch.device(device.type)
    if unnumbered and torch.accelerator.device_count() > 1:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_ranks(found_inf: Tensor, group: Group | None = None) -> Tensor:
    """Return the OR over ranks of a flag, or several, (bool, or 0 and 1) in its dtype: one MAX all-reduce.

    Every rank of the group must call it, or those that do wait for ever.
    """
    if world_size(group) == 1:
        return found_inf
    # int32 and not bool or uint8: every backend reduces it; MAX and not SUM, so that no flag is ever a count.
    flag = to_backend((found_inf != 0).to(torch.int32).reshape(-1), group)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return move_to(flag.reshape(found_inf.shape), found_inf.device, found_inf.dtype)


def largest_of_ranks(value: float | Tensor, group: Group | None = None) -> float | Tensor:
    """Return the largest of all ranks' values, as a float where it was one; every rank must call it."""
    if isinstance(value, Tensor):
        return all_parts(value.detach(), group).amax()
    return float(all_parts(torch.tensor(value, dtype=torch.float64, device="cpu"), group).amax())


def gather(value: Any, group: Group | None = None) -> list[Any]:
    """Return every rank's `value` (anything that pickles), in the order of ranks.

    Every rank of the group must call it, or those that do wait for ever.
    """
    if world_size(group) == 1:
        return [value]
    everyone: list[Any] = [None] * world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    _yield_to_backend_thread()
    return everyone


def gather_on_first(value: Any, group: Group | None = None) -> list[Any]:
    """Return every rank's `value` (anything that pickles) on rank 0 of the group, on the others nothing.

    Every rank of the group must call it, or those that do wait for ever.
    """
    if world_size(group) == 1:
        return [value]
    everyone: list[Any] = [None] * world_size(group) if rank(group) == 0 else []
    dist.gather_object(value, everyone or None, group=group, group_dst=0)
    _yield_to_backend_thread()
    return everyone


def _yield_to_backend_thread() -> None:
    """Give gloo's thread the interpreter, which it needs to free the tensors of a finished collective.

    A script that ends within the five milliseconds it would wait otherwise (after `amp.save` for example, and
    though it destroys its process group, which a wrapped model keeps) is aborted by it:
    pytorch/pytorch#179291.
    """
    time.sleep(0)


def shard_groups(t: Tensor) -> tuple[Group, ...]:
    """Return the process groups over which a DTensor is split; empty for ordinary and replicated tensors.

    A mesh dimension splits the tensor where its placement is neither replicated nor partial: a strided shard
    (fully_shard over tensor parallel) says False to `is_shard`.
    """
    if type(t) in _PLAIN:
        return ()
    placements, mesh = getattr(t, "placements", None), getattr(t, "device_mesh", None)
    if placements is None or mesh is None:
        return ()
    split = (dim for dim, p in enumerate(placements) if not (p.is_replicate() or p.is_partial()))
    return tuple(mesh.get_group(dim) for dim in split if mesh.size(dim) > 1)


def groups_of_shards(tensors: Sequence[Tensor]) -> list[tuple[Group, ...]]:
    """Return `shard_groups` of each tensor, asking a mesh once for all that are placed alike."""
    groups: dict[tuple[Any, ...], tuple[Group, ...]] = {(): ()}
    keys: list[tuple[Any, ...]] = []
    for t in tensors:
        tensor: Any = t
        placed = type(t) not in _PLAIN and hasattr(tensor, "placements")
        keys.append((id(tensor.device_mesh), tensor.placements) if placed else ())
        if keys[-1] not in groups:
            groups[keys[-1]] = shard_groups(t)
    return [groups[key] for key in keys]


_PLAIN = {Tensor, torch.nn.Parameter}


def local_of(t: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds, sharing memory; an ordinary tensor as it is."""
    if type(t) in _PLAIN:
        return t
    local: Tensor = local_tensor(t)
    if type(local) not in _PLAIN and hasattr(local, "wait"):  # still on its way (tensor parallel)
        local = cast(Any, local).wait()
    return local


def sums_over(groups: Sequence[Group], squares: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sum of squares and a largest magnitude over ranks that each hold a different shard.

    Both are 0-d; squares travel in float64 and are added in the order of ranks, so that every rank gets the
    same bits. inf and NaN stay what they are. One collective a group; nothing is read back to the host.
    """
    for group in groups:
        wide = torch.float32 if squares.device.type == "mps" else torch.float64
        everyone = all_parts(torch.stack([squares.to(wide), amax.to(wide)]), group)
        squares, amax = everyone[:, 0].sum().to(squares.dtype), everyone[:, 1].amax().to(amax.dtype)
    return squares, amax


def all_parts(mine: Tensor, group: Group) -> Tensor:
    """Return every rank's tensor (of one shape and dtype), stacked in the order of the group's ranks."""
    sent = to_backend(mine, group).reshape(-1)
    parts = sent.new_empty(world_size(group) * sent.numel())
    # torch 2.13 renamed it and warns of the older name.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(parts, sent, group=group)
    return move_to(parts.view(-1, *mine.shape), mine.device)


def whole_norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each whole gradient (0-d, its dtype), the same bits as of one that is not sharded.

    torch rounds the norm of every tensor to the tensor's dtype before it adds them up, and inside a tensor it
    adds in an order of its own, which sums over shards do not repeat. So each is put together, one at a time:
    every rank that holds a shard must call it, with gradients in the same order.
    """
    whole = (g if local_of(g) is g else cast(Any, g).full_tensor() for g in grads)
    return [norm for g in whole for norm in foreach_norm([g], 2)]


def norms_of_stages(norms: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return every rank's norms (0-d), in the order of the group's ranks; they may differ in number."""
    home = norms[0].device if norms else torch.device("cpu")
    counts = all_parts(torch.tensor([len(norms)], dtype=torch.int64, device=home), group)
    mine = torch.zeros(
        int(counts.max()), dtype=torch.float32 if home.type == "mps" else torch.float64, device=home
    )
    if norms:
        mine[: len(norms)] = torch.stack(list(norms))
    parts = all_parts(mine, group).to(norms[0].dtype if norms else torch.float32)
    return [norm for count, part in zip(counts, parts) for norm in part[: int(count)].unbind()]


def to_backend(t: Tensor, group: Group | None) -> Tensor:
    """Move a small tensor where the group's backend can reduce it (NCCL knows no CPU tensors)."""
    kinds = device_types(group or dist.group.WORLD)
    # A process group written as one class (a vendor's, in Python) names no devices: it takes its own.
    if not kinds or t.device.type in kinds:
        return t
    return t.to("cpu" if "cpu" in kinds else next(iter(kinds)))
