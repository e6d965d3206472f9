"""The CPU step of a model whose tensors stay in their places: all but addresses and scalars is kept.

The Python around an ordinary step takes as long as the arithmetic of half a million weights. A plan is made
after such a step; the next ones look up the gradients' addresses, compute each group's scalars and call the
kernels. What they compute is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from halfstep.gradients import cpu as cpus_
from halfstep.gradients.stats import HostStats
from halfstep.optim import cpu
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.arguments import numbers_of
from halfstep.optim.cpu import Table, Variant
from halfstep.optim.source import Source
from halfstep.optim.storage import Slot
from halfstep.optim.tensor_facts import versions_of

Group = Mapping[str, Any]


class _Part:
    """The slots of one group that one kernel updates, and the number of the set they are measured with."""

    def __init__(
        self, group: Group, algorithm: Algorithm, variant: Variant, number: int, slots: list[Slot]
    ) -> None:
        self.group, self.algorithm, self.slots, self.number = group, algorithm, slots, number
        self.table = Table(algorithm, variant, slots)
        self._random = any(slot.rounds_randomly for slot in slots)
        self._rows: list[Any] = []

    def update(self, factor: float, steps: Any, same: bool, look: bool) -> bool:
        """Run the step of which these are the numbers; true where a weight left the range of its master."""
        hyper, table = numbers_of(self.group), self.table
        factor = -factor if hyper["maximize"] else factor
        different = steps[:1] if same else steps  # a list of all takes longer than one row for all
        rows = [(factor, *self.algorithm.scalars(hyper, step)) for step in different.tolist()]
        if rows != self._rows:
            table.scalars[:] = rows  # one row serves all
            self._rows = rows
        if self._random:
            table.keys[:] = [slot.key(int(n)) for slot, n in zip(self.slots, steps)]
        return table.update(look)


class HostPlan:
    """All parameters of one optimizer on the CPU, ready for the kernels.

    It speaks of gradients only: whether the slots it was made of still hold, `PlanCheck` says before.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        algorithm: Callable[[Group], Algorithm],
        slots: Mapping[Tensor, Slot],
        source: Source,
    ) -> None:
        self._source = source
        self._bare: list[Tensor] = []
        self._parts: list[_Part] = []
        for group in groups:
            variants: dict[tuple[Variant, int], list[Slot]] = {}
            for p, grad in zip(group["params"], source.of_all(group["params"])):
                if grad is None or p.numel() == 0:
                    self._bare.append(p)
                else:
                    kind = cpu.variant_of(slots[p], grad.dtype), source.set_of(p)
                    variants.setdefault(kind, []).append(slots[p])
            self._parts += [_Part(group, algorithm(group), *kind, own) for kind, own in variants.items()]
        slots_of_all = [slot for part in self._parts for slot in part.slots]
        self._params = [slot.param for slot in slots_of_all]
        self._gradients = source.watched(self._params)
        noted = np.split(self._gradients.addresses, np.cumsum([len(part.slots) for part in self._parts])[:-1])
        self._columns = [(part.table.addresses[:, 2], own) for part, own in zip(self._parts, noted)]
        self._counts = np.array([slot.step.data_ptr() for slot in slots_of_all], np.int64)
        self._steps = np.zeros(len(slots_of_all))
        self._versions = versions_of(t for slot in slots_of_all for t in slot.held)

    @staticmethod
    def fits(p: Tensor, grad: Tensor | None) -> bool:
        """Whether a plan can hold this parameter with this gradient."""
        if grad is None:
            return True
        dense = (
            p.is_cpu and p.is_contiguous() and grad.is_contiguous() and not grad.is_neg() and p.numel() > 0
        )
        return dense and grad.dtype in cpus_.GRADS

    def ready(self) -> bool:
        """Whether the gradients are such as they were when the plan was made; notes where they are."""
        if not self._gradients.alike():
            return False
        for column, addresses in self._columns:
            column[:] = addresses
        return not self._bare or all(grad is None for grad in self._source.of_all(self._bare))

    def measure(self, inv_scale: float) -> HostStats:
        """Finite flag, norm and largest magnitude of all gradients, times `inv_scale`."""
        for part in self._parts:
            part.table.measure()
        return self._seen(inv_scale)

    def update(self, factor: float, inv_scale: float | None) -> tuple[bool, HostStats | None]:
        """Update all; with `inv_scale`, measure on the way. True where a weight left its master's range."""
        same = cpu.count_steps(self._counts, self._steps)
        over, first, look = False, 0, inv_scale is not None
        for part in self._parts:
            last = first + len(part.slots)
            over |= part.update(factor, self._steps[first:last], same, look)
            first = last
        self._versions.count()
        return over, None if inv_scale is None else self._seen(inv_scale)

    def _seen(self, inv_scale: float) -> HostStats:
        return self._source.combined([(p.number, *p.table.totals()) for p in self._parts], inv_scale)
