# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportPrivateImportUsage=false
"""CPU kernels for whole models: they walk a table of addresses, so that one call updates or measures it all.

Numba finds a compiled kernel on disk by the values its function closes over, and functions of its own have
another value in every process. So the kernels close over numbers alone and call a stand-in, which these
numbers overload; else every process would compile them again and leave one more file behind.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray
from numba.extending import overload

from halfstep.kernels import codes as L
from halfstep.kernels.cpu import algorithms, streams, vectors
from halfstep.kernels.cpu import bits as _numba_bits
from halfstep.kernels.cpu import update as _numba_kernels
from halfstep.kernels.cpu.bits import (
    INF_BITS,
    MASK,
    OPTIONS,
    at,
    bf16_even,
    bits_of,
    compiled,
    double_of,
    float_of,
    fp16_even,
    i32,
    peek_f32,
    peek_i16,
    poke_f32,
    u32,
    widest_vectors,
)
from halfstep.kernels.cpu.streams import GET, GRAD_IN, widths
from halfstep.kernels.cpu.update import block_exponents, core, peak

FLUSH = 1024  # gradients whose squares are added in fp32 before float64 takes over
NARROW, WIDE = 0, 1  # how `measurer` adds squares up: in fp32, or all in float64
REBIASED = 2.0 ** (1023 - 127)  # an exponent of bf16 in the place of a float64's
# The same but for numbers from CLEAR on: bits no exponent of bf16 reaches put it right up to one scale, and
# make a zero 2^-127, which a sum of such squares does not feel.
LIFTED, SCALE, CLEAR = 0x300 << 52, 2.0**128, (127 - 32) << 7
# The disk cache looks at this file only: the sources of what the kernels call belong to the key.
MODULES = algorithms, _numba_bits, streams, _numba_kernels, vectors
SOURCES = tuple(Path(str(module.__file__)).stat().st_mtime_ns for module in MODULES)


def sum_wide_bf16(source, n):
    """`looker` of WIDE for bf16, in half the time: four words at once, each widened by a shift."""
    widest_vectors()
    fours, ones = carray(at(source), n // 4, np.uint64), carray(at(source), n, np.uint16)
    total, top = 0.0, np.uint16(0)
    for i in range(n):
        top = max(top, np.uint16(ones[i] & np.uint16(0x7FFF)))
    if top >= np.uint16(CLEAR):
        for i in range(n // 4):
            x = fours[i]
            a, b = lifted_bf16(x >> np.uint64(3)), lifted_bf16(x << np.uint64(13))
            c, d = lifted_bf16(x << np.uint64(29)), lifted_bf16(x << np.uint64(45))
            total += (a * a + b * b) + (c * c + d * d)
        total *= SCALE * SCALE
    elif top > np.uint16(0):
        for i in range(n // 4):
            x = fours[i]
            a, b = wide_bf16(x >> np.uint64(3)), wide_bf16(x << np.uint64(13))
            c, d = wide_bf16(x << np.uint64(29)), wide_bf16(x << np.uint64(45))
            total += (a * a + b * b) + (c * c + d * d)
    for i in range(n // 4 * 4, n):
        a = wide_bf16(np.uint64(ones[i]) << np.uint64(45))
        total += a * a
    bits = i32(i32(top) << i32(16))
    return total + np.float64(float_of(bits)) if bits >= INF_BITS else total, bits


@compiled()
def lifted_bf16(x):
    """The magnitude whose bits are below the sign of a float64, divided by SCALE; zeros are too large."""
    return double_of(np.int64((x & np.uint64(0x7FFF << 45)) | np.uint64(LIFTED)))


@compiled()
def wide_bf16(x):
    """The magnitude whose bits are below the sign of a float64, before its exponent is put right."""
    return double_of(np.int64(x & np.uint64(0x7FFF << 45))) * REBIASED


@cache
def looker(grad: int, how: int) -> Any:
    """Sum of squares and bits of the largest magnitude of `n` gradients; NaN and inf show in the latter.

    The order of the sum is left to the compiler: it is the same at any number of threads.
    """
    if (grad, how) == (L.BF16, WIDE):
        return compiled(name="sum_wide_bf16", fastmath={"reassoc", "contract"})(sum_wide_bf16)
    kind = np.float64 if how == WIDE else np.float32
    wide, get, widened = how == WIDE, GET[4 if grad == L.FP32 else 2], GRAD_IN[grad]

    def sum_values(source, n):
        if wide:
            widest_vectors()
        total = kind(0)
        top = i32(0)
        for i in range(n):
            x = widened(get(source, i))
            top = max(top, i32(bits_of(x) & MASK))
            total += kind(x) * kind(x)
        return np.float64(total), top

    return compiled(name=f"sum_{grad}_{how}", fastmath={"reassoc"})(sum_values)


def _update(algorithm, weight, grad, state, look, first, last, items, table, scalars, found):
    raise TypeError("only compiled code may call this")


@overload(_update, prefer_literal=True, jit_options=OPTIONS)
def _update_of(algorithm, weight, grad, state, look, first, last, items, table, scalars, found):
    kind = tuple(code.literal_value for code in (algorithm, weight, grad, state))
    looks, blocks = bool(look.literal_value), kind[3] == L.STATE_8BIT
    random = kind[3] != L.STATE_FP32 or kind[1] == L.BF16_STOCHASTIC
    update, seen = core(*kind), looker(kind[2], NARROW)
    wide_w, wide_x, wide_g, wide_m, wide_v = widths(*kind)
    largest, exponents_of = peak(*kind[:3]), block_exponents(kind[0])
    stride = L.BLOCK if blocks else FLUSH if looks else 1 << 30

    def run(algorithm, weight, grad, state, look, first, last, items, table, scalars, found):
        if blocks:
            widest_vectors()
        for k in range(first, last):
            p, start, count = items[k, 0], items[k, 1], items[k, 2]
            c = scalars[min(p, len(scalars) - 1)]
            s = (c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7])
            row = table[:, p]
            total, top, bad = 0.0, i32(0), i32(0)
            key, width = row[6] if random else 0, row[7] if blocks else 1
            column, block = start % width, start // width * (-(-width // L.BLOCK)) + start % width // L.BLOCK
            j = start
            while j < start + count:
                n = min(stride, start + count - j)
                if blocks:
                    n = min(n, width - column)
                w, x, g = row[0] + wide_w * j, row[1] + wide_x * j, row[2] + wide_g * j
                m, v = row[3] + wide_m * j, row[4] + wide_v * j
                exponents, place = (i32(0), i32(0), i32(0), i32(0)), j + (key >> 32)
                if blocks:
                    place = L.BLOCK * block
                    exponents = exponents_of(m, v, row[8], row[9], block, n, largest(w, x, g, n, s), s)
                    column = column + n if column + n < width else 0
                    block += 1
                if looks:
                    squared, bits = seen(g, n)
                    total += squared
                    top = max(top, bits)
                bad = i32(bad | update(0, n, w, x, g, m, v, s, exponents, u32(key), place))
                j += n
            found[0, k], found[1, k], found[2, k] = total, float_of(top), bad

    run.__qualname__ = "items_" + "_".join(map(str, (*kind, looks)))
    return run


@cache
def updater(algorithm: int, weight: int, grad: int, state: int, look: bool) -> Any:
    """The update of work items first..last: items (parameter, start, count), one address column a parameter.

    Lines of the address table: weight, master or lacking bits, gradient, first and second state, step count;
    where a step rounds at random its key (from bit 32 on where in a panel the part of a tensor begins); for
    8-bit states the length of a row, which no block crosses, and the exponents of both.
    `scalars` has a row for each parameter, or one for all. Each item's column of `found` gets what `measurer`
    finds (with `look`, by turns with the update; else zeros), and whether a weight left its master's range.
    """
    looks, sources = int(look), SOURCES

    def run(first, last, items, table, scalars, found):
        _ = sources
        _update(algorithm, weight, grad, state, looks, first, last, items, table, scalars, found)

    signature = "void(int64,int64,int64[:,::1],int64[:,::1],float32[:,::1],float64[:,::1])"
    return compiled(signature, f"update_{algorithm}_{weight}_{grad}_{state}_{looks}")(run)


def _measure(grad, how, first, last, items, table, found):
    raise TypeError("only compiled code may call this")


@overload(_measure, prefer_literal=True, jit_options=OPTIONS)
def _measure_of(grad, how, first, last, items, table, found):
    seen = looker(grad.literal_value, how.literal_value)
    size = 4 if grad.literal_value == L.FP32 else 2

    def run(grad, how, first, last, items, table, found):
        for k in range(first, last):
            p, start, count = items[k, 0], items[k, 1], items[k, 2]
            total, top = 0.0, i32(0)
            for j in range(start, start + count, FLUSH):
                n = min(FLUSH, start + count - j)
                squared, bits = seen(table[2, p] + size * j, n)
                total += squared
                top = max(top, bits)
            found[0, k], found[1, k] = total, float_of(top)

    run.__qualname__ = f"measure_items_{grad.literal_value}_{how.literal_value}"
    return run


@cache
def measurer(grad: int, how: int = NARROW) -> Any:
    """Sum of squares and largest magnitude of each work item, in its column of `found`.

    NaN and inf show in the latter. `how` is NARROW or WIDE; addresses are line 2 of the table.
    """
    sources = SOURCES

    def run(first, last, items, table, found):
        _ = sources
        _measure(grad, how, first, last, items, table, found)

    signature = "void(int64,int64,int64[:,::1],int64[:,::1],float64[:,::1])"
    return compiled(signature, f"measure_{grad}_{how}")(run)


@cache
def comparer(weight: int) -> Any:
    """Flag each work item where a 16-bit weight is not its fp32 master, rounded to even, bit for bit.

    Columns of the address table: weight, master.
    """
    sources = SOURCES

    def run(first, last, items, table, flags):
        _ = sources
        for k in range(first, last):
            p, start, count = items[k, 0], items[k, 1], items[k, 2]
            w, m = table[p, 0] + 2 * start, table[p, 1] + 4 * start
            other = i32(0)
            for i in range(count):
                x = peek_f32(m, i)
                rounded = bf16_even(x) if weight == L.BF16 else fp16_even(x)
                other = i32(other | i32(i32(rounded) ^ i32(peek_i16(w, i))))
            flags[k] = other != i32(0)

    signature = "void(int64,int64,int64[:,::1],int64[:,::1],boolean[::1])"
    return compiled(signature, f"compare_{weight}")(run)


@cache
def step_counter() -> Any:
    """Add 1 to each fp32 step count and note what it is then; true where all are alike."""

    def count(table, steps):
        alike = True
        for i in range(len(steps)):
            step = peek_f32(table[5, i], 0) + np.float32(1)
            poke_f32(table[5, i], 0, step)
            steps[i] = step
            alike = alike and steps[i] == steps[0]
        return alike

    return compiled("boolean(int64[:,::1],float64[::1])", "count_steps")(count)
