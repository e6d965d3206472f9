# pyright: basic
"""Measuring and updating in one call: a work item's gradients are read again while they are in the cache."""

from functools import cache
from typing import Any

from halfstep.optim._numba_kernels import compiled, measurer, updater


@cache
def measuring_updater(algorithm: int, weight: int, grad: int, state: int) -> Any:
    """`measurer` and `updater` by turns, item by item; for steps that are taken whatever is measured."""
    update = updater(algorithm, weight, grad, state)
    measure = measurer(grad, False)

    def run(first, last, items, table, scalars, keys, status, squares, peaks):
        for k in range(first, last):
            measure(k, k + 1, items, table, squares, peaks)
            update(k, k + 1, items, table, scalars, keys, status)

    signature = (
        "void(int64,int64,int64[:,::1],int64[:,::1],float32[:,::1],uint32[::1],int64[::1],"
        "float64[::1],float32[::1])"
    )
    return compiled(signature)(run)
