"""Norms of gradients that no rank holds whole, to the bit as one process takes them.

torch's `clip_grad_norm_` rounds the norm of every tensor to the tensor's dtype before it adds them up, and
inside a tensor it adds in an order of its own, so sums over shards come out a last bit apart. Here each
tensor is put together on one rank, which takes its norm as torch does: a rank sends its shards once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.reduce import (
    Group,
    all_parts,
    local_of,
    rank,
    shard_groups,
    to_backend,
    world_size,
)
from halfstep.torch_private import foreach_norm


def whole_norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each whole gradient (0-d, its dtype), the same bits as of one that is not sharded.

    Every rank that holds a shard must call it, with gradients in the same order.
    """
    found: dict[int, Tensor] = {}
    sets: dict[tuple[Any, ...], list[int]] = {}
    for number, grad in enumerate(grads):
        sets.setdefault((*_place(grad), grad.dtype, grad.device), []).append(number)
    for (group, *_), numbers in sets.items():
        own = [grads[number] for number in numbers]
        norms = foreach_norm([_whole(g) for g in own], 2) if group is None else _exchanged(own, group)
        found.update(zip(numbers, norms, strict=True))
    return [found[number] for number in range(len(grads))]


def norms_of_stages(norms: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return every rank's norms (0-d), in the order of the group's ranks; they may differ in number."""
    home = norms[0].device if norms else torch.device("cpu")
    counts = all_parts(torch.tensor([len(norms)], dtype=torch.int64, device=home), group)
    most = int(counts.max())
    mine = torch.zeros(most, dtype=torch.float32 if home.type == "mps" else torch.float64, device=home)
    if norms:
        mine[: len(norms)] = torch.stack(list(norms))
    dtype = norms[0].dtype if norms else torch.float32
    parts = all_parts(mine, group).to(dtype)
    return [norm for count, part in zip(counts, parts) for norm in part[: int(count)].unbind()]


def _place(grad: Tensor) -> tuple[Group | None, int]:
    """The one group over which a gradient is split, and along which dimension; else None."""
    groups = shard_groups(grad)
    split = [p for p in getattr(grad, "placements", ()) if not p.is_replicate()]
    if len(groups) == 1 and len(split) == 1 and split[0].is_shard():
        return groups[0], split[0].dim
    return None, 0


def _whole(grad: Tensor) -> Tensor:
    placed: Any = grad
    if local_of(grad) is grad or placed.device_mesh.size() == 1:
        return local_of(grad)
    return placed.full_tensor()


def _exchanged(grads: Sequence[Tensor], group: Group) -> list[Tensor]:
    """The norms of gradients split over one group along one dimension; each rank puts some together."""
    ranks, me, (_, dim) = world_size(group), rank(group), _place(grads[0])
    owners = _owners([g.numel() for g in grads], ranks)
    theirs = [[g for g, owner in zip(grads, owners) if owner == number] for number in range(ranks)]
    shapes = [[_shape_on(g, dim, number, ranks) for g in theirs[me]] for number in range(ranks)]
    sent = [local_of(g).reshape(-1) for own in theirs for g in own]
    counts = [sum(local_of(g).numel() for g in own) for own in theirs]
    coming = [sum(shape.numel() for shape in each) for each in shapes]
    own = to_backend(torch.cat(sent), group)
    buffer = own.new_empty(sum(coming))
    dist.all_to_all_single(buffer, own, coming, counts, group=group)
    pieces = [
        [piece.view(shape) for piece, shape in zip(part.split([s.numel() for s in each]), each)]
        for part, each in zip(buffer.split(coming), shapes)
    ]
    wide = torch.promote_types(buffer.dtype, torch.float32)
    norms = torch.zeros(len(grads), dtype=wide, device=buffer.device)
    mine = [number for number, owner in enumerate(owners) if owner == me]
    if mine:
        whole = [torch.cat(parts, dim) for parts in zip(*pieces)]
        norms[mine] = torch.stack(list(foreach_norm(whole, 2))).to(wide)
    dist.all_reduce(norms, group=group)  # all but the owner's are 0
    return list(norms.to(grads[0].device, grads[0].dtype).unbind())


def _owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which rank puts each tensor together: the largest first, always where least is so far."""
    load, owners = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owners[number] = load.index(min(load))
        load[owners[number]] += sizes[number]
    return owners


def _shape_on(grad: Tensor, dim: int, number: int, ranks: int) -> torch.Size:
    """The shape of a rank's shard: ceil(n / ranks) but for the last ones, which may be shorter or empty."""
    length = grad.shape[dim]
    share = -(-length // ranks)
    here = max(0, min(share, length - number * share))
    return torch.Size((*grad.shape[:dim], here, *grad.shape[dim + 1 :]))
