# pyright: basic
"""Fills the CPU kernels' tables from slots and runs them: one call a variant and thread for all weights."""

import math
import warnings
from collections.abc import Sequence
from ctypes import c_float
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import HalfstepWarning
from halfstep.optim import _layout as L
from halfstep.optim._pool import run_ranges
from halfstep.optim.algorithms import Algorithm, Row
from halfstep.optim.slots import Slot

ITEM = 65536  # elements of a work item: a multiple of the panel and of the 8-bit block
TINY, HUGE = 1e-12, 1e17
GRADS = {torch.bfloat16: L.BF16, torch.float16: L.FP16, torch.float32: L.FP32}


@cache
def kernels() -> Any:
    """The compiled kernels' module, or None (said once) where Numba cannot be used."""
    try:
        from halfstep.optim import _numba_kernels
    except ImportError as error:
        warnings.warn(
            f"Numba cannot be imported ({error}); hs.optim runs its plain torch reference on the CPU, "
            "several times slower: pip install numba",
            HalfstepWarning,
            stacklevel=4,
        )
        return None
    return _numba_kernels


@cache
def _items(sizes: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    rows = [(p, s, min(ITEM, n - s)) for p, n in enumerate(sizes) for s in range(0, n, ITEM)]
    return np.array(rows, np.int64).reshape(-1, 3), tuple(row[2] for row in rows)


Variant = tuple[int, int, int]


class Table:
    """What the kernel of one variant is called with; kept while it works on the same slots."""

    def __init__(self, algorithm: Algorithm, variant: Variant, slots: list[Slot]) -> None:
        self.slots = slots
        self.kernel = kernels().updater(algorithm.code, *variant)
        self.addresses = np.array([slot.row for slot in slots], np.int64)
        self.items, self.sizes = _items(tuple(slot.weight.numel() for slot in slots))


Tables = dict[tuple[int, Variant, int], Table]
Work = Sequence[tuple[Slot, Tensor, Row, int]]


def update(algorithm: Algorithm, work: Work, factor: float, tables: Tables) -> bool:
    """`reference.update` for CPU slots; true where a weight left the range of its master.

    `tables` keeps between steps what does not change from one to the next.
    """
    variants: dict[Variant, list[tuple[Slot, Tensor, Row, int]]] = {}
    for entry in work:
        slot, grad = entry[0], entry[1]
        state = slot.state_kind if slot.states else L.STATE_FP32
        variants.setdefault((slot.kind, GRADS[grad.dtype], state), []).append(entry)
    status = np.zeros(1, np.int64)
    for variant, entries in variants.items():
        slots = [slot for slot, *_ in entries]
        key = (algorithm.code, variant, id(slots[0]))
        table = tables.get(key)
        if table is None or table.slots != slots:
            table = tables[key] = Table(algorithm, variant, slots)
        table.addresses[:, 2] = [grad.data_ptr() for _, grad, _, _ in entries]
        scalars = np.array([(factor, *row) for _, _, row, _ in entries], np.float32)
        keys = np.array([key for _, _, _, key in entries], np.uint32)
        run_ranges(table.kernel, table.sizes, table.items, table.addresses, scalars, keys, status)
    return bool(status[0])


def measure(grads: Sequence[Tensor], inv_scale: float) -> tuple[bool, float, float]:
    """Finite flag, norm and largest magnitude (fp32 values) of dense CPU gradients, in one pass over each."""
    total, top = 0.0, 0.0
    for dtype in {g.dtype for g in grads}:
        code, same = GRADS[dtype], [g for g in grads if g.dtype is dtype]
        items, sizes = _items(tuple(g.numel() for g in same))
        table = np.zeros((len(same), 7), np.int64)
        table[:, 2] = [g.data_ptr() for g in same]
        squares, peaks = np.empty(len(sizes)), np.empty(len(sizes), np.float32)
        run_ranges(kernels().measurer(code, False), sizes, items, table, squares, peaks)
        peak = float(peaks.max(initial=0.0))
        if 0 < peak < TINY or HUGE < peak < np.inf:  # fp32 squares may have vanished or overflowed
            run_ranges(kernels().measurer(code, True), sizes, items, table, squares, peaks)
        total += float(squares.sum())
        top = float(np.maximum(top, peak))
    return math.isfinite(top), c_float(total**0.5 * inv_scale).value, c_float(top * inv_scale).value
