"""Exponent histograms of float tensors, and what another format or scale would do to the values.

Counting runs on the tensor's device and, away from the CPU, never waits for it; reading happens later.
Nothing here changes a tensor or draws a random number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.formats import FORMATS, Format, dtype_name, format_of, round_to
from halfstep.trees import dense_values, ends_of

_INT_OF_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_CHUNK = 1 << 22


def lowest_exponent(fmt: Format) -> int:
    """Return the exponent of the smallest subnormal: the first exponent bin of the format."""
    return fmt.min_exponent - fmt.mantissa_bits


def _bins(fmt: Format) -> int:
    """Return the number of bins: zero, one for each exponent, infinity, NaN."""
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
        """Return the number of elements counted."""
        return sum(self.exponents) + self.zeros + self.infs + self.nans

    @property
    def subnormals(self) -> int:
        """Return the number of nonzero elements below the smallest normal number of the tensor's format."""
        return sum(self.exponents[: FORMATS[self.dtype].min_exponent - self.lowest])

    @property
    def min_exponent(self) -> int | None:
        """Return the smallest exponent present; None where no element is finite and not zero."""
        return next((self.lowest + i for i, n in enumerate(self.exponents) if n), None)

    @property
    def max_exponent(self) -> int | None:
        """Return the largest exponent present; None where no element is finite and not zero."""
        last = next((i for i in reversed(range(len(self.exponents))) if self.exponents[i]), None)
        return None if last is None else self.lowest + last

    def trimmed(self) -> tuple[int, tuple[int, ...]]:
        """Return the first exponent present and the counts up to the last one (0, () when none is)."""
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
        """Copy the counts to the host (the one point that waits for an accelerator)."""
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
    t = dense_values(t.detach())
    if not t.is_floating_point():
        raise ConfigError(f"a histogram counts floating-point tensors, was given {dtype_name(t.dtype)}")
    return t.contiguous().view(-1)


def _bin_index(magnitude: Tensor, fmt: Format) -> Tensor:
    """Return the bin of every bit pattern (sign dropped), by integer operations, which never flush.

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


def count_many(parts: Sequence[Tensor]) -> Tensor:
    """Count many flat fp32 CPU tensors together: int64 [len(parts), bins], each row as `count`'s bins."""
    fmt = FORMATS["fp32"]
    raw = torch.cat([p.view(torch.int32) for p in parts])
    sizes = torch.tensor([p.numel() for p in parts], device="cpu")
    row = torch.repeat_interleave(torch.arange(len(parts), dtype=torch.int32, device="cpu"), sizes)
    fields = ((raw >> fmt.mantissa_bits) & 0x1FF) + (row << 9)
    counted = torch.bincount(fields, minlength=512 * len(parts)).view(len(parts), 2, 256).sum(1)
    out = torch.zeros(len(parts), _bins(fmt), dtype=torch.int64, device="cpu")
    out[:, 1 + fmt.mantissa_bits : 255 + fmt.mantissa_bits] = counted[:, 1:255]
    # Zeros, subnormals, infinities and NaN share two fields: only rows that have one are looked at again.
    for i in (i for i, rare in enumerate((counted[:, 0] + counted[:, 255]).tolist()) if rare):
        magnitude = parts[i].view(torch.int32) & 0x7FFF_FFFF
        field = magnitude >> fmt.mantissa_bits
        rare = magnitude[(field == 0) | (field == 255)]
        out[i] += torch.bincount(_bin_index(rare, fmt), minlength=_bins(fmt))
    return out


def count(t: Tensor) -> Counts:
    """Count the exponents of `t` (any float dtype, shape and device; complex: both parts).

    Exact for every value: subnormals are counted at their own exponent, zeros, infinities and NaN apart.
    On an accelerator nothing waits.

    Raises:
        ConfigError: `t` is not floating point.
    """
    flat = _flat(t)
    fmt = format_of(flat.dtype)
    bins = torch.zeros(_bins(fmt), dtype=torch.int64, device=flat.device)
    for part in flat.split(_CHUNK):
        raw = part.view(_INT_OF_BITS[fmt.bits])
        wide = raw.to(torch.int32) if fmt.bits < 32 else raw
        index = _bin_index(wide & ((1 << (fmt.bits - 1)) - 1), fmt)
        if index.is_cpu:
            bins += torch.bincount(index, minlength=len(bins))
        else:  # bincount asks an accelerator for the largest index and waits; adding ones does not
            index = index.to(torch.int64)
            bins.scatter_add_(0, index, torch.ones_like(index))
    return Counts(fmt.name, bins)


def amax(t: Tensor) -> Tensor:
    """Return the largest magnitude, 0-d, of `t`'s dtype on its device; NaN if there is one, 0 if empty.

    One pass of aminmax, which carries NaN along: the result is finite exactly when every element is.
    """
    low, high = ends_of(dense_values(t.detach()))
    return torch.maximum(low.neg(), high)


def what_if(t: Tensor, fmt: str | torch.dtype | Format, scale_log2: int = 0) -> WhatIf:
    """Return what storing `t` in `fmt` after scaling by 2**scale_log2 would do, exactly; any float dtype.

    Raises:
        ConfigError: `t` is not floating point.
    """
    fmt = format_of(fmt)
    finite = nonzero = flushed = overflow = signal = noise = 0.0
    for part in _flat(t).split(_CHUNK):
        x = part.double()
        x = x[x.isfinite()]
        stored = round_to(torch.ldexp(x, torch.tensor(scale_log2, device="cpu")), fmt)
        stays = stored.isfinite()
        back = torch.ldexp(stored, torch.tensor(-scale_log2, device="cpu"))
        finite += x.numel()
        nonzero += int((x != 0).sum())
        flushed += int(((x != 0) & (stored == 0)).sum())
        overflow += int((~stays).sum())
        signal += x.square()[stays].sum().item()
        noise += (x - back).square()[stays].sum().item()
    if finite == overflow:
        snr = math.nan
    else:
        snr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
    return WhatIf(fmt.name, scale_log2, flushed / max(nonzero, 1), overflow / max(finite, 1), snr)
