# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOptionalOperand=false
"""GPU kernels: scalars of a step, the one-pass update and the gradient measurement, equal to reference.py.

Each kernel walks a table of addresses, so that one launch serves a whole model. Conversions to and from bf16
are integer arithmetic; division and square root are the correctly rounded ones, and callers switch fused
multiply-add off (`enable_fp_fusion=False`). Differences from the reference that remain: payloads of NaN, the
order in which a norm is summed, and powers of beta (repeated multiplication here, the platform's `pow` there),
which in float64 differ by parts in 1e15 before they are rounded to fp32.
"""

import triton
import triton.language as tl

from halfstep.optim import _layout as L

ADAMW, ADAM = tl.constexpr(L.ADAMW), tl.constexpr(L.ADAM)
SGD, SGD_NESTEROV, LION = tl.constexpr(L.SGD), tl.constexpr(L.SGD_NESTEROV), tl.constexpr(L.LION)
PLAIN = tl.constexpr(L.PLAIN)
BF16_EXACT, BF16_MASTER = tl.constexpr(L.BF16_EXACT), tl.constexpr(L.BF16_MASTER)
BF16_NONE, BF16_STOCHASTIC = tl.constexpr(L.BF16_NONE), tl.constexpr(L.BF16_STOCHASTIC)
FP16_EXACT, FP16_MASTER = tl.constexpr(L.FP16_EXACT), tl.constexpr(L.FP16_MASTER)
FP16_NONE = tl.constexpr(L.FP16_NONE)
BF16, FP16 = tl.constexpr(L.BF16), tl.constexpr(L.FP16)
STATE_FP32, STATE_BF16 = tl.constexpr(L.STATE_FP32), tl.constexpr(L.STATE_BF16)
STATE_8BIT = tl.constexpr(L.STATE_8BIT)
BLOCK, LEAST_TOP = tl.constexpr(L.BLOCK), tl.constexpr(L.LEAST_TOP)
COLUMNS = tl.constexpr(8)
"""int64 columns of the address table: weight, master or lacking bits, two states, their exponents, step, key."""
ROW = tl.constexpr(8)
"""fp32 columns of the scalars: gradient factor, then the algorithm's seven."""

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
    pattern = plus(bits_of(base), low)
    zero = (low & 0xFFFF).to(tl.float32) * (2.0**-40)
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
def read_signed(code, top):
    least = (top - 15) << 23
    size = float_of(((code & 127) << 20) + least) - float_of(least)
    return float_of(bits_of(size) | ((code & 128) << 24))


@triton.jit
def read_unsigned(code, top):
    return float_of((code + ((top - 31) << 3)) << 20)


@triton.jit
def write_signed(x, top, random):
    b = bits_of(x)
    least = (top - 15) << 23
    raised = bits_of(float_of(b & MASK) + float_of(least))
    chance = (random & 0xFFFF).to(tl.int32) << 4
    code = tl.minimum(plus(minus(raised, least), chance) >> 20, 127)
    return (code | ((b >> 24) & 128)).to(tl.uint8)


@triton.jit
def write_unsigned(x, top, random):
    chance = (random >> 16).to(tl.int32) << 4
    code = (plus(bits_of(x) & MASK, chance) >> 20) - ((top - 31) << 3)
    return tl.minimum(tl.maximum(code, 0), 255).to(tl.uint8)


@triton.jit
def top_for(bound):
    return tl.maximum(((bits_of(bound) >> 20) + 1) >> 3, LEAST_TOP)


@triton.jit
def peak_of(x):
    """Largest magnitude of each row; NaN is the largest."""
    return float_of(tl.max(bits_of(x) & MASK, axis=1))


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
        return tl.load(at)
    return tl.load(at, mask=live, other=0)


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
        return from_bf16(read(address, start, lane, live, tl.int16, ALIGNED))
    if GRAD == FP16:
        return read(address, start, lane, live, tl.float16, ALIGNED).to(tl.float32)
    return read(address, start, lane, live, tl.float32, ALIGNED)


@triton.jit
def read_weight(weight, extra, start, lane, live, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    if KIND == PLAIN:
        return read(weight, start, lane, live, tl.float32, ALIGNED)
    if KIND == BF16_MASTER or KIND == FP16_MASTER:
        return read(extra, start, lane, live, tl.float32, ALIGNED)
    if KIND == FP16_EXACT:
        half = read(weight, start, lane, live, tl.float16, ALIGNED)
        return join_fp16(half, read(extra, start, lane, live, tl.int16, ALIGNED))
    if KIND == FP16_NONE:
        return read(weight, start, lane, live, tl.float16, ALIGNED).to(tl.float32)
    half = read(weight, start, lane, live, tl.int16, ALIGNED)
    if KIND == BF16_EXACT:
        return join_bf16(half, read(extra, start, lane, live, tl.int16, ALIGNED))
    return from_bf16(half)


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


# ---- the scalars of a step ------------------------------------------------------------------------------


@triton.jit
def power(base, exponent):
    """base ** exponent for whole fp32 exponents, in float64."""
    left = exponent.to(tl.int64)
    result = base + (left * 0).to(tl.float64)
    factor = result
    result = result * 0.0 + 1.0
    while tl.max(left, axis=0) > 0:
        result = tl.where((left & 1) == 1, result * factor, result)
        factor = factor * factor
        left = left >> 1
    return result


@triton.jit
def scalars(
    table, rows, keys, hyper, lr, skip, factor, inv_scale, clip, count,
    ALGORITHM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Advance step counts (unless `skip` is set) and write each parameter's scalars and random key.

    `hyper` (float64): learning rate, weight decay, then beta1, beta2, eps or momentum, dampening.
    """
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = lane < count
    row = table + lane.to(tl.int64) * COLUMNS
    at = tl.load(row + 6, mask=live, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(at, mask=live, other=0) + 1
    if skip is None:
        tl.store(at, step, mask=live)
    else:
        tl.store(at, step, mask=live & (tl.load(skip) == 0))

    if inv_scale is not None:
        factor = factor * tl.load(inv_scale)
    if clip is not None:
        factor = factor * tl.load(clip)
    rate = tl.load(hyper)
    if lr is not None:
        rate = tl.load(lr).to(tl.float64)
    decay, first, second, eps = tl.load(hyper + 1), tl.load(hyper + 2), tl.load(hyper + 3), tl.load(hyper + 4)
    wide = (lane * 0).to(tl.float64)
    c0, c6 = decay, wide
    if ALGORITHM == ADAMW or ALGORITHM == ADAM:
        if ALGORITHM == ADAMW:
            c0 = 1 - rate * decay
        c1, c2, c3, c5 = 1 - first, second, 1 - second, eps
        c4 = 1 / tl.sqrt(1 - power(second, step))
        c6 = rate / (1 - power(first, step))
    elif ALGORITHM == LION:
        c0 = 1 - rate * decay
        c1, c2, c3, c4, c5 = first, 1 - first, second, 1 - second, rate
    else:  # hyper: momentum, dampening; the first step has neither
        keep = 1 - second
        c1, c2 = tl.where(step == 1, 0.0, first + wide), tl.where(step == 1, 1.0, keep + wide)
        c3, c4, c5 = rate, first, rate * 0
    out = rows + lane * ROW
    tl.store(out, (factor + wide.to(tl.float32)).to(tl.float32), mask=live)
    tl.store(out + 1, (c0 + wide).to(tl.float32), mask=live)
    tl.store(out + 2, (c1 + wide).to(tl.float32), mask=live)
    tl.store(out + 3, (c2 + wide).to(tl.float32), mask=live)
    tl.store(out + 4, (c3 + wide).to(tl.float32), mask=live)
    tl.store(out + 5, (c4 + wide).to(tl.float32), mask=live)
    tl.store(out + 6, (c5 + wide).to(tl.float32), mask=live)
    tl.store(out + 7, (c6 + wide).to(tl.float32), mask=live)
    base = tl.load(row + 7, mask=live, other=0).to(tl.uint32)
    key = scramble(plus(scramble(step.to(tl.uint32)), base))
    tl.store(keys + lane, key.to(tl.int32, bitcast=True), mask=live)


# ---- the update -----------------------------------------------------------------------------------------


@triton.jit
def moved(w, g, m, v, c0, c1, c2, c3, c4, c5, c6, ALGORITHM: tl.constexpr):
    """New weight and states, operation for operation as in algorithms.py."""
    if ALGORITHM == ADAMW or ALGORITHM == ADAM:
        if ALGORITHM == ADAMW:
            w = w * c0
        else:
            g = g + w * c0
        m = m + (g - m) * c1
        v = v * c2 + (g * g) * c3
        w = w - c6 * tl.div_rn(m, tl.sqrt_rn(v) * c4 + c5)
    elif ALGORITHM == LION:
        w = w * c0
        u = m * c1 + g * c2
        sign = (u > 0).to(tl.float32) - (u < 0).to(tl.float32)
        w = w - sign * c5
        m = m * c3 + g * c4
    else:
        g = g + w * c0
        if ALGORITHM == SGD:
            w = w - g * c3
        else:
            m = m * c1 + g * c2
            if ALGORITHM == SGD_NESTEROV:
                w = w - (g + m * c4) * c3
            else:
                w = w - m * c3
    return w, m, v


@triton.jit
def tops_for(w, g, m_code, v_code, m_old, v_old, c0, c1, c2, c3, c4, ALGORITHM: tl.constexpr):
    """New block exponents from what enters the states: known before the states are, so one pass is enough."""
    if ALGORITHM == ADAMW or ALGORITHM == LION:
        peak = peak_of(g)
    else:
        peak = peak_of(g + w * c0)
    m_peak = read_signed(tl.max(m_code & 127, axis=1), m_old)
    if ALGORITHM == ADAMW or ALGORITHM == ADAM:
        v_peak = read_unsigned(tl.max(v_code, axis=1), v_old)
        return top_for(m_peak * (1 - c1) + peak * c1), top_for(v_peak * c2 + (peak * peak) * c3)
    if ALGORITHM == LION:
        return top_for(m_peak * c3 + peak * c4), m_old
    return top_for(m_peak * c1 + peak * c2), m_old


@triton.jit
def step_tile(
    row, grad, start, end, scalar, key, over, ALGORITHM: tl.constexpr, KIND: tl.constexpr, GRAD: tl.constexpr,
    STATE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update elements start to end (at most TILE; exactly TILE where WHOLE) of one parameter."""
    MOMENTS: tl.constexpr = 0 if ALGORITHM == SGD else 2 if (ALGORITHM == ADAMW or ALGORITHM == ADAM) else 1
    CODED: tl.constexpr = STATE == STATE_8BIT and MOMENTS > 0
    if CODED:
        block = tl.arange(0, TILE // BLOCK)
        lane = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    else:
        lane = tl.arange(0, TILE)
    live = None if WHOLE else lane < end - start
    weight, extra = tl.load(row), tl.load(row + 1)
    first, second = tl.load(row + 2), tl.load(row + 3)
    factor, c0, c1, c2 = tl.load(scalar), tl.load(scalar + 1), tl.load(scalar + 2), tl.load(scalar + 3)
    c3, c4, c5, c6 = tl.load(scalar + 4), tl.load(scalar + 5), tl.load(scalar + 6), tl.load(scalar + 7)
    g = read_grad(grad, start, lane, live, GRAD, ALIGNED) * factor
    w = read_weight(weight, extra, start, lane, live, KIND, ALIGNED)
    m = g
    v = g
    random = lane
    if (STATE != STATE_FP32 and MOMENTS > 0) or KIND == BF16_STOCHASTIC:
        random = dither(plus(times((start + lane).to(tl.uint32), word(WEYL)), key))
    m_top = lane
    v_top = lane
    if CODED:
        m_code = read(first, start, lane, live, tl.uint8, ALIGNED).to(tl.int32)
        at = (start // BLOCK) + block
        has = None if WHOLE else block * BLOCK < end - start
        m_old = read(tl.load(row + 4), 0, at, has, tl.uint8, False).to(tl.int32)
        m = read_signed(m_code, m_old[:, None])
        v_code = m_code
        v_old = m_old
        if MOMENTS == 2:
            v_code = read(second, start, lane, live, tl.uint8, ALIGNED).to(tl.int32)
            v_old = read(tl.load(row + 5), 0, at, has, tl.uint8, False).to(tl.int32)
            v = read_unsigned(v_code, v_old[:, None])
        m_new, v_new = tops_for(w, g, m_code, v_code, m_old, v_old, c0, c1, c2, c3, c4, ALGORITHM)
        write(tl.load(row + 4), 0, at, has, m_new.to(tl.uint8), tl.uint8, False)
        m_top = m_new[:, None]
        if MOMENTS == 2:
            write(tl.load(row + 5), 0, at, has, v_new.to(tl.uint8), tl.uint8, False)
            v_top = v_new[:, None]
    elif MOMENTS > 0:
        m = read_state(first, start, lane, live, STATE, ALIGNED)
        if MOMENTS == 2:
            v = read_state(second, start, lane, live, STATE, ALIGNED)
    w, m, v = moved(w, g, m, v, c0, c1, c2, c3, c4, c5, c6, ALGORITHM)
    if MOMENTS > 0:
        write_state(first, start, lane, live, m, m_top, random, 0, STATE, ALIGNED)
    if MOMENTS == 2:
        write_state(second, start, lane, live, v, v_top, random, 1, STATE, ALIGNED)
    if KIND == BF16_STOCHASTIC:
        random = dither(plus(times(random, word(WEYL)), key))
    write_weight(w, weight, extra, start, lane, live, random, over, KIND, ALIGNED)


@triton.jit
def read_state(address, start, lane, live, STATE: tl.constexpr, ALIGNED: tl.constexpr):
    if STATE == STATE_FP32:
        return read(address, start, lane, live, tl.float32, ALIGNED)
    return from_bf16(read(address, start, lane, live, tl.int16, ALIGNED))


@triton.jit
def write_state(
    address, start, lane, live, x, top, random, INDEX: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    if STATE == STATE_FP32:
        write(address, start, lane, live, x, tl.float32, ALIGNED)
    elif STATE == STATE_BF16:
        write(address, start, lane, live, bf16_random(x, random >> (16 * INDEX)), tl.int16, ALIGNED)
    elif INDEX == 0:
        write(address, start, lane, live, write_signed(x, top, random), tl.uint8, ALIGNED)
    else:
        write(address, start, lane, live, write_unsigned(x, top, random), tl.uint8, ALIGNED)


@triton.jit
def update(
    table, grads, items, rows, keys, skip, over, ALGORITHM: tl.constexpr, KIND: tl.constexpr,
    GRAD: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One work item (parameter, start, end) a program; where `skip` is set nothing is read or written."""
    item = items + tl.program_id(0) * 3
    p, start, end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if skip is not None:
        end = tl.where(tl.load(skip) == 0, end, start)
    row, scalar = table + p * COLUMNS, rows + p * ROW
    grad = tl.load(grads + p)
    key = tl.load(keys + p).to(tl.uint32, bitcast=True)
    whole = start + (end - start) // TILE * TILE
    for at in range(start, whole, TILE):
        step_tile(row, grad, at, end, scalar, key, over, ALGORITHM, KIND, GRAD, STATE, ALIGNED, True, TILE)
    if whole < end:
        step_tile(
            row, grad, whole, end, scalar, key, over, ALGORITHM, KIND, GRAD, STATE, ALIGNED, False, TILE
        )


# ---- the measurement ------------------------------------------------------------------------------------


@triton.jit
def squares(x, GRAD: tl.constexpr):
    """Squares of small, ordinary and large values, the outer two scaled by 2^180 and 2^-160 (Blue, 1978)."""
    if GRAD == FP16:
        return x * 0, x * x, x * 0
    size = tl.abs(x)
    low, high = size < 2.0**-50, size > 2.0**48
    y = x * tl.where(low, 2.0**90, tl.where(high, 2.0**-80, 1.0))
    y = y * y
    return tl.where(low, y, 0.0), tl.where(low | high, 0.0, y), tl.where(high, y, 0.0)


@triton.jit
def measure_tile(
    grad, start, end, GRAD: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr
):
    lane = tl.arange(0, TILE)
    live = None if WHOLE else lane < end - start
    x = read_grad(grad, start, lane, live, GRAD, ALIGNED)
    small, middle, large = squares(x, GRAD)
    return small, middle, large, bits_of(x) & MASK


@triton.jit
def measure(grads, items, sums, peaks, GRAD: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Three scaled sums of squares and the largest magnitude's bits of one work item; NaN is the largest."""
    k = tl.program_id(0)
    item = items + k * 4
    p, start, end, out = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    grad = tl.load(grads + p)
    small = tl.zeros((TILE,), tl.float32)
    middle = tl.zeros((TILE,), tl.float32)
    large = tl.zeros((TILE,), tl.float32)
    peak = tl.zeros((TILE,), tl.int32)
    whole = start + (end - start) // TILE * TILE
    for at in range(start, whole, TILE):
        a, b, c, size = measure_tile(grad, at, end, GRAD, ALIGNED, True, TILE)
        small, middle, large, peak = small + a, middle + b, large + c, tl.maximum(peak, size)
    if whole < end:
        a, b, c, size = measure_tile(grad, whole, end, GRAD, ALIGNED, False, TILE)
        small, middle, large, peak = small + a, middle + b, large + c, tl.maximum(peak, size)
    tl.store(sums + out * 3, tl.sum(small, axis=0))
    tl.store(sums + out * 3 + 1, tl.sum(middle, axis=0))
    tl.store(sums + out * 3 + 2, tl.sum(large, axis=0))
    tl.store(peaks + out, tl.max(peak, axis=0))


@triton.jit
def total(sums, peaks, count, inv_value, inv_scale, finite, stats, LANES: tl.constexpr):
    """Combine work items in their order: finite flag, norm and largest magnitude, times the inverse scale."""
    lane = tl.arange(0, LANES)
    small = tl.zeros((LANES,), tl.float64)
    middle = tl.zeros((LANES,), tl.float64)
    large = tl.zeros((LANES,), tl.float64)
    peak = tl.zeros((LANES,), tl.int32)
    for start in range(0, count, LANES):
        at = start + lane
        live = at < count
        small += tl.load(sums + at * 3, mask=live, other=0).to(tl.float64)
        middle += tl.load(sums + at * 3 + 1, mask=live, other=0).to(tl.float64)
        large += tl.load(sums + at * 3 + 2, mask=live, other=0).to(tl.float64)
        peak = tl.maximum(peak, tl.load(peaks + at, mask=live, other=0))
    inverse = inv_value
    if inv_scale is not None:
        inverse = tl.load(inv_scale)
    top = tl.max(peak, axis=0)
    squared = tl.sum(small, axis=0) * 2.0**-180 + tl.sum(middle, axis=0) + tl.sum(large, axis=0) * 2.0**160
    tl.store(finite, (top < INF).to(tl.uint8))
    tl.store(stats, (tl.sqrt(squared) * inverse).to(tl.float32))
    tl.store(stats + 1, float_of(top) * inverse)
