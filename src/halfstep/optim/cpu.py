"""Fills the CPU kernels' tables from slots and runs them: one call a variant and thread for all weights."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.gradients.cpu import GRADS, WorkItems, kernels
from halfstep.kernels import codes as L
from halfstep.kernels.pool import run_ranges
from halfstep.optim.algorithms import Algorithm, Scalars
from halfstep.optim.storage import Slot, count_versions

Variant = tuple[int, int, int]
Work = Sequence[tuple[Slot, Tensor, Scalars, int]]


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
        widths = tuple(slot.width for slot in slots) if variant[2] == L.STATE_8BIT else None
        self._work = WorkItems(tuple(slot.weight.numel() for slot in slots), widths)
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
        run_ranges(
            kernels().measurer(self._grad, kernels().WIDE),
            work.sizes,
            work.items,
            self.addresses,
            *work.found,
        )

    def totals(self) -> tuple[float, float]:
        """Sum of squares and largest magnitude that the last look found."""
        return self._work.totals(self._grad, self.addresses)


def update(algorithm: Algorithm, work: Work, factor: float) -> bool:
    """`reference.update` for CPU slots; true where a weight left the range of its master."""
    variants: dict[Variant, list[tuple[Slot, Tensor, Scalars, int]]] = {}
    for entry in work:
        variants.setdefault(variant_of(entry[0], entry[1].dtype), []).append(entry)
    over = False
    for variant, entries in variants.items():
        table = Table(algorithm, variant, [slot for slot, *_ in entries])
        table.addresses[:, 2] = [grad.data_ptr() for _, grad, _, _ in entries]
        table.scalars[:] = [(factor, *row) for _, _, row, _ in entries]
        table.keys[:] = [key for _, _, _, key in entries]
        over |= table.update()
        count_versions(slot for slot, *_ in entries)
    return over


def count_steps(addresses: Any, steps: Any) -> bool:
    """Add 1 to each fp32 step count, into `steps` too (float64); true where all are the same."""
    return _counter()(addresses, steps)


@cache
def _counter() -> Any:
    from halfstep.kernels.cpu import facts

    return facts.counter()
