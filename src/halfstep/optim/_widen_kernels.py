# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false
"""The CPU kernel that widens 16-bit gradients to fp32 and measures them in the same pass.

Like the optimizers' kernels it walks a table of addresses: one call serves a whole model.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from halfstep.optim._layout import FP32
from halfstep.optim._numba_kernels import FLUSH, MASK, at, bits_of, compiled, f32, float_of, i32, read_grad


@cache
def widener(grad: int) -> Any:
    """Widen work items (parameter, start, count) of a table with rows (16-bit source, fp32 target).

    `squares` and `peaks` take each item's sum of squares and largest magnitude; NaN and inf show in the
    latter. Squares are taken in fp32 and added up in float64 every `FLUSH` elements; the order within such a
    run is left to the compiler, and is the same at any number of threads.
    """
    if grad == FP32:
        raise ValueError("fp32 gradients are wide already")

    def part(low, wide):
        total = f32(0)
        top = i32(0)
        for i in range(low.shape[0]):
            x = read_grad(grad, low, wide, i)
            wide[i] = x
            top = max(top, i32(bits_of(x) & MASK))
            total += x * x
        return np.float64(total), float_of(top)

    widen = compiled(fastmath={"reassoc"})(part)

    def run(first, last, items, table, squares, peaks):
        for k in range(first, last):
            p, start, count = items[k, 0], items[k, 1], items[k, 2]
            total = 0.0
            top = f32(0)
            for j in range(start, start + count, FLUSH):
                n = min(FLUSH, start + count - j)
                low = carray(at(table[p, 0] + 2 * j), n, np.int16)
                wide = carray(at(table[p, 1] + 4 * j), n, np.float32)
                squared, peak = widen(low, wide)
                total += squared
                top = float_of(max(bits_of(top), bits_of(peak)))
            squares[k] = total
            peaks[k] = top

    return compiled("void(int64,int64,int64[:,::1],int64[:,::1],float64[::1],float32[::1])")(run)
