"""Exponent histograms of float tensors, and what another format or scale would do to the values.

Counting runs on the tensor's device and, away from the CPU, never waits for it; reading happens later. A
tensor of 16 bits or fewer is counted without loss, one bin a bit pattern, so that every what-if question can
be answered from the count alone. Nothing here changes a tensor or draws a random number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.formats import FORMATS, Format, dtype_name, format_of, round_to

_INT_OF_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_CHUNK = 1 << 22


def lowest_exponent(fmt: Format) -> int:
    """Exponent of the smallest subnormal: the first exponent bin of the format."""
    return fmt.min_exponent - fmt.mantissa_bits


def _bins(fmt: Format) -> int:
    """Zero, one bin for each exponent, infinity, NaN."""
    return fmt.max_exponent - lowest_exponent(fmt) + 1 + 3


@dataclass(frozen=True)
class Histogram:
    """How many elements have which exponent, on the host.

    `exponents[i]` counts the finite values with floor(log2(|x|)) == `lowest` + i, subnormals included.
    `dtype` names the format of the tensor that was counted.
    """

    dtype: str
    lowest: int
    exponents: tuple[int, ...]
    zeros: int
    infs: int
    nans: int

    @property
    def total(self) -> int:
        """Number of elements counted."""
        return sum(self.exponents) + self.zeros + self.infs + self.nans

    @property
    def subnormals(self) -> int:
        """Elements below the smallest normal number of the tensor's own format, zero not among them."""
        return sum(self.exponents[: FORMATS[self.dtype].min_exponent - self.lowest])

    @property
    def min_exponent(self) -> int | None:
        """Smallest exponent present; None where no element is finite and not zero."""
        return next((self.lowest + i for i, n in enumerate(self.exponents) if n), None)

    @property
    def max_exponent(self) -> int | None:
        """Largest exponent present; None where no element is finite and not zero."""
        last = next((i for i in reversed(range(len(self.exponents))) if self.exponents[i]), None)
        return None if last is None else self.lowest + last

    def count_below(self, exponent: int) -> int:
        """Finite elements other than zero whose magnitude is under 2**exponent."""
        return sum(self.exponents[: max(0, exponent - self.lowest)])

    def flushed(self, fmt: str | torch.dtype | Format, scale_log2: int = 0) -> tuple[int, int]:
        """At least and at most how many nonzero elements become zero in `fmt` after scaling by 2**scale_log2.

        Half of the smallest subnormal itself goes to zero and everything above it does not, so only the
        elements of that one exponent are uncertain; `Codes.what_if` has no such doubt.
        """
        edge = lowest_exponent(format_of(fmt)) - 1 - scale_log2
        return self.count_below(edge), self.count_below(edge + 1)

    def overflowed(self, fmt: str | torch.dtype | Format, scale_log2: int = 0) -> tuple[int, int]:
        """At least and at most how many finite elements leave the range of `fmt` after scaling."""
        edge = format_of(fmt).max_exponent + 1 - scale_log2
        finite = sum(self.exponents)
        return finite - self.count_below(edge), finite - self.count_below(edge - 1)

    def trimmed(self) -> tuple[int, tuple[int, ...]]:
        """First exponent present and the counts from it to the last one present (0, () when none is)."""
        first, last = self.min_exponent, self.max_exponent
        if first is None or last is None:
            return 0, ()
        return first, self.exponents[first - self.lowest : last - self.lowest + 1]


@dataclass(frozen=True)
class Counts:
    """An exponent histogram still on its device: `bins` is int64 [zero, exponents..., inf, nan]."""

    dtype: str
    bins: Tensor

    def read(self) -> Histogram:
        """Copies the counts to the host (the one point where an accelerator is waited for)."""
        zeros, *middle, infs, nans = self.bins.tolist()
        return Histogram(self.dtype, lowest_exponent(FORMATS[self.dtype]), tuple(middle), zeros, infs, nans)

    def __add__(self, other: Counts) -> Counts:
        if other.dtype != self.dtype:
            raise ConfigError(f"cannot add a count of {other.dtype} to one of {self.dtype}; keep them apart")
        return Counts(self.dtype, self.bins + other.bins)


@dataclass(frozen=True)
class WhatIf:
    """What storing values in a format after scaling by 2**scale_log2 would do, nothing clamped.

    `flushed`: share of the finite nonzero values that become zero. `overflow`: share of the finite values
    that do not stay finite. `snr_db`: 10 log10(sum x^2 / sum (x - q)^2) over the values that stay finite,
    infinite where nothing was lost, NaN where no value stays finite.
    """

    format: str
    scale_log2: int
    flushed: float
    overflow: float
    snr_db: float


def _flat(t: Tensor) -> Tensor:
    t = t.detach()
    if t.layout != torch.strided:
        t = t.coalesce().values() if t.layout == torch.sparse_coo else t.values()
    if t.is_complex():
        t = torch.view_as_real(t)
    if not t.is_floating_point():
        raise ConfigError(f"a histogram counts floating-point tensors, was given {dtype_name(t.dtype)}")
    return t.contiguous().view(-1)


def _bits(flat: Tensor, fmt: Format) -> Tensor:
    """Bit patterns as non-negative int32 (int64 for fp64), the sign dropped."""
    raw = flat.view(_INT_OF_BITS[fmt.bits])
    wide = raw.to(torch.int32) if fmt.bits < 32 else raw
    return wide & ((1 << (fmt.bits - 1)) - 1)


def _bin_index(magnitude: Tensor, fmt: Format) -> Tensor:
    """Bin of every bit pattern (sign dropped), with integer operations only: flushing modes cannot touch it.

    A normal number with exponent field f lands in bin f + mantissa_bits, infinity included where the format
    has one. A subnormal's exponent is that of its mantissa as an integer.
    """
    field = magnitude >> fmt.mantissa_bits
    mantissa = magnitude & ((1 << fmt.mantissa_bits) - 1)
    if fmt.bits == 64:
        leading = (mantissa.to(torch.float64).view(torch.int64) >> 52) - 1023
    else:
        leading = (mantissa.to(torch.float32).view(torch.int32) >> 23) - 127
    index = torch.where(field == 0, leading.clamp_(min=-1) + 1, field + fmt.mantissa_bits)
    top = (1 << fmt.exponent_bits) - 1
    if fmt.has_inf:
        return index + ((field == top) & (mantissa != 0)).to(index.dtype)
    nan = magnitude == (1 << (fmt.bits - 1)) - 1
    return torch.where(nan, _bins(fmt) - 1, index)


def _bincount(index: Tensor, size: int) -> Tensor:
    if index.device.type == "cpu":
        return torch.bincount(index, minlength=size)
    # bincount asks an accelerator for the largest index and waits; adding ones does not.
    counts = torch.zeros(size, dtype=torch.int64, device=index.device)
    wide = index.to(torch.int64)
    return counts.scatter_add_(0, wide, torch.ones_like(wide))


def _count_codes(flat: Tensor, fmt: Format) -> Tensor:
    """Lossless count of bit patterns, int64 [2**bits]."""
    mask = (1 << fmt.bits) - 1
    counts = torch.zeros(1 << fmt.bits, dtype=torch.int64, device=flat.device)
    for part in flat.view(_INT_OF_BITS[fmt.bits]).split(_CHUNK):
        wide = part.view(torch.uint16).to(torch.int32) if fmt.bits == 16 else part.to(torch.int32)
        counts += _bincount(wide & mask, 1 << fmt.bits)
    return counts


def count_many(parts: Sequence[Tensor]) -> Tensor:
    """Counts many flat fp32 CPU tensors in one go: int64 [len(parts), bins], each row as `count`'s bins."""
    fmt = FORMATS["fp32"]
    raw = torch.cat([p.view(torch.int32) for p in parts])
    sizes = torch.tensor([p.numel() for p in parts])
    row = torch.repeat_interleave(torch.arange(len(parts), dtype=torch.int32), sizes)
    fields = ((raw >> fmt.mantissa_bits) & 0x1FF) + (row << 9)
    counted = torch.bincount(fields, minlength=512 * len(parts)).view(len(parts), 2, 256).sum(1)
    out = torch.zeros(len(parts), _bins(fmt), dtype=torch.int64)
    out[:, 1 + fmt.mantissa_bits : 255 + fmt.mantissa_bits] = counted[:, 1:255]
    # Zeros, subnormals, infinities and NaN share two fields: only rows that have one are looked at again.
    for i in (i for i, rare in enumerate((counted[:, 0] + counted[:, 255]).tolist()) if rare):
        magnitude = parts[i].view(torch.int32) & 0x7FFF_FFFF
        field = magnitude >> fmt.mantissa_bits
        rare = magnitude[(field == 0) | (field == 255)]
        out[i] += torch.bincount(_bin_index(rare, fmt), minlength=_bins(fmt))
    return out


def _count_on_cpu(flat: Tensor, fmt: Format) -> Tensor:
    """A tensor of 32 bits or fewer, counted as the fp32 values that it holds exactly."""
    parts = flat.split(_CHUNK) if flat.numel() else ()
    wide = sum(
        (count_many([part.to(torch.float32)])[0] for part in parts),
        torch.zeros(_bins(FORMATS["fp32"])).long(),
    )
    start = 1 + lowest_exponent(fmt) - lowest_exponent(FORMATS["fp32"])
    return torch.cat([wide[:1], wide[start : start + _bins(fmt) - 3], wide[-2:]])


def count(t: Tensor) -> Counts:
    """Counts the exponents of `t` (any float dtype, shape and device; complex: both parts).

    Exact for every value: subnormals are counted at their own exponent, zeros, infinities and NaN apart.
    On an accelerator nothing waits.

    Raises:
        ConfigError: `t` is not floating point.
    """
    flat = _flat(t)
    fmt = format_of(flat.dtype)
    if flat.device.type == "cpu" and fmt.bits <= 32:
        bins = _count_on_cpu(flat, fmt)
    else:
        bins = torch.zeros(_bins(fmt), dtype=torch.int64, device=flat.device)
        for part in flat.split(_CHUNK):
            bins += _bincount(_bin_index(_bits(part, fmt), fmt), _bins(fmt))
    return Counts(fmt.name, bins)


def amax(t: Tensor) -> Tensor:
    """Largest magnitude as a 0-d tensor of `t`'s dtype on its device; NaN if there is one, 0 when empty.

    One pass of aminmax, which carries NaN along: the result is finite exactly when every element is.
    """
    t = t.detach()
    if t.layout != torch.strided:
        t = _flat(t)
    if t.numel() == 0:
        return torch.zeros((), dtype=t.dtype, device=t.device)
    if t.is_complex():
        t = torch.view_as_real(t)
    if format_of(t.dtype).bits == 8:
        t = t.to(torch.float32)
    low, high = torch.aminmax(t)
    return torch.maximum(low.neg(), high)


@dataclass(frozen=True)
class Codes:
    """The lossless count of a tensor of 16 bits or fewer: `counts` is int64 [2**bits], one bin a pattern."""

    dtype: str
    counts: Tensor

    @classmethod
    def of(cls, t: Tensor) -> Codes:
        """Counts every bit pattern of `t` on its device, without waiting for an accelerator.

        Raises:
            ConfigError: `t` has more than 16 bits an element; use `count` and `what_if`.
        """
        flat = _flat(t)
        fmt = format_of(flat.dtype)
        if fmt.bits > 16:
            raise ConfigError(
                f"a lossless count needs a dtype of 16 bits or fewer, was given {fmt}; use count and what_if"
            )
        return cls(fmt.name, _count_codes(flat, fmt))

    def values(self) -> tuple[Tensor, Tensor]:
        """The distinct values present (fp64, sorted by bit pattern) and how often each occurs (int64)."""
        fmt = FORMATS[self.dtype]
        codes = self.counts.cpu().nonzero().view(-1)
        narrow = codes.to(torch.uint8) if fmt.bits == 8 else codes.to(torch.int32).to(torch.uint16)
        assert fmt.torch_dtype is not None
        return narrow.view(fmt.torch_dtype).to(torch.float64), self.counts.cpu()[codes]

    def histogram(self) -> Histogram:
        """The exponent histogram of the same tensor."""
        fmt = FORMATS[self.dtype]
        magnitude = torch.arange(1 << fmt.bits, dtype=torch.int32) & ((1 << (fmt.bits - 1)) - 1)
        bins = torch.zeros(_bins(fmt), dtype=torch.int64)
        return Counts(self.dtype, bins.index_add_(0, _bin_index(magnitude, fmt), self.counts.cpu())).read()

    def what_if(self, fmt: str | torch.dtype | Format, scale_log2: int = 0) -> WhatIf:
        """What storing the tensor in `fmt` after scaling by 2**scale_log2 would do, exactly."""
        values, weights = self.values()
        return _what_if([(values, weights)], format_of(fmt), scale_log2)

    def best_scale(self, fmt: str | torch.dtype | Format, spare_bits: int = 0) -> WhatIf:
        """The power-of-two scale that loses least: no overflow with `spare_bits` to go, best signal-to-noise.

        Where several scales are equally good the one nearest to 1 is taken.
        """
        fmt = format_of(fmt)
        values, weights = self.values()
        top = values.abs()[values.isfinite()].max().item() if values.isfinite().any() else 0.0
        if top == 0.0:
            return _what_if([(values, weights)], fmt, 0)
        highest = fmt.max_exponent - spare_bits - math.frexp(top)[1] + 1
        if spare_bits == 0 and math.ldexp(top, highest) > fmt.max:
            highest -= 1
        tried = (_what_if([(values, weights)], fmt, k) for k in range(highest, highest - 64, -1))
        return max(tried, key=lambda w: (w.snr_db, -abs(w.scale_log2)))


def _what_if(parts: Iterable[tuple[Tensor, Tensor | None]], fmt: Format, scale_log2: int) -> WhatIf:
    finite = nonzero = flushed = overflow = 0.0
    signal = noise = 0.0
    for values, weights in parts:
        weight = torch.ones_like(values) if weights is None else weights.to(torch.float64)
        keep = values.isfinite()
        x, weight = values[keep], weight[keep]
        stored = round_to(torch.ldexp(x, torch.tensor(scale_log2)), fmt)
        stays = stored.isfinite()
        back = torch.ldexp(stored, torch.tensor(-scale_log2))
        finite += weight.sum().item()
        nonzero += weight[x != 0].sum().item()
        flushed += weight[(x != 0) & (stored == 0)].sum().item()
        overflow += weight[~stays].sum().item()
        signal += (weight * x.square())[stays].sum().item()
        noise += (weight * (x - back).square())[stays].sum().item()
    if finite == overflow:
        snr = math.nan
    else:
        snr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
    return WhatIf(fmt.name, scale_log2, flushed / max(nonzero, 1), overflow / max(finite, 1), snr)


def what_if(t: Tensor, fmt: str | torch.dtype | Format, scale_log2: int = 0) -> WhatIf:
    """The same as `Codes.what_if` from the tensor itself; any float dtype, a pass over the values.

    Raises:
        ConfigError: `t` is not floating point.
    """
    parts = ((part.to(torch.float64), None) for part in _flat(t).split(_CHUNK))
    return _what_if(parts, format_of(fmt), scale_log2)
