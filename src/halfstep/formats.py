"""Number formats as data, and what rounding to each of them does.

Every format is one row of `FORMATS`; its limits follow from the row. `round_reference` is the readable
definition of rounding and `round_to` its fast twin on tensors. Nothing here knows about devices or policies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from halfstep.errors import ConfigError, show


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: sign, `exponent_bits`, `mantissa_bits`, IEEE 754 subnormals.

    `bits` counts the bits that carry information (tf32: 19 of the 32 it occupies). Without infinities
    (`has_inf=False`, the OCP FP8 convention) the top exponent holds numbers too and only its all-ones
    mantissa is NaN. `torch_dtype` is None for formats that torch computes in but cannot store.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    has_inf: bool
    torch_dtype: torch.dtype | None

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormals share it."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return self.bias if self.has_inf else self.bias + 1

    @property
    def max(self) -> float:
        """Largest finite number."""
        missing = 1 if self.has_inf else 2
        return math.ldexp(2 ** (self.mantissa_bits + 1) - missing, self.max_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number; half of it, or less, rounds to zero."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    def __str__(self) -> str:
        return self.name


FP64 = Format("fp64", 64, 11, 52, True, torch.float64)
FP32 = Format("fp32", 32, 8, 23, True, torch.float32)
TF32 = Format("tf32", 19, 8, 10, True, None)
FP16 = Format("fp16", 16, 5, 10, True, torch.float16)
BF16 = Format("bf16", 16, 8, 7, True, torch.bfloat16)
E4M3FN = Format("e4m3fn", 8, 4, 3, False, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 8, 5, 2, True, torch.float8_e5m2)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {fmt.name: fmt for fmt in (FP64, FP32, TF32, FP16, BF16, E4M3FN, E5M2)}
)

_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("fp64", "f64", "float64", "double"), "fp64"),
        **dict.fromkeys(("fp32", "f32", "float32", "float", "single"), "fp32"),
        **dict.fromkeys(("tf32", "tensorfloat32"), "tf32"),
        **dict.fromkeys(("fp16", "f16", "float16", "half"), "fp16"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **dict.fromkeys(("e4m3fn", "float8_e4m3fn", "fp8_e4m3fn", "e4m3"), "e4m3fn"),
        **dict.fromkeys(("e5m2", "float8_e5m2", "fp8_e5m2"), "e5m2"),
    }
)
_BY_DTYPE: Mapping[torch.dtype, Format] = MappingProxyType(
    {fmt.torch_dtype: fmt for fmt in FORMATS.values() if fmt.torch_dtype is not None}
)


def format_of(x: str | torch.dtype | Format) -> Format:
    """Return the format that a name (`"bf16"`, `"float16"`, `"half"` ...) or a torch dtype stands for.

    Raises:
        ConfigError: no format goes by that name.
    """
    if isinstance(x, Format):
        return x
    fmt = None
    if isinstance(x, torch.dtype):
        fmt = _BY_DTYPE.get(x)
    elif isinstance(x, str):
        name = _ALIASES.get(x.strip().lower().removeprefix("torch."))
        fmt = FORMATS[name] if name is not None else None
    if fmt is None:
        raise ConfigError(f"unknown number format {show(x)}; expected one of {', '.join(FORMATS)}")
    return fmt


def parse_dtype(x: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype behind a name; floating torch dtypes pass through.

    Raises:
        ConfigError: an unknown name, a dtype that is not floating point, or tf32, which is a way to
            multiply fp32 numbers and not something a tensor can hold.
    """
    fmt = format_of(x)
    if fmt.torch_dtype is None:
        raise ConfigError(
            f"{fmt.name} is not a tensor dtype: fp32 matmuls use it under "
            "torch.set_float32_matmul_precision('high'); give fp32, bf16 or fp16 here"
        )
    return fmt.torch_dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: `"bf16"`; dtypes without a row keep torch's name (`"int64"`).

    Raises:
        ConfigError: it is no torch dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"expected a torch dtype such as torch.bfloat16, given {dtype!r:.60}")
    fmt = _BY_DTYPE.get(dtype)
    return fmt.name if fmt is not None else str(dtype).removeprefix("torch.")


def _number(x: object) -> float | Fraction:
    """`x` itself where it is a float or a Fraction; other real numbers as one of these, exactly."""
    if isinstance(x, float | Fraction):
        return x
    if isinstance(x, Integral):
        return Fraction(int(x))
    if isinstance(x, Real):  # numpy's narrow floats
        return float(x)
    raise ConfigError(
        f"expected a number (float, int or Fraction), given {x!r:.60}; "
        "turn text into one with float(), a tensor with .item()"
    )


def _floor_log2(x: Fraction) -> int:
    """Largest e with 2**e <= x, for x > 0."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def round_reference(x: float | Fraction, fmt: str | torch.dtype | Format, saturate: bool = False) -> float:
    """`x` rounded to the nearest number of `fmt`, ties to the even mantissa (IEEE 754-2019, 4.3.1).

    What lies beyond the largest finite number after rounding becomes infinity, or NaN in a format without
    infinities; with `saturate` it, and infinity itself, becomes the largest finite number (OCP FP8, 5.2).
    A Fraction is rounded once, as if it were a float of unlimited precision.

    Raises:
        ConfigError: `x` is no number.
    """
    fmt, x = format_of(fmt), _number(x)
    if isinstance(x, float) and math.isnan(x):
        return x
    sign = math.copysign(1.0, x) if isinstance(x, float) else (-1.0 if x < 0 else 1.0)
    overflow = fmt.max if saturate else (math.inf if fmt.has_inf else math.nan)
    if isinstance(x, float) and math.isinf(x):
        return math.copysign(overflow, sign)
    exact = abs(Fraction(x))
    if exact == 0:
        return math.copysign(0.0, sign)
    exponent = max(_floor_log2(exact), fmt.min_exponent)
    spacing = Fraction(2) ** (exponent - fmt.mantissa_bits)
    rounded = round(exact / spacing) * spacing
    if rounded > Fraction(fmt.max):
        return math.copysign(overflow, sign)
    return math.copysign(float(rounded), sign)


_EXPONENT_FIELD_FP64 = 0x7FF0_0000_0000_0000


@torch.no_grad()
def round_to(t: Tensor, fmt: str | torch.dtype | Format, saturate: bool = False) -> Tensor:
    """Return every element rounded as `round_reference` does, in a new tensor of the same shape and dtype.

    Differs from torch's cast in two places: torch 2.12 and newer cast to e4m3fn saturating, infinities
    included, where older torch, ml_dtypes and this function give NaN unless `saturate` is asked for; and
    torch casts fp64 by way of fp32, rounding twice, where this rounds once.

    Args:
        t: fp32 or fp64, any shape. The result carries no gradient.
        fmt: format to round to; one wider than `t` leaves the values unchanged.
        saturate: largest finite number in place of infinity or NaN on overflow.

    Raises:
        ConfigError: `t` is not an fp32 or fp64 tensor.
    """
    fmt = format_of(fmt)
    if not isinstance(t, Tensor) or t.dtype not in (torch.float32, torch.float64):
        argument = dtype_name(t.dtype) if isinstance(t, Tensor) else f"{t!r:.60}"
        raise ConfigError(
            f"round_to takes an fp32 or fp64 tensor, was given {argument}; make it one with torch.tensor()"
        )
    source_format = _BY_DTYPE[t.dtype]
    if fmt.bits >= source_format.bits:
        return t.clamp(-fmt.max, fmt.max) if saturate and fmt is source_format else t.clone()
    # Divided by the spacing, rounded to an integer, multiplied back: exact in fp64, fp32 subnormals too.
    size = t.to(torch.float64, copy=True).abs_().clamp_(max=math.ldexp(1.0, fmt.max_exponent + 2))
    spacing = size.view(torch.int64).bitwise_and(_EXPONENT_FIELD_FP64).view(torch.float64)
    spacing.clamp_(min=fmt.smallest_normal).mul_(fmt.epsilon)
    size.div_(spacing).round_().mul_(spacing)
    if saturate:
        size.clamp_(max=fmt.max)
    else:
        size.masked_fill_(size > fmt.max, math.inf if fmt.has_inf else math.nan)
    return size.to(t.dtype).copysign_(t)


def encode(value: float, fmt: str | torch.dtype | Format) -> int:
    """Return the bit pattern of a number that `fmt` holds exactly; NaN gives the canonical quiet one.

    Raises:
        ConfigError: `fmt` does not hold `value`, or it is no number.
    """
    fmt, number = format_of(fmt), _number(value)
    value = round_reference(number, fmt)
    if value != number and number == number:
        raise ConfigError(f"{number!s:.60} is not a number of {fmt}; round it first")
    sign = int(math.copysign(1.0, value) < 0) << (fmt.bits - 1)
    top = (2**fmt.exponent_bits - 1) << fmt.mantissa_bits
    if math.isnan(value):
        quiet = 2 ** (fmt.mantissa_bits - 1) if fmt.has_inf else 2**fmt.mantissa_bits - 1
        return sign | top | quiet
    if math.isinf(value):
        return sign | top
    if value == 0:
        return sign
    exponent = max(math.frexp(value)[1] - 1, fmt.min_exponent)
    significand = int(math.ldexp(abs(value), fmt.mantissa_bits - exponent))
    # The implicit leading bit of a normal number carries into the exponent field.
    return sign | (significand + ((exponent - fmt.min_exponent) << fmt.mantissa_bits))


def decode(bits: int, fmt: str | torch.dtype | Format) -> float:
    """Return the number that a bit pattern of `fmt` stands for.

    Raises:
        ConfigError: the pattern has more bits than the format, or is no whole number.
    """
    fmt = format_of(fmt)
    try:
        bits = operator.index(bits)
    except TypeError:
        raise ConfigError(f"expected a bit pattern as an int, 0x3C00 say, given {bits!r:.60}") from None
    if not 0 <= bits < 2**fmt.bits:
        raise ConfigError(f"{bits:#x} is not a pattern of the {fmt.bits} bits of {fmt}")
    sign = -1.0 if bits >> (fmt.bits - 1) else 1.0
    exponent = bits >> fmt.mantissa_bits & (2**fmt.exponent_bits - 1)
    mantissa = bits & (2**fmt.mantissa_bits - 1)
    if exponent == 2**fmt.exponent_bits - 1:
        if fmt.has_inf:
            return math.nan if mantissa else math.copysign(math.inf, sign)
        if mantissa == 2**fmt.mantissa_bits - 1:
            return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, fmt.min_exponent - fmt.mantissa_bits)
    significand = mantissa + 2**fmt.mantissa_bits
    return sign * math.ldexp(significand, exponent - fmt.bias - fmt.mantissa_bits)


Status = Literal["exact", "rounded", "subnormal", "underflow", "overflow", "infinity", "nan"]


@dataclass(frozen=True)
class Stored:
    """How one format stores one number.

    `bits` is the pattern as an int; `sign`, `exponent` and `mantissa` are its fields as strings of 0 and 1.
    `absolute_error`, `relative_error` (NaN where not defined) and `spacing` (distance to the next number
    away from zero) are in the number's own unit.
    """

    format: Format
    value: float
    bits: int
    sign: str
    exponent: str
    mantissa: str
    absolute_error: float
    relative_error: float
    spacing: float
    status: Status


def _status(x: float | Fraction, value: float, fmt: Format) -> Status:
    if isinstance(x, float) and not math.isfinite(x):
        return "nan" if math.isnan(x) else ("infinity" if fmt.has_inf else "overflow")
    if not math.isfinite(value):
        return "overflow"
    if value == 0:
        return "exact" if x == 0 else "underflow"
    if abs(value) < fmt.smallest_normal:
        return "subnormal"
    return "exact" if Fraction(value) == Fraction(x) else "rounded"


def describe(x: float | Fraction, fmt: str | torch.dtype | Format) -> Stored:
    """Return how `fmt` stores `x`: bits, value, error, spacing there, and what happened to it on the way.

    `status` says `underflow` for a number that became zero, `overflow` for one that became infinite (NaN
    without infinities), `subnormal` for one stored with fewer bits, rounded or not.

    Raises:
        ConfigError: `x` is no number.
    """
    fmt, x = format_of(fmt), _number(x)
    value = round_reference(x, fmt)
    bits = encode(value, fmt)
    text = f"{bits:0{fmt.bits}b}"
    error = relative = spacing = math.nan
    if math.isfinite(value):
        gap = Fraction(value) - Fraction(x)
        error = float(abs(gap))
        relative = float(abs(gap / Fraction(x))) if x != 0 else 0.0
        exponent = fmt.min_exponent if value == 0 else max(math.frexp(value)[1] - 1, fmt.min_exponent)
        spacing = math.ldexp(1.0, exponent - fmt.mantissa_bits)
    elif not math.isnan(value):
        error = math.nan if isinstance(x, float) and math.isinf(x) else math.inf
    split = 1 + fmt.exponent_bits
    fields = text[0], text[1:split], text[split:]
    return Stored(fmt, value, bits, *fields, error, relative, spacing, _status(x, value, fmt))
