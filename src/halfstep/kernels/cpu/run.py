"""Runs the CPU's compiled kernels: whether they can be had, their work items, and the threads they run in."""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import warn
from halfstep.kernels import codes as L

ITEM = 65536  # elements of a work item: a multiple of the panel and of the 8-bit block
LEAST = 1 << 18  # elements worth importing Numba for
FEW = 64  # work items that Python adds up faster than numpy
TINY, HUGE = 1e-12, 1e17
GRADS = {torch.bfloat16: L.BF16, torch.float16: L.FP16, torch.float32: L.FP32}


@cache
def kernels(needed: bool = True) -> Any:
    """Return the compiled kernels' module, None where Numba cannot be used, of which one warning tells.

    Nothing is said where they are not `needed`: for passes that torch does as well, with the same values.
    """
    try:
        from halfstep.kernels.cpu import models
    except ImportError as error:
        if needed:
            warn(
                f"Numba cannot be imported ({error}); hs.optim runs its plain torch reference on the CPU, "
                "several times slower: pip install numba"
            )
        return None
    return models


def kernels_if_worthwhile(tensors: Sequence[Tensor]) -> Any:
    """`kernels` where they can read these tensors and are worth their import, else None: torch does it."""
    fit = all(type(t) is Tensor and t.is_cpu and t.dtype in GRADS and t.is_contiguous() for t in tensors)
    return kernels(needed=False) if fit and sum(t.numel() for t in tensors) >= LEAST else None


@cache
def _items(sizes: tuple[int, ...], widths: tuple[int, ...] | None = None) -> tuple[Any, tuple[int, ...]]:
    rows = [
        (p, s, n)
        for p, (size, width) in enumerate(zip(sizes, widths or sizes))
        for s, n in _cuts(size, width)
    ]
    return np.array(rows, np.int64).reshape(-1, 3), tuple(row[2] for row in rows)


def _cuts(size: int, width: int) -> Iterator[tuple[int, int]]:
    """Return starts and counts of about ITEM elements: whole rows, or parts of one."""
    if width <= ITEM:
        step = max(ITEM // max(width, 1) * width, 1)
        yield from ((s, min(step, size - s)) for s in range(0, size, step))
        return
    for row in range(0, size, width):
        yield from ((row + s, min(ITEM, width - s)) for s in range(0, width, ITEM))


class WorkItems:
    """Work items, with room for what is found in each one; `widths`: of rows that no item may cut."""

    def __init__(self, elements: tuple[int, ...], widths: tuple[int, ...] | None = None) -> None:
        self.items, self.sizes = _items(elements, widths)
        self.found = np.empty((3, len(self.sizes)))

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        """Call a kernel on all items; it writes what it finds."""
        run_ranges(kernel, self.sizes, self.items, *args, self.found)

    def totals(self, grad: int, table: Any) -> tuple[float, float]:
        """Return sum of squares and largest magnitude; squares fp32 may have lost are redone in float64."""
        total, peak = self.sums()
        if 0 < peak < TINY or HUGE < peak < math.inf:
            total, _ = self.measure(grad, table)
        return total, peak

    def measure(self, grad: int, table: Any) -> tuple[float, float]:
        """Return sum of squares, in float64, and largest magnitude of the gradients in the table."""
        self.run(kernels().measurer(grad, kernels().WIDE), table)
        return self.sums()

    def sums(self) -> tuple[float, float]:
        """Return sum of squares and largest magnitude of all items, NaN where one is."""
        squares, peaks, _ = self.found
        if len(squares) > FEW:
            return squares.sum().item(), peaks.max(initial=0.0).item()
        total = sum(squares.tolist())
        return total, math.nan if math.isnan(total) else max(peaks.tolist(), default=0.0)


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="halfstep")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)


def run_ranges(kernel: Callable[..., Any], sizes: Sequence[int], *args: Any) -> None:
    """Call `kernel(first, last, *args)` over items 0..len(sizes)-1, in parts of about equal total size.

    They run in as many threads as torch uses. Numba's own `parallel=True` brings a second OpenMP runtime next
    to torch's; these threads exist only while more than one is asked for, and again in a forked child.
    """
    threads = min(torch.get_num_threads(), len(sizes))
    if threads <= 1:
        kernel(0, len(sizes), *args)
        return
    cuts, goal, done = [0], sum(sizes) / threads, 0.0
    for i, size in enumerate(sizes):
        done += size
        if done >= goal * len(cuts) and len(cuts) < threads:
            cuts.append(i + 1)
    cuts.append(len(sizes))
    parts = list(itertools.pairwise(cuts))
    futures = [_workers(threads - 1).submit(kernel, a, b, *args) for a, b in parts[1:] if a < b]
    kernel(*parts[0], *args)
    for future in futures:
        future.result()


def work_items_for(tensors: Sequence[Tensor]) -> tuple[WorkItems, Any]:
    """Return the work items and the table for measuring dense CPU tensors of one dtype."""
    table = np.zeros((3, len(tensors)), np.int64)
    table[2] = list(map(Tensor.data_ptr, tensors))
    return WorkItems(tuple(map(Tensor.numel, tensors))), table
