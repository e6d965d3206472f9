"""The CPU step of a model whose tensors stay in their places: all but addresses and scalars is kept.

The Python around an ordinary step takes as long as the arithmetic of half a million weights. A plan is made
after such a step; the next ones look up the gradients' addresses, compute each group's scalars and call the
kernels. What they compute is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

from torch import Tensor

from halfstep.gradients import cpu as cpus_
from halfstep.gradients.cpu import Look
from halfstep.optim import cpu, rounding
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.cpu import Table, Variant
from halfstep.optim.storage import Slot

Group = Mapping[str, Any]


class _Part:
    """The slots of one group that one kernel updates."""

    def __init__(self, group: Group, algorithm: Algorithm, variant: Variant, slots: list[Slot]) -> None:
        self.group, self.algorithm, self.slots = group, algorithm, slots
        self.table = Table(algorithm, variant, slots)
        self.random = any(slot.rounds_randomly for slot in slots)
        self.grad_dtype = cpus_.DTYPES[variant[1]]
        self.counts: list[Any] = [slot.step.numpy() for slot in slots]
        self.places = [(slot.param, slot.row[0], slot.weight.dtype) for slot in slots]

    def refill(self) -> bool:
        """Note where the gradients are now; False where a tensor is not what it was."""
        grad_dtype, addresses = self.grad_dtype, list[int]()
        for p, address, dtype in self.places:
            grad = p.grad
            if (
                grad is None
                or grad.dtype is not grad_dtype
                or p.data_ptr() != address
                or p.dtype is not dtype
                or not grad.is_contiguous()
            ):
                return False
            addresses.append(grad.data_ptr())
        self.table.addresses[:, 2] = addresses
        return True

    def update(self, factor: float, look: bool) -> bool:
        """Count the step and run it; true where a weight left the range of its master."""
        hyper, table = self.group, self.table
        for value in hyper.values():
            if isinstance(value, Tensor):
                hyper = {
                    k: float(v) if isinstance(v, Tensor) else v for k, v in hyper.items() if k != "params"
                }
                break
        factor = -factor if hyper["maximize"] else factor
        steps: list[float] = []
        for count in self.counts:
            number = count.item() + 1.0
            count[()] = number
            steps.append(number)
        same = steps.count(steps[0]) == len(steps)
        rows = [(factor, *self.algorithm.scalars(hyper, step)) for step in (steps[:1] if same else steps)]
        table.scalars[:] = rows  # one row serves all
        if self.random:
            table.keys[:] = [rounding.key_of(slot.base_key, int(n)) for slot, n in zip(self.slots, steps)]
        return table.update(look)


class HostPlan:
    """All parameters of one optimizer on the CPU, ready for the kernels."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        algorithm: Callable[[Group], Algorithm],
        slots: Mapping[Tensor, Slot],
    ) -> None:
        self._groups, self._algorithm = list(groups), algorithm
        self._params: list[Tensor] = [p for group in groups for p in group["params"]]
        self._bare = [p for p in self._params if p.grad is None]
        self._parts: list[_Part] = []
        for group in groups:
            variants: dict[Variant, list[Slot]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    variants.setdefault(cpu.variant_of(slots[p], p.grad.dtype), []).append(slots[p])
            self._parts += [_Part(group, algorithm(group), v, own) for v, own in variants.items()]

    @staticmethod
    def fits(p: Tensor) -> bool:
        """Whether a plan can hold this parameter."""
        if p.grad is None:
            return True
        dense = p.is_cpu and p.is_contiguous() and p.grad.is_contiguous() and p.numel() > 0
        return dense and p.grad.dtype in cpus_.GRADS

    def ready(self, groups: list[dict[str, Any]]) -> bool:
        """Whether everything is as when the plan was made; notes where the gradients are."""
        if len(groups) != len(self._groups) or not all(map(is_, groups, self._groups)):
            return False
        params = [p for group in groups for p in group["params"]]
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            return False
        if any(p.grad is not None for p in self._bare):
            return False
        return all(part.algorithm is self._algorithm(part.group) and part.refill() for part in self._parts)

    def measure(self, inv_scale: float) -> Look:
        """Finite flag, norm and largest magnitude of all gradients, times `inv_scale`."""
        for part in self._parts:
            part.table.measure()
        return self._seen(inv_scale)

    def update(self, factor: float, inv_scale: float | None) -> tuple[bool, Look | None]:
        """Update all; with `inv_scale`, measure on the way. True where a weight left its master's range."""
        over = [part.update(factor, inv_scale is not None) for part in self._parts]
        return any(over), None if inv_scale is None else self._seen(inv_scale)

    def _seen(self, inv_scale: float) -> Look:
        return cpus_.combined([part.table.totals() for part in self._parts], inv_scale)
