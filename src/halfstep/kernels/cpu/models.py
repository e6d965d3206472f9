# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportPrivateImportUsage=false
"""CPU kernels for whole models: they walk a table of addresses, so that one call updates or measures it all.

Numba finds a compiled kernel on disk by the values its function closes over, and functions of its own have
another value in every process. So the kernels close over numbers alone and hand them, as literals, to what
is compiled for these; else every process would compile them again and leave one more file behind.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, types

from halfstep.kernels import codes as L
from halfstep.kernels.cpu import algorithms, streams, vectors
from halfstep.kernels.cpu import bits as _numba_bits
from halfstep.kernels.cpu import update as _numba_kernels
from halfstep.kernels.cpu.bits import (
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    INF_BITS,
    MASK,
    Value,
    bf16_even,
    bits_of,
    compiled,
    emitted,
    float_of,
    fp16_even,
    load,
    loop,
    most,
    store,
    widest_vectors,
)
from halfstep.kernels.cpu.streams import GRAD_IN, get, widths
from halfstep.kernels.cpu.update import block_exponents, core

FLUSH = 1024  # gradients whose squares are added in fp32 before float64 takes over
NARROW, WIDE = 0, 1  # how `measurer` adds squares up: in fp32, or all in float64
REBIASED = 2.0 ** (1023 - 127)  # an exponent of bf16 in the place of a float64's
# The same but for numbers from CLEAR on: bits no exponent of bf16 reaches put it right up to one scale, and
# make a zero 2^-127, which a sum of such squares does not feel.
LIFTED, SCALE, CLEAR = 0x300 << 52, 2.0**128, (127 - 32) << 7
# The disk cache looks at this file only: the sources of what the kernels call belong to the key.
MODULES = algorithms, _numba_bits, streams, _numba_kernels, vectors
SOURCES = tuple(Path(str(module.__file__)).stat().st_mtime_ns for module in MODULES)

i32 = np.int32
number_of = emitted(types.float32)(float_of)


@emitted(types.float64)
def double_of(x):
    return x.as_bits_of(F64)


@emitted(types.voidptr)
def at(address):
    return Value(address.b, address.b.inttoptr(address.llvm[0], I8.as_pointer()))


@compiled(fastmath={"reassoc", "contract"})
def sum_wide_bf16(source, n):
    """`measure` with WIDE for bf16, in half the time: four words at once, each widened by a shift."""
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
    return total + np.float64(number_of(bits)) if bits >= INF_BITS else total, bits


@compiled()
def lifted_bf16(x):
    """The magnitude whose bits are below the sign of a float64, divided by SCALE; zeros are too large."""
    return double_of(np.int64((x & np.uint64(0x7FFF << 45)) | np.uint64(LIFTED)))


@compiled()
def wide_bf16(x):
    """The magnitude whose bits are below the sign of a float64, before its exponent is put right."""
    return double_of(np.int64(x & np.uint64(0x7FFF << 45))) * REBIASED


@emitted(types.Tuple((types.float64, types.int32)), literals=2)
def measure(kind: tuple[int, ...], source: Value, n: Value) -> list[Value]:
    """Sum of squares and bits of the largest magnitude of `n` gradients; NaN and inf show in the latter.

    The order of the sum is left to the compiler: it is the same at any number of threads.
    """
    (grad, how), b = kind, n.b

    def step(i, total, top):
        x = GRAD_IN[grad](get(4 if grad == L.FP32 else 2, source, i))
        (y,) = x.to(F64).llvm if how == WIDE else x.llvm
        total = b.fadd(total.llvm[0], b.fmul(y, y, flags=["reassoc"]), flags=["reassoc"])
        return Value(b, total), most(bits_of(x) & MASK, top)

    begun = [Value(b, zero(0)) for zero in (F64 if how == WIDE else F32, I32)]
    total, top = loop(Value(b, I64(0)), n, begun, step)
    return [total if how == WIDE else total.to(F64), top]


@cache
def updater(algorithm: int, weight: int, grad: int, state: int, looks: bool) -> Any:
    """The update of work items first..last: items (parameter, start, count), one address column a parameter.

    Lines of the address table: weight, master or lacking bits, gradient, first and second state, step count;
    where a step rounds at random its key (from bit 32 on where in a panel the part of a tensor begins); for
    8-bit states the length of a row, which no block crosses, and the exponents of both.
    `scalars` has a row for each parameter, or one for all. Each item's column of `found` gets what `measurer`
    finds (with `looks`, by turns with the update; else zeros), and whether a weight left its master's range.
    """
    blocks, sources = state == L.STATE_8BIT, SOURCES
    random = state != L.STATE_FP32 or weight == L.BF16_STOCHASTIC
    wide_w, wide_x, wide_g, wide_m, wide_v = widths(algorithm, weight, grad, state)
    stride = L.BLOCK if blocks else FLUSH if looks else 1 << 30

    def run(first, last, items, table, scalars, found):
        _ = sources
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
                    place, rows = L.BLOCK * block, (row[8], row[9])
                    exponents = block_exponents(
                        algorithm, weight, grad, state, w, x, g, m, v, rows, block, n, s
                    )
                    column = column + n if column + n < width else 0
                    block += 1
                if looks:
                    squared, bits = measure(grad, NARROW, g, n)
                    total += squared
                    top = max(top, bits)
                bad |= core(
                    algorithm, weight, grad, state, 0, n, w, x, g, m, v, s, exponents, np.uint32(key), place
                )
                j += n
            found[0, k], found[1, k], found[2, k] = total, number_of(top), bad

    signature = "void(int64,int64,int64[:,::1],int64[:,::1],float32[:,::1],float64[:,::1])"
    return compiled(signature, f"update_{algorithm}_{weight}_{grad}_{state}_{looks}")(run)


@cache
def measurer(grad: int, how: int = NARROW) -> Any:
    """Sum of squares and largest magnitude of each work item, in its column of `found`.

    NaN and inf show in the latter. `how` is NARROW or WIDE; addresses are line 2 of the table.
    """
    size, wide, sources = 4 if grad == L.FP32 else 2, how == WIDE, SOURCES
    by_four = wide and grad == L.BF16

    def run(first, last, items, table, found):
        _ = sources
        if wide:
            widest_vectors()
        for k in range(first, last):
            p, start, count = items[k, 0], items[k, 1], items[k, 2]
            total, top = 0.0, i32(0)
            for j in range(start, start + count, FLUSH):
                source, n = table[2, p] + size * j, min(FLUSH, start + count - j)
                if by_four:
                    squared, bits = sum_wide_bf16(source, n)
                else:
                    squared, bits = measure(grad, how, source, n)
                total += squared
                top = max(top, bits)
            found[0, k], found[1, k] = total, number_of(top)

    signature = "void(int64,int64,int64[:,::1],int64[:,::1],float64[:,::1])"
    return compiled(signature, f"measure_{grad}_{how}")(run)


@emitted(types.int32, literals=1)
def differ(kind, w, m, n):
    rounded = bf16_even if kind[0] == L.BF16 else fp16_even

    def step(i, other):
        return [other | (rounded(load(F32, m, i)) ^ load(I16, w, i)).to(I32)]

    return loop(Value(n.b, I64(0)), n, [Value(n.b, I32(0))], step)[0]


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
            flags[k] = differ(weight, table[p, 0] + 2 * start, table[p, 1] + 4 * start, count) != 0

    signature = "void(int64,int64,int64[:,::1],int64[:,::1],boolean[::1])"
    return compiled(signature, f"compare_{weight}")(run)


@emitted(types.float32)
def count(address):
    at = Value(address.b, I64(0))
    step = load(F32, address, at) + 1.0
    store(step, address, at)
    return step


@cache
def step_counter() -> Any:
    """Add 1 to each fp32 step count and note what it is then; true where all are alike."""

    def run(table, steps):
        alike = True
        for i in range(len(steps)):
            steps[i] = count(table[5, i])
            alike = alike and steps[i] == steps[0]
        return alike

    return compiled("boolean(int64[:,::1],float64[::1])", "count_steps")(run)
