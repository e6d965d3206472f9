"""Exact masters: an fp32 value as the 16-bit weight the model uses plus the 16 bits it lacks.

bf16: the 16-bit half is the nearest bf16, ties away from zero, and the lacking bits are the signed distance
between the two bit patterns, so that joining is one integer addition. fp16: the half is torch's cast (ties
to even); from 2^-16 up the lacking bits are again the distance of the patterns, below they count steps of
2^-40. A weight that somebody sets keeps its lacking bits: it is what it was set to within half a unit (in
fp16 a whole one at exactly 2^-14, 2^-15 and 2^-16), so that a 0 stays one.

Readable integer arithmetic on tensors, on any device; the compiled kernels equal it bit for bit.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels import codes as L

MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000
UNSUMMED = 1 << 62
"""In the place of a checksum: no rank knows that of a whole weight, of which each has a shard."""


def describe_weight(half: Tensor, whole: bool) -> dict[str, int]:
    """The format and a checksum of a `whole` 16-bit weight, by which its lacking bits know it again.

    Numbers only: torch's own optimizers take a string apart on the way through.
    """
    total = int(half.detach().view(torch.int16).sum(dtype=torch.int64)) if whole else UNSUMMED
    return {"format": L.BF16 if half.dtype == torch.bfloat16 else L.FP16, "sum": total}


def is_described(half: Tensor, known: Mapping[str, Any], came_as: torch.dtype) -> bool:
    """Whether `known` describes the 16-bit weight `half`, as far as it says; `came_as`: the model's dtype."""
    if known["sum"] == UNSUMMED:
        return came_as in (half.dtype, torch.float32)
    return describe_weight(half, whole=True) == known


def join(half: Tensor, lacking: Tensor) -> Tensor:
    """Return the fp32 values that were split into `half`, bf16 or fp16, and `lacking`, int16 of its shape."""
    return join_bf16(half, lacking) if half.dtype == torch.bfloat16 else join_fp16(half, lacking)


def round_away(values: Tensor) -> Tensor:
    """Round fp32 to the nearest bf16, ties away from zero; a NaN stays a NaN."""
    return _upper_bits(values, values.isnan()).to(torch.int16).view(torch.bfloat16)


def _upper_bits(values: Tensor, nan: Tensor) -> Tensor:
    """The bits of `round_away`, as int32."""
    bits = values.view(torch.int32)
    up = (bits + 0x8000) >> 16
    return torch.where(nan, (bits >> 16) | 0x7FC0, up)


def split_bf16(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `values` as bf16, and the int16 bits that this lacks.

    Exact for every value, infinities, subnormals, both zeros and values that round to infinity included; a
    NaN becomes a NaN.
    """
    nan = values.isnan()
    high = _upper_bits(values, nan)
    lacking = torch.where(nan, 0, values.view(torch.int32) - (high << 16))
    return high.to(torch.int16).view(torch.bfloat16), lacking.to(torch.int16)


def split_fp16(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 `values` as fp16, the int16 bits that this lacks, and which are too large: these become 65504.

    Exact for 0 and 2^-16 <= |x| < 65520; below, the error is at most 2^-41, or 2^-40 within 2^-41 of the
    upper tie of an even half (16 bits cannot tell its 65,537 neighbours apart). inf and NaN pass.
    """
    half = values.to(torch.float16)
    too_large = half.isinf() & values.isfinite()
    half = torch.where(too_large, half.sign() * 65504, half)
    return half, lacking_fp16(values, half).masked_fill(too_large, 0), too_large


def join_bf16(half: Tensor, lacking: Tensor) -> Tensor:
    """`join` for bf16. Lacking bits that no split makes (below a weight set to 0 from outside) count as 0."""
    high = half.view(torch.int16).to(torch.int32) << 16
    both = high + lacking
    return torch.where((both ^ high) < 0, high, both).view(torch.float32)


def lacking_fp16(values: Tensor, half: Tensor) -> Tensor:
    """The int16 that `half`, the fp16 cast of fp32 `values`, lacks."""
    size = values.view(torch.int32) & MAGNITUDE
    code = half.view(torch.int16).to(torch.int32) & 0x7FFF
    base = half.abs().to(torch.float32)
    pattern = size - base.view(torch.int32)
    units = ((values.abs() - base) * 2.0**40).round()
    below = units.clamp(max=32767.0).where(code != 0, units)
    low = torch.where(code < 0x100, below.nan_to_num(0, 0, 0).clamp(-32768, 32768).to(torch.int32), pattern)
    return low.masked_fill(code >= 0x7C00, 0).to(torch.int16)


def join_fp16(half: Tensor, lacking: Tensor) -> Tensor:
    """`join` for fp16. Lacking bits that no split makes (of what a set weight was before) count as 0."""
    high = half.view(torch.int16).to(torch.int32)
    code = high & 0x7FFF
    base = half.abs().to(torch.float32)
    low = lacking.to(torch.int32).masked_fill(code >= 0x7C00, 0)
    most = torch.where(code > 0x400, 1 << 12, torch.where(code > 0x200, 1 << 13, 1 << 14))
    far = (code > 0x100) & (low.abs() > most)
    pattern = base.view(torch.int32) + low.masked_fill(far, 0)
    units = low & 0xFFFF
    zero = units.masked_fill(units > 0x8000, 0).to(torch.float32) * 2.0**-40
    below = torch.where(code == 0, zero, base + low.to(torch.float32) * 2.0**-40)
    size = torch.where(code < 0x100, below.view(torch.int32), pattern)
    return (size | ((high & 0x8000) << 16)).view(torch.float32)
