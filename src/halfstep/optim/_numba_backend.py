# pyright: basic
"""Fills the CPU kernels' tables from slots and runs them: one call a variant and thread for all weights."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import HalfstepWarning
from halfstep.optim import _layout as L
from halfstep.optim._gradients import GradStats
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


def update(algorithm: Algorithm, work: Sequence[tuple[Slot, Tensor, Row, int]], factor: float) -> bool:
    """`reference.update` for CPU slots; true where a weight left the range of its master."""
    variants: dict[tuple[int, int, int], list[tuple[Slot, Tensor, Row, int]]] = {}
    for entry in work:
        slot, grad = entry[0], entry[1]
        state = slot.state_kind if slot.states else L.STATE_FP32
        variants.setdefault((slot.kind, GRADS[grad.dtype], state), []).append(entry)
    status = np.zeros(1, np.int64)
    for variant, entries in variants.items():
        kernel = kernels().updater(algorithm.code, *variant)
        table = np.array([slot.row for slot, *_ in entries], np.int64)
        table[:, 2] = [grad.data_ptr() for _, grad, *_ in entries]
        scalars = np.array([(factor, *row) for _, _, row, _ in entries], np.float32)
        keys = np.array([key for *_, key in entries], np.uint32)
        items, sizes = _items(tuple(slot.weight.numel() for slot, *_ in entries))
        run_ranges(kernel, sizes, items, table, scalars, keys, status)
    return bool(status[0])


def measure(grads: Sequence[Tensor], inv_scale: float) -> GradStats:
    """Finite flag, norm and largest magnitude of flat CPU gradients, in one pass over each."""
    total, top = 0.0, 0.0
    for dtype, code in GRADS.items():
        same = [g for g in grads if g.dtype == dtype]
        if not same:
            continue
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
    norm = torch.tensor(total**0.5 * inv_scale, dtype=torch.float32)
    max_abs = torch.tensor(top, dtype=torch.float32) * inv_scale
    return GradStats(torch.tensor(bool(np.isfinite(top))), norm, max_abs)
