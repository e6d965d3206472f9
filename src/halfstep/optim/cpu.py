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
from halfstep.kernels import codes as L
from halfstep.kernels.pool import run_ranges
from halfstep.optim.algorithms import Algorithm, Row
from halfstep.optim.storage import Slot

ITEM = 65536  # elements of a work item: a multiple of the panel and of the 8-bit block
FEW = 64  # work items that Python adds up faster than numpy
TINY, HUGE = 1e-12, 1e17
GRADS = {torch.bfloat16: L.BF16, torch.float16: L.FP16, torch.float32: L.FP32}
DTYPES = {code: dtype for dtype, code in GRADS.items()}


@cache
def kernels() -> Any:
    """The compiled kernels' module, or None (said once) where Numba cannot be used."""
    try:
        from halfstep.kernels.cpu import models
    except ImportError as error:
        warnings.warn(
            f"Numba cannot be imported ({error}); hs.optim runs its plain torch reference on the CPU, "
            "several times slower: pip install numba",
            HalfstepWarning,
            stacklevel=4,
        )
        return None
    return models


@cache
def _items(sizes: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    rows = [(p, s, min(ITEM, n - s)) for p, n in enumerate(sizes) for s in range(0, n, ITEM)]
    return np.array(rows, np.int64).reshape(-1, 3), tuple(row[2] for row in rows)


Variant = tuple[int, int, int]
Look = tuple[bool, float, float]
"""Finite flag, norm and largest magnitude, of gradients that were multiplied by the inverse scale."""
Work = Sequence[tuple[Slot, Tensor, Row, int]]


def variant_of(slot: Slot, grad: torch.dtype) -> Variant:
    """Which kernel updates a slot whose gradient has this dtype, within one algorithm."""
    return slot.kind, GRADS[grad], slot.state_kind if slot.states else L.STATE_FP32


class Table:
    """What the kernels of one variant are called with; column 2 of `addresses` is the caller's to fill."""

    def __init__(self, algorithm: Algorithm, variant: Variant, slots: list[Slot]) -> None:
        self._variant, self._grad = (algorithm.code, *variant), variant[1]
        self._kernels: dict[bool, Any] = {}
        self.addresses = np.array([slot.row for slot in slots], np.int64)
        self.scalars = np.zeros((len(slots), 8), np.float32)
        self.keys = np.zeros(len(slots), np.uint32)
        self._work = _Work(tuple(slot.weight.numel() for slot in slots))
        self._status = np.zeros(1, np.int64)

    def update(self, look: bool = False) -> bool:
        """Update every slot, with `look` measuring on the way; true where one left its master's range."""
        kernel = self._kernels.get(look)
        if kernel is None:
            kernel = self._kernels[look] = kernels().updater(*self._variant, look)
        work = self._work
        given = (self.addresses, self.scalars, self.keys, self._status, *work.found)
        run_ranges(kernel, work.sizes, work.items, *given)
        over = bool(self._status[0])
        self._status[0] = 0
        return over

    def measure(self) -> None:
        """Measure the gradients."""
        work = self._work
        run_ranges(kernels().measurer(self._grad), work.sizes, work.items, self.addresses, *work.found)

    def totals(self) -> tuple[float, float]:
        """Sum of squares and largest magnitude that the last look found."""
        return self._work.totals(self._grad, self.addresses)


class _Work:
    """Work items, with room for what measuring each one finds."""

    def __init__(self, elements: tuple[int, ...]) -> None:
        self.items, self.sizes = _items(elements)
        self.found = np.empty(len(self.sizes)), np.empty(len(self.sizes), np.float32)

    def totals(self, grad: int, addresses: Any) -> tuple[float, float]:
        """Sum of squares and largest magnitude; squares that fp32 may have lost are taken anew in float64."""
        total, peak = self._sums()
        if 0 < peak < TINY or HUGE < peak < math.inf:
            run_ranges(
                kernels().measurer(grad, kernels().WIDE), self.sizes, self.items, addresses, *self.found
            )
            total, _ = self._sums()
        return total, peak

    def _sums(self) -> tuple[float, float]:
        squares, peaks = self.found
        if len(squares) > FEW:
            return squares.sum().item(), peaks.max(initial=0.0).item()
        total = sum(squares.tolist())
        return total, math.nan if math.isnan(total) else max(peaks.tolist(), default=0.0)


def update(algorithm: Algorithm, work: Work, factor: float) -> bool:
    """`reference.update` for CPU slots; true where a weight left the range of its master."""
    variants: dict[Variant, list[tuple[Slot, Tensor, Row, int]]] = {}
    for entry in work:
        variants.setdefault(variant_of(entry[0], entry[1].dtype), []).append(entry)
    over = False
    for variant, entries in variants.items():
        table = Table(algorithm, variant, [slot for slot, *_ in entries])
        table.addresses[:, 2] = [grad.data_ptr() for _, grad, _, _ in entries]
        table.scalars[:] = [(factor, *row) for _, _, row, _ in entries]
        table.keys[:] = [key for _, _, _, key in entries]
        over |= table.update()
    return over


def measure(grads: Sequence[Tensor], inv_scale: float) -> Look:
    """Finite flag, norm and largest magnitude (fp32 values) of dense CPU gradients, in one pass over each."""
    found: list[tuple[float, float]] = []
    for dtype in dict.fromkeys(g.dtype for g in grads):
        code, same = GRADS[dtype], [g for g in grads if g.dtype is dtype]
        work = _Work(tuple(g.numel() for g in same))
        addresses = np.zeros((len(same), 7), np.int64)
        addresses[:, 2] = [g.data_ptr() for g in same]
        run_ranges(kernels().measurer(code), work.sizes, work.items, addresses, *work.found)
        found.append(work.totals(code, addresses))
    return combined(found, inv_scale)


def combined(found: list[tuple[float, float]], inv_scale: float) -> Look:
    """The answer for several sets of gradients; NaN wins over inf."""
    total, top = found[0] if found else (0.0, 0.0)
    for squares, peak in found[1:]:
        total, top = total + squares, float(np.maximum(top, peak))
    return math.isfinite(top), c_float(total**0.5 * inv_scale).value, c_float(top * inv_scale).value
