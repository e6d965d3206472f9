"""Exact masters: an fp32 value as the 16-bit weight the model uses plus the 16 bits it lacks.

bf16: the 16-bit half is the nearest bf16, ties away from zero, and the lacking bits are the signed distance
between the two bit patterns, so that joining is one integer addition. fp16: the half is torch's cast (ties
to even); from 2^-16 up the lacking bits are again the distance of the patterns, below they count steps of
2^-40. A weight that somebody sets keeps its lacking bits: it is what it was set to within half a unit (in
fp16 a whole one at exactly 2^-14, 2^-15 and 2^-16), so that a 0 stays one.

Readable integer arithmetic on tensors, on any device; the compiled kernels equal it bit for bit. `split` and
`join` are for whoever has whole tensors of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels import codes as L

MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000
UNSUMMED = 1 << 62
"""In the place of a checksum: no rank knows that of a whole weight, of which each has a shard."""


def describe_weight(half: Tensor, whole: bool) -> dict[str, int]:
    """Return the format and a checksum of a `whole` 16-bit weight, by which its lacking bits know it again.

    Numbers only: torch's own optimizers take a string apart on the way through.
    """
    total = sum(int(part.view(torch.int16).sum()) for (part,) in parts(half)) if whole else UNSUMMED
    return {"format": L.BF16 if half.dtype == torch.bfloat16 else L.FP16, "sum": total}


def is_described(half: Tensor, description: Mapping[str, Any], model_dtype: torch.dtype) -> bool:
    """Whether `description` is of the 16-bit weight `half`, as far as it says; `model_dtype`: the model's."""
    if description["sum"] == UNSUMMED:
        return model_dtype in (half.dtype, torch.float32)
    return describe_weight(half, whole=True) == description


def split(values: Tensor, half: Tensor, lacking: Tensor) -> Tensor | None:
    """Write fp32 `values` into `half`, bf16 or fp16, and the int16 `lacking`, all three of one shape.

    The one way in for whatever makes masters; it takes no memory beside them but for a bounded part of them.
    Returns whether a value was too large (0-d, bool) for fp16, and None for bf16, which holds them all.
    """
    out_of_range = None
    for x, high, low in parts(values, half, lacking):
        if high.dtype == torch.bfloat16:
            split_bf16(x, high, low)
            continue
        x_half, bits, too_large = split_fp16(x)
        high.copy_(x_half)
        low.copy_(bits)
        out_of_range = too_large.any() if out_of_range is None else out_of_range | too_large.any()
    if out_of_range is None and half.dtype == torch.float16:
        return torch.zeros((), dtype=torch.bool, device=half.device)
    return out_of_range


def join(half: Tensor, lacking: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the fp32 values that were split into `half`, bf16 or fp16, and `lacking`, int16 of its shape.

    They are written into `out`, or a new tensor laid out as `half`. As `split`, in bounded parts.
    """
    out = torch.empty_like(half, dtype=torch.float32) if out is None else out
    for high, low, values in parts(half, lacking, out):
        if high.dtype == torch.bfloat16:
            join_bf16(high, low, values)
        else:
            values.copy_(join_fp16(high, low))
    return out


def parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The elements of tensors of one shape, a bounded number at a time; all at once where they lie apart."""
    first, size = tensors[0], tensors[0].numel()
    if not size:
        return
    values = tuple(t.detach() for t in tensors)
    dense = torch.empty_like(first, device="meta").stride() == first.stride()
    if not dense or any(t.stride() != first.stride() for t in tensors):
        yield values
        return
    flat = [t.as_strided((size,), (1,)) for t in values]
    most = _AT_ONCE_ON_CPU if first.is_cpu else _AT_ONCE
    for start in range(0, size, most):
        yield tuple(t[start : start + most] for t in flat)


_AT_ONCE = 1 << 20
_AT_ONCE_ON_CPU = 1 << 17
"""Elements; their temporaries stay in a cache of the second level."""


def round_away(values: Tensor) -> Tensor:
    """Round fp32 to the nearest bf16, ties away from zero; a NaN stays a NaN."""
    return _upper_bits(values, values.isnan()).to(torch.int16).view(torch.bfloat16)


def _upper_bits(values: Tensor, nan: Tensor) -> Tensor:
    """Return the bits of `round_away`, as int32."""
    bits = values.view(torch.int32)
    up = (bits + 0x8000) >> 16
    return torch.where(nan, (bits >> 16) | 0x7FC0, up)


def split_bf16(values: Tensor, half: Tensor, lacking: Tensor) -> None:
    """`split` for bf16.

    Exact for every value, infinities, subnormals, both zeros and values that round to infinity included; a
    NaN becomes a NaN. The bits lacking are the lower ones, for the upper are rounded by their sign.
    """
    bits, high = values.view(torch.int32), half.view(torch.int16)
    lacking.copy_(bits)
    if values.is_cpu and not bool(values.sum().isnan()):  # the same for what holds no NaN, in less time
        up = bits + 0x8000
        up >>= 16
        high.copy_(up)
        return
    nan = values.isnan()
    high.copy_(_upper_bits(values, nan))
    lacking.masked_fill_(nan, 0)


def split_fp16(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 `values` as fp16, the int16 bits that this lacks, and which are too large: these become 65504.

    Exact for 0 and 2^-16 <= |x| < 65520; below, the error is at most 2^-41, or 2^-40 within 2^-41 of the
    upper tie of an even half (16 bits cannot tell its 65,537 neighbours apart). inf and NaN pass.
    """
    half = values.to(torch.float16)
    too_large = half.isinf() & values.isfinite()
    half = torch.where(too_large, half.sign() * 65504, half)
    return half, lacking_fp16(values, half).masked_fill(too_large, 0), too_large


def join_bf16(half: Tensor, lacking: Tensor, out: Tensor) -> None:
    """`join` for bf16. Lacking bits that no split makes (below a weight set to 0 from outside) count as 0."""
    both = out.view(torch.int32)
    both.copy_(half.view(torch.int16))
    both <<= 16
    if half.is_cpu and bool(half.view(torch.int16).abs().amin() > 0):  # no zero, and none below it: less time
        both += lacking
        return
    low = both + lacking
    torch.where((low ^ both) < 0, both, low, out=both)


def lacking_fp16(values: Tensor, half: Tensor) -> Tensor:
    """Return the int16 that `half`, the fp16 cast of fp32 `values`, lacks."""
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
