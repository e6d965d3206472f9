"""Runs the CPU kernels over a bundle: one call a thread for all of its weights."""

from typing import Any, cast

import numpy as np

from halfstep.gradients.cpu import GRADS, WorkItems, kernels
from halfstep.kernels.pool import run_ranges
from halfstep.optim import rounding
from halfstep.optim.arguments import numbers_of
from halfstep.optim.bundles import Bundle


class Table:
    """What the kernels are called with for one bundle."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._grad = GRADS[bundle.grad_dtype]
        self._addresses = bundle.addresses()
        self._work = WorkItems(bundle.elements, bundle.widths)

    def measure(self) -> tuple[Any, float, float]:
        """Measure the gradients: their set, the sum of squares and the largest magnitude."""
        work = self._work
        kernel = kernels().measurer(self._grad, kernels().WIDE)
        run_ranges(kernel, work.sizes, work.items, self._addresses, *work.found)
        return self.totals()

    def totals(self) -> tuple[Any, float, float]:
        """What `measure`, or the look of an update, found."""
        return (self.bundle.set_of_groups, *self._work.totals(self._grad, self._addresses))

    def update(self, factor: float, seed: int, look: bool = False) -> bool:
        """Update every parameter, with `look` measuring on the way; true where one left its master's range.

        `factor` multiplies the gradients.
        """
        bundle, work = self.bundle, self._work
        algorithm, hyper = bundle.algorithm, numbers_of(bundle.group)
        factor = -factor if hyper["maximize"] else factor
        steps = np.empty(len(bundle.params))
        same = kernels().step_counter()(bundle.step_addresses(), steps)
        counts = steps[:1].tolist() if same else steps.tolist()  # one row serves all
        rows = {step: (factor, *algorithm.scalars(hyper, step)) for step in set(counts)}
        scalars = np.empty((len(steps), 8), np.float32)
        scalars[:] = [rows[step] for step in counts]
        status = np.zeros(1, np.int64)
        kernel = kernels().updater(algorithm.code, bundle.kind, self._grad, bundle.state_kind, look)
        keys = _keys(bundle, seed, steps) if bundle.rounds_randomly else np.zeros(len(steps), np.uint32)
        given = (self._addresses, scalars, keys, status, *work.found)
        run_ranges(kernel, work.sizes, work.items, *given)
        bundle.count_versions()
        return bool(status[0])


def _keys(bundle: Bundle, seed: int, steps: Any) -> Any:
    bases, shifts = (np.array(own, np.int64) for own in (bundle.base_keys(seed), bundle.key_shifts()))
    return ((rounding.key_of(cast(Any, bases), steps.astype(np.int64)) + shifts) & rounding.WORD).astype(
        np.uint32
    )
