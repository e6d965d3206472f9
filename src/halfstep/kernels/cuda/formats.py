# Triton infers types: parameters have none, and constants are passed as plain numbers.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
"""How GPU kernels read and write gradients, weights and states: split, rounding and storage in Triton.

The 16 bits of a bf16 travel as int16 and are converted by integer arithmetic; those of an fp16 as float16.
Branches on formats are folded away when a kernel is compiled, so each one ends in a single `return`.
"""

import triton
import triton.language as tl

from halfstep.kernels import codes as L

PLAIN = tl.constexpr(L.PLAIN)
BF16_EXACT, BF16_MASTER = tl.constexpr(L.BF16_EXACT), tl.constexpr(L.BF16_MASTER)
BF16_NONE, BF16_STOCHASTIC = tl.constexpr(L.BF16_NONE), tl.constexpr(L.BF16_STOCHASTIC)
FP16_EXACT, FP16_MASTER = tl.constexpr(L.FP16_EXACT), tl.constexpr(L.FP16_MASTER)
FP16_NONE = tl.constexpr(L.FP16_NONE)
BF16, FP16 = tl.constexpr(L.BF16), tl.constexpr(L.FP16)
STATE_FP32, STATE_BF16 = tl.constexpr(L.STATE_FP32), tl.constexpr(L.STATE_BF16)
LEAST_EXPONENT, PANEL = tl.constexpr(L.LEAST_EXPONENT), tl.constexpr(L.PANEL)

MASK = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
WEYL = tl.constexpr(0x9E3779B1)


# ---- bits -----------------------------------------------------------------------------------------------


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(b):
    return b.to(tl.float32, bitcast=True)


@triton.jit
def plus(a, b):
    """Integer addition that wraps, as in the reference."""
    return tl.add(a, b, sanitize_overflow=False)


@triton.jit
def minus(a, b):
    return tl.sub(a, b, sanitize_overflow=False)


@triton.jit
def times(a, b):
    return tl.mul(a, b, sanitize_overflow=False)


@triton.jit
def word(x: tl.constexpr):
    return tl.full((), x, tl.uint32)


@triton.jit
def dither(counter):
    counter = times(counter ^ (counter >> 16), word(0x7FEB352D))
    return counter ^ (counter >> 15)


@triton.jit
def scramble(x):
    x = times(x ^ (x >> 16), word(0x7FEB352D))
    x = times(x ^ (x >> 15), word(0x846CA68B))
    return x ^ (x >> 16)


@triton.jit
def random_bits(place, key):
    lane = times((place % PANEL).to(tl.uint32), word(WEYL))
    return lane ^ scramble(plus(times((place // PANEL).to(tl.uint32), word(WEYL)), key))


# ---- 16-bit formats: the 16 bits travel as int16 for bf16, as float16 for fp16 ---------------------------


@triton.jit
def from_bf16(h):
    return float_of(h.to(tl.int32) << 16)


@triton.jit
def bf16_even(x):
    b = bits_of(x)
    up = plus(plus(b, 0x7FFF), (b >> 16) & 1) >> 16
    return tl.where((b & MASK) > INF, (b >> 16) | 0x40, up).to(tl.int16)


@triton.jit
def bf16_away(x):
    b = bits_of(x)
    up = plus(b, 0x8000) >> 16
    return tl.where((b & MASK) > INF, (b >> 16) | 0x7FC0, up).to(tl.int16)


@triton.jit
def bf16_random(x, noise):
    b = bits_of(x)
    up = plus(b, (noise & 0xFFFF).to(tl.int32)) >> 16
    kept = (b >> 16) | tl.where((b & MASK) > INF, 0x40, 0)
    return tl.where((b & MASK) >= INF, kept, up).to(tl.int16)


@triton.jit
def join_bf16(h, lacking):
    high = h.to(tl.int32) << 16
    both = plus(high, lacking.to(tl.int32))
    return float_of(tl.where((both ^ high) < 0, high, both))


@triton.jit
def lacking_bf16(x, h):
    b = bits_of(x)
    return tl.where((b & MASK) > INF, 0, minus(b, h.to(tl.int32) << 16)).to(tl.int16)


@triton.jit
def join_fp16(h, lacking):
    high = h.to(tl.int16, bitcast=True).to(tl.int32)
    code = high & 0x7FFF
    base = tl.abs(h.to(tl.float32))
    low = tl.where(code >= 0x7C00, 0, lacking.to(tl.int32))
    most = tl.where(code > 0x400, 1 << 12, tl.where(code > 0x200, 1 << 13, 1 << 14))
    far = (code > 0x100) & (tl.abs(low) > most)
    pattern = plus(bits_of(base), tl.where(far, 0, low))
    units = low & 0xFFFF
    zero = tl.where(units > 0x8000, 0, units).to(tl.float32) * (2.0**-40)
    below = tl.where(code == 0, zero, base + low.to(tl.float32) * (2.0**-40))
    size = tl.where(code < 0x100, bits_of(below), pattern)
    return float_of(size | ((high & 0x8000) << 16))


@triton.jit
def lacking_fp16(x, h):
    size = bits_of(x) & MASK
    code = h.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    base = tl.abs(h.to(tl.float32))
    pattern = minus(size, bits_of(base))
    units = (tl.abs(x) - base) * (2.0**40)
    units = tl.where(code < 0x100, units, 0.0)  # only there it is used, and small
    below = ((units + 12582912.0) - 12582912.0).to(tl.int32)  # to the nearest integer, ties to even
    below = tl.where((code != 0) & (below > 32767), 32767, below)
    low = tl.where(code < 0x100, below, pattern)
    return tl.where(code >= 0x7C00, 0, low).to(tl.int16)


# ---- 8-bit states ---------------------------------------------------------------------------------------


@triton.jit
def read_signed(code, exponent):
    least = ((exponent - 15) << 23) | ((code & 128) << 24)
    return float_of(plus((code & 127) << 20, least)) - float_of(least)


@triton.jit
def read_unsigned(code, exponent):
    return float_of((code + ((exponent - 31) << 3)) << 20)


@triton.jit
def nan_to_inf(x):
    return tl.where((bits_of(x) & MASK) > INF, INF, bits_of(x))


@triton.jit
def write_signed(x, exponent, random):
    b = nan_to_inf(x)
    least = (exponent - 15) << 23
    raised = bits_of(float_of(b & MASK) + float_of(least))
    chance = (random & 0xFFFF).to(tl.int32) << 4
    code = tl.minimum(plus(minus(raised, least), chance) >> 20, 127)
    return (code | ((b >> 24) & 128)).to(tl.uint8)


@triton.jit
def write_unsigned(x, exponent, random):
    chance = (random >> 16).to(tl.int32) << 4
    code = (plus(nan_to_inf(x) & MASK, chance) >> 20) - ((exponent - 31) << 3)
    return tl.minimum(tl.maximum(code, 0), 255).to(tl.uint8)


@triton.jit
def exponent_for(bound):
    return tl.maximum(tl.minimum(((bits_of(bound) >> 20) + 1) >> 3, 255), LEAST_EXPONENT)


@triton.jit
def peak_of(x):
    """Largest magnitude; NaN is the largest."""
    return float_of(tl.max(bits_of(x) & MASK, axis=0))


# ---- memory ---------------------------------------------------------------------------------------------


@triton.jit
def place(address, start, lane, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    at = address.to(tl.pointer_type(dtype)) + start
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at + lane


@triton.jit
def read(address, start, lane, live, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements start + lane at an address; where `live` is None all of them exist."""
    at = place(address, start, lane, dtype, ALIGNED)
    if live is None:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=live, other=0)
    return value


@triton.jit
def write(address, start, lane, live, value, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    at = place(address, start, lane, dtype, ALIGNED)
    if live is None:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=live)


@triton.jit
def read_grad(address, start, lane, live, GRAD: tl.constexpr, ALIGNED: tl.constexpr):
    if GRAD == BF16:
        g = from_bf16(read(address, start, lane, live, tl.int16, ALIGNED))
    elif GRAD == FP16:
        g = read(address, start, lane, live, tl.float16, ALIGNED).to(tl.float32)
    else:
        g = read(address, start, lane, live, tl.float32, ALIGNED)
    return g


@triton.jit
def read_weight(weight, extra, start, lane, live, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    if KIND == PLAIN:
        w = read(weight, start, lane, live, tl.float32, ALIGNED)
    elif KIND == BF16_MASTER:  # a weight that was changed from outside counts more than its master
        w = read(extra, start, lane, live, tl.float32, ALIGNED)
        half = read(weight, start, lane, live, tl.int16, ALIGNED)
        w = tl.where(bf16_away(w) == half, w, from_bf16(half))
    elif KIND == FP16_MASTER:
        w = read(extra, start, lane, live, tl.float32, ALIGNED)
        half = read(weight, start, lane, live, tl.float16, ALIGNED)
        same = w.to(tl.float16).to(tl.int16, bitcast=True) == half.to(tl.int16, bitcast=True)
        w = tl.where(same, w, half.to(tl.float32))
    elif KIND == FP16_EXACT:
        half = read(weight, start, lane, live, tl.float16, ALIGNED)
        w = join_fp16(half, read(extra, start, lane, live, tl.int16, ALIGNED))
    elif KIND == FP16_NONE:
        w = read(weight, start, lane, live, tl.float16, ALIGNED).to(tl.float32)
    elif KIND == BF16_EXACT:
        half = read(weight, start, lane, live, tl.int16, ALIGNED)
        w = join_bf16(half, read(extra, start, lane, live, tl.int16, ALIGNED))
    else:
        w = from_bf16(read(weight, start, lane, live, tl.int16, ALIGNED))
    return w


@triton.jit
def write_weight(
    w, weight, extra, start, lane, live, random, over, KIND: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store fp32 `w`; a finite one too large for an exact fp16 master stays at 65504 and sets `over`."""
    if KIND == PLAIN:
        write(weight, start, lane, live, w, tl.float32, ALIGNED)
    elif KIND == BF16_MASTER:
        write(weight, start, lane, live, bf16_away(w), tl.int16, ALIGNED)
        write(extra, start, lane, live, w, tl.float32, ALIGNED)
    elif KIND == BF16_EXACT:
        half = bf16_away(w)
        write(weight, start, lane, live, half, tl.int16, ALIGNED)
        write(extra, start, lane, live, lacking_bf16(w, half), tl.int16, ALIGNED)
    elif KIND == BF16_NONE:
        write(weight, start, lane, live, bf16_even(w), tl.int16, ALIGNED)
    elif KIND == BF16_STOCHASTIC:
        write(weight, start, lane, live, bf16_random(w, random), tl.int16, ALIGNED)
    elif KIND == FP16_EXACT:
        half = w.to(tl.float16)
        code = half.to(tl.int16, bitcast=True)
        large = ((code & 0x7FFF) == 0x7C00) & ((bits_of(w) & MASK) < INF)
        lacking = tl.where(large, 0, lacking_fp16(w, half)).to(tl.int16)
        write(weight, start, lane, live, (code - large.to(tl.int16)).to(tl.int16), tl.int16, ALIGNED)
        write(extra, start, lane, live, lacking, tl.int16, ALIGNED)
        if live is not None:
            large = large & live
        tl.store(over + lane * 0, 1, mask=large)
    else:
        write(weight, start, lane, live, w.to(tl.float16), tl.float16, ALIGNED)
        if KIND == FP16_MASTER:
            write(extra, start, lane, live, w, tl.float32, ALIGNED)


@triton.jit
def read_state(address, start, lane, live, STATE: tl.constexpr, ALIGNED: tl.constexpr):
    if STATE == STATE_FP32:
        x = read(address, start, lane, live, tl.float32, ALIGNED)
    else:
        x = from_bf16(read(address, start, lane, live, tl.int16, ALIGNED))
    return x


@triton.jit
def write_state(
    address, start, lane, live, x, exponent, random,
    INDEX: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if STATE == STATE_FP32:
        write(address, start, lane, live, x, tl.float32, ALIGNED)
    elif STATE == STATE_BF16:
        write(address, start, lane, live, bf16_random(x, random >> (16 * INDEX)), tl.int16, ALIGNED)
    elif INDEX == 0:
        write(address, start, lane, live, write_signed(x, exponent, random), tl.uint8, ALIGNED)
    else:
        write(address, start, lane, live, write_unsigned(x, exponent, random), tl.uint8, ALIGNED)
