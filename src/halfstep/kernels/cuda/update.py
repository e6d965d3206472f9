# Triton infers types: parameters have none, constants are plain numbers, branches on constants are cut.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false
# ruff: noqa: SIM109 -- Triton compiles a subset of Python
"""GPU kernels: scalars of a step, the one-pass update and the gradient measurement, equal to reference.py.

Each kernel walks a table of addresses, so that one launch serves a whole model. Division and square root are
the correctly rounded ones, and callers switch fused multiply-add off (`enable_fp_fusion=False`). Differences
from the reference that remain: payloads of NaN, the order in which a norm is summed, and powers of beta
(repeated multiplication here, the platform's `pow` there), which in float64 differ by parts in 1e15 before
they are rounded to fp32.
"""

import triton
import triton.language as tl

from halfstep.kernels import codes as L
from halfstep.kernels.cuda.formats import (
    BF16,
    BF16_STOCHASTIC,
    FP16,
    INF,
    MASK,
    STATE_FP32,
    WEYL,
    bf16_even,
    bits_of,
    dither,
    exponent_for,
    float_of,
    from_bf16,
    peak_of,
    place,
    plus,
    random_bits,
    read,
    read_grad,
    read_signed,
    read_state,
    read_unsigned,
    read_weight,
    scramble,
    times,
    word,
    write_state,
    write_weight,
)

ADAMW, ADAM = tl.constexpr(L.ADAMW), tl.constexpr(L.ADAM)
SGD, SGD_NESTEROV, LION = tl.constexpr(L.SGD), tl.constexpr(L.SGD_NESTEROV), tl.constexpr(L.LION)
STATE_8BIT, BLOCK = tl.constexpr(L.STATE_8BIT), tl.constexpr(L.BLOCK)
COLUMNS = tl.constexpr(9)
"""int64 columns of the address table: weight, master or lacking bits, states, exponents, step; a base key;
the length of a row, whose end no block of 8-bit states crosses."""
ROW = tl.constexpr(8)
"""fp32 columns of the scalars: gradient factor, then the algorithm's seven."""


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


@triton.jit(do_not_specialize=["count"])
def scalars(
    table, rows, keys, hyper, lr, skip, factor, inv_scale, clip, limit, count,
    ALGORITHM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Advance step counts (unless `skip` is set) and write each parameter's scalars and random key.

    `hyper` (float64): learning rate, weight decay, then beta1, beta2, eps or momentum, dampening; last, 1
    where moments are corrected for their bias, else 0. `clip` is a factor or, with `limit`, the norm to clip.
    """
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = lane < count
    row = table + lane.to(tl.int64) * COLUMNS
    at = tl.load(row + 6, mask=live, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(at, mask=live, other=0) + 1
    if skip is None:
        tl.store(at, step, mask=live)
    else:
        tl.store(at, step, mask=live & (tl.load(skip + lane * 0) == 0))

    if inv_scale is not None:
        factor = factor * tl.load(inv_scale)
    if clip is not None:
        clipped = tl.load(clip)
        if limit is not None:
            clipped = tl.div_rn(1.0, clipped + 1e-6) * limit
            clipped = tl.where(clipped > 1.0, 1.0, clipped)
        factor = factor * clipped
    rate = tl.load(hyper) if lr is None else tl.load(lr).to(tl.float64)
    decay, first, second, eps = tl.load(hyper + 1), tl.load(hyper + 2), tl.load(hyper + 3), tl.load(hyper + 4)
    wide = (lane * 0).to(tl.float64)
    c0, c6 = decay, wide
    if ALGORITHM == ADAMW or ALGORITHM == ADAM:
        if ALGORITHM == ADAMW:
            c0 = 1 - rate * decay
        c1, c2, c3, c5 = 1 - first, second, 1 - second, eps
        corrected = tl.load(hyper + 5)
        c4 = 1 / tl.sqrt(1 - corrected * power(second, step))
        c6 = rate / (1 - corrected * power(first, step))
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
def exponents_for(w, g, m_code, v_code, m_old, v_old, c0, c1, c2, c3, c4, ALGORITHM: tl.constexpr):
    """New exponents of a block from what enters the states: known before the states are, so one pass does."""
    peak = peak_of(g if ALGORITHM == ADAMW or ALGORITHM == LION else g + w * c0)
    m_peak = read_signed(tl.max(m_code & 127, axis=0), m_old)
    v_new = v_old
    if ALGORITHM == ADAMW or ALGORITHM == ADAM:
        m_new = exponent_for(m_peak * (1 - c1) + peak * c1)
        v_peak = read_unsigned(tl.max(v_code, axis=0), v_old)
        v_new = exponent_for(v_peak * c2 + (peak * peak) * c3)
    elif ALGORITHM == LION:
        m_new = exponent_for(m_peak * c3 + peak * c4)
    else:
        m_new = exponent_for(m_peak * c1 + peak * c2)
    return m_new, v_new


@triton.jit
def step_tile(
    row, grad, start, live, block, scalar, key, over, ALGORITHM: tl.constexpr, KIND: tl.constexpr,
    GRAD: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Update the TILE elements from `start` on that are `live` (None: all of them) of one parameter.

    8-bit states: they lie in one block, whose number is `block`.
    """
    ADAPTIVE: tl.constexpr = ALGORITHM == ADAMW or ALGORITHM == ADAM
    MOMENTS: tl.constexpr = 0 if ALGORITHM == SGD else 2 if ADAPTIVE else 1
    lane = tl.arange(0, TILE)
    weight, extra = tl.load(row), tl.load(row + 1)
    first, second = tl.load(row + 2), tl.load(row + 3)
    factor, c0, c1, c2 = tl.load(scalar), tl.load(scalar + 1), tl.load(scalar + 2), tl.load(scalar + 3)
    c3, c4, c5, c6 = tl.load(scalar + 4), tl.load(scalar + 5), tl.load(scalar + 6), tl.load(scalar + 7)
    g = read_grad(grad, start, lane, live, GRAD, GRAD_ALIGNED) * factor
    w = read_weight(weight, extra, start, lane, live, KIND, ALIGNED)
    m, v = g, g
    random = lane
    if (STATE != STATE_FP32 and MOMENTS > 0) or KIND == BF16_STOCHASTIC:
        random = random_bits(lane + (block * BLOCK if STATE == STATE_8BIT else start), key)
    m_new, v_new = 0, 0
    if STATE == STATE_8BIT:
        m_exponent = (tl.load(row + 4) + block).to(tl.pointer_type(tl.uint8))
        m_code = read(first, start, lane, live, tl.uint8, ALIGNED).to(tl.int32)
        m_old = tl.load(m_exponent).to(tl.int32)
        m = read_signed(m_code, m_old)
        v_code, v_old, v_exponent = m_code, m_old, m_exponent
        if MOMENTS == 2:
            v_exponent = (tl.load(row + 5) + block).to(tl.pointer_type(tl.uint8))
            v_code = read(second, start, lane, live, tl.uint8, ALIGNED).to(tl.int32)
            v_old = tl.load(v_exponent).to(tl.int32)
            v = read_unsigned(v_code, v_old)
        m_new, v_new = exponents_for(w, g, m_code, v_code, m_old, v_old, c0, c1, c2, c3, c4, ALGORITHM)
        tl.store(m_exponent, m_new.to(tl.uint8))
        if MOMENTS == 2:
            tl.store(v_exponent, v_new.to(tl.uint8))
    elif MOMENTS > 0:
        m = read_state(first, start, lane, live, STATE, ALIGNED)
        if MOMENTS == 2:
            v = read_state(second, start, lane, live, STATE, ALIGNED)
    w, m, v = moved(w, g, m, v, c0, c1, c2, c3, c4, c5, c6, ALGORITHM)
    if MOMENTS > 0:
        write_state(first, start, lane, live, m, m_new, random, 0, STATE, ALIGNED)
    if MOMENTS == 2:
        write_state(second, start, lane, live, v, v_new, random, 1, STATE, ALIGNED)
    if KIND == BF16_STOCHASTIC:
        random = dither(plus(times(random, word(WEYL)), key))
    write_weight(w, weight, extra, start, lane, live, random, over, KIND, ALIGNED)


@triton.jit
def update(
    table, grads, items, rows, keys, skip, over, ALGORITHM: tl.constexpr, KIND: tl.constexpr,
    GRAD: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One work item (parameter, start, end) a program; where `skip` is set nothing is read or written.

    Items count elements; those of 8-bit states the blocks, of which none crosses the end of a row. ALIGNED
    (for the gradient: GRAD_ALIGNED) promises addresses, and elements in a block, that are multiples of 16.
    """
    item = items + tl.program_id(0) * 3
    p, start, end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if skip is not None:
        end = tl.where(tl.load(skip) == 0, end, start)
    row, scalar = table + p * COLUMNS, rows + p * ROW
    grad = tl.load(grads + p)
    key = tl.load(keys + p).to(tl.uint32, bitcast=True)
    if STATE == STATE_8BIT:
        width = tl.load(row + 8)
        a_row = (width + BLOCK - 1) // BLOCK
        column = start % a_row * BLOCK
        begin = start // a_row * width + column
        for block in range(start, end):
            size = tl.minimum(width - column, BLOCK)
            if ALIGNED:
                size = tl.multiple_of(size, 16)
            live = tl.arange(0, BLOCK) < size
            step_tile(
                row, grad, begin, live, block, scalar, key, over,
                ALGORITHM, KIND, GRAD, STATE, ALIGNED, GRAD_ALIGNED, BLOCK,
            )  # fmt: skip
            begin += size
            column = tl.where(column + size < width, column + size, 0)
    else:
        whole = start + (end - start) // TILE * TILE
        for at in range(start, whole, TILE):
            step_tile(
                row, grad, at, None, at, scalar, key, over,
                ALGORITHM, KIND, GRAD, STATE, ALIGNED, GRAD_ALIGNED, TILE,
            )  # fmt: skip
        if whole < end:
            live = tl.arange(0, TILE) < end - whole
            step_tile(
                row, grad, whole, live, whole, scalar, key, over,
                ALGORITHM, KIND, GRAD, STATE, ALIGNED, GRAD_ALIGNED, TILE,
            )  # fmt: skip


# ---- the measurement ------------------------------------------------------------------------------------


@triton.jit
def squares(x, GRAD: tl.constexpr):
    """Squares of small, ordinary and large values, the outer two scaled by 2^180 and 2^-160 (Blue, 1978)."""
    if GRAD == FP16:
        small, middle, large = x * 0, x * x, x * 0
    else:
        size = tl.abs(x)
        low, high = size < 2.0**-50, size > 2.0**48
        y = x * tl.where(low, 2.0**90, tl.where(high, 2.0**-80, 1.0))
        y = y * y
        small, middle = tl.where(low, y, 0.0), tl.where(low | high, 0.0, y)
        large = tl.where(high, y, 0.0)
    return small, middle, large


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


@triton.jit(do_not_specialize=["count"])
def total(sums, peaks, count, inv_value, inv_scale, flags, stats, LANES: tl.constexpr):
    """Combine work items in order: finite or not, norm and largest magnitude times the inverse scale."""
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
    inverse = inv_value if inv_scale is None else tl.load(inv_scale)
    top = tl.max(peak, axis=0)
    squared = tl.sum(small, axis=0) * 2.0**-180 + tl.sum(middle, axis=0) + tl.sum(large, axis=0) * 2.0**160
    tl.store(flags, (top < INF).to(tl.uint8))
    tl.store(flags + 1, (top >= INF).to(tl.uint8))
    tl.store(stats, (tl.sqrt(squared) * inverse).to(tl.float32))
    tl.store(stats + 1, float_of(top) * inverse)


# ---- masters of torch's optimizers ----------------------------------------------------------------------


@triton.jit
def refresh_tile(master, weight, start, live, KIND: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    lane = tl.arange(0, TILE)
    w = read(master, start, lane, live, tl.float32, ALIGNED)
    if KIND == BF16:
        half = from_bf16(read(weight, start, lane, live, tl.int16, ALIGNED))
        rounded = from_bf16(bf16_even(w))
    else:
        half = read(weight, start, lane, live, tl.float16, ALIGNED).to(tl.float32)
        rounded = w.to(tl.float16).to(tl.float32)
    changed = rounded != half
    if live is not None:
        changed = changed & live
    tl.store(place(master, start, lane, tl.float32, ALIGNED), half, mask=changed)


@triton.jit
def refresh(table, items, KIND: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Give fp32 masters the values of 16-bit weights that are not their rounding (ties to even).

    One work item (pair, start, count) a program; a pair is the addresses of a master and of its weight.
    """
    item = items + tl.program_id(0) * 3
    p, start = tl.load(item), tl.load(item + 1)
    end = start + tl.load(item + 2)
    master, weight = tl.load(table + p * 2), tl.load(table + p * 2 + 1)
    whole = start + (end - start) // TILE * TILE
    for at in range(start, whole, TILE):
        refresh_tile(master, weight, at, None, KIND, ALIGNED, TILE)
    if whole < end:
        live = tl.arange(0, TILE) < end - whole
        refresh_tile(master, weight, whole, live, KIND, ALIGNED, TILE)


# ---- the loss scale -------------------------------------------------------------------------------------


@triton.jit
def adjusted(
    finite, scale, clean, overflows, out, GROWTH: tl.constexpr, BACKOFF: tl.constexpr, INTERVAL: tl.constexpr,
    HYSTERESIS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """DynamicLossScale.adjust: the next scale, its inverse (both fp32), clean steps, overflows (int32)."""
    good, now = tl.load(finite) != 0, tl.load(scale)
    runs, more = plus(tl.load(clean), 1), plus(tl.load(overflows), 1)
    full, spent = runs >= INTERVAL, more >= HYSTERESIS
    factor = tl.where(good, tl.full((), GROWTH, tl.float64), tl.full((), BACKOFF, tl.float64))
    least, most = tl.full((), LEAST, tl.float64), tl.full((), MOST, tl.float64)
    new = now.to(tl.float64) * factor
    new = tl.where(new < least, least, tl.where(new > most, most, new)).to(tl.float32)
    new = tl.where((good & full) | ((good == 0) & spent), new, now)
    tl.store(out, bits_of(new))
    tl.store(out + 1, bits_of(tl.div_rn(1.0, new)))
    tl.store(out + 2, tl.where(good & (full == 0), runs, 0))
    kept = tl.where(full, 0, tl.load(overflows))
    tl.store(out + 3, tl.where(good, kept, tl.where(spent, HYSTERESIS, more)).to(tl.int32))
