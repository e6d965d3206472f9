"""Exact masters whose 16-bit weight was set by hand: the bits it lacks are a distance, and stay one.

Nothing in a weight and its lacking bits tells which elements were set: every pair is some fp32 number. A
weight that is set keeps what it was set to within half a unit of its 16 bits, and zeros and weights of one
value are exact. Steps change both alike, so torch's own counts of changes tell: they are kept equal.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import repeat
from operator import attrgetter, contains
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.distributed import local_of
from halfstep.kernels import codes as L

AWAITED = "weight"
"""In an entry: which weight its lacking bits belong to, where they were loaded before it."""
UNSUMMED = 1 << 62
"""In the place of a checksum: no rank knows that of a whole weight, of which each has a shard."""


def describe_weight(p: Tensor) -> dict[str, Any]:
    """The format and a checksum of a 16-bit weight, by which its lacking bits know it again.

    Numbers only: torch's own optimizers take a string apart on the way through.
    """
    total = p.detach().view(torch.int16).sum(dtype=torch.int64)
    return {"format": L.BF16 if p.dtype == torch.bfloat16 else L.FP16, "sum": int(total)}


def of_shards(described: Mapping[str, Any]) -> dict[str, Any]:
    """What `describe_weight` says of a shard or of a whole weight that is cut up, as all ranks can say it."""
    return {**described, "sum": UNSUMMED}


def is_described(half: Tensor, known: Mapping[str, Any], came_as: torch.dtype) -> bool:
    """Whether `known` describes the 16-bit weight `half`, as far as it says; `came_as`: the model's dtype."""
    if known["sum"] == UNSUMMED:
        return came_as in (half.dtype, torch.float32)
    return describe_weight(half) == known


def changes(t: Tensor) -> int:
    """How often autograd saw `t` change; 0 where nobody counts."""
    return 0 if t.is_inference() else t._version


def take(params: Sequence[Tensor], bits: Sequence[Tensor], held: Sequence[Any], device: torch.device) -> None:
    """Make lacking bits those of weights that were set since the last step."""
    try:
        alike = list(map(_versions, params)) == list(map(_versions, bits))
    except RuntimeError:  # inference tensors count nothing
        alike = False
    if alike and not any(map(contains, held, repeat(AWAITED))):
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    for p, lacking, entry in zip(params, bits, held):
        take_one(p, lacking, entry)
        even(p, lacking)
        entry.pop(AWAITED, None)


_versions = attrgetter("_version")


@torch.no_grad()
def take_one(p: Tensor, lacking: Tensor, entry: MutableMapping[str, Any]) -> None:
    """`take` of one weight; bits that wait for their weight are left as they are."""
    known = bits_of(p, lacking, entry)
    if known is not local_of(lacking):
        with torch.inference_mode(False):
            local_of(lacking).copy_(known)
    if changes(p) > changes(lacking):
        even(p, lacking)


def bits_of(p: Tensor, lacking: Tensor, entry: MutableMapping[str, Any]) -> Tensor:
    """This rank's lacking bits as the next step will use them."""
    weight, bits, awaited = local_of(p).detach(), local_of(lacking), entry.get(AWAITED)
    if awaited is not None and is_described(weight, awaited, weight.dtype):
        return bits
    if changes(p) <= changes(lacking):
        return bits
    return bits.masked_fill(_was_set(weight.view(bits.shape), bits), 0)  # the same memory in another shape


def even(p: Tensor, lacking: Tensor) -> None:
    """Count as many changes of a weight as of its bits."""
    ahead = changes(p) - changes(lacking)
    behind = lacking if ahead > 0 else p
    if ahead and not behind.is_inference():
        increment_version([behind] * abs(ahead))


def _was_set(weight: Tensor, bits: Tensor) -> Tensor:
    """Which elements cannot have had these bits before: bool, of the weight's shape or one for all."""
    code = weight.view(torch.int16)
    found = (weight == 0) | (_is_uniform(code) & ~_is_uniform(bits))
    if weight.dtype == torch.float16:  # where a step of its bits is 2^-40 instead of fp32's
        code = code & 0x7FFF
        most = torch.where(code < 0x200, 1 << 14, torch.where(code < 0x400, 1 << 13, 1 << 12))
        found = found | ((code >= 0x100) & (bits.to(torch.int32).abs() > most))
    return found


def _is_uniform(t: Tensor) -> Tensor:
    return (t == t[(slice(0, 1),) * t.dim()]).all()
