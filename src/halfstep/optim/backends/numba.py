"""The backend of a CPU: Numba's kernels over tables of addresses, one call a thread for a whole group."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.distributed import shard_groups
from halfstep.gradients.decision import Decision, Scalar
from halfstep.gradients.stats import HostStats
from halfstep.kernels import codes as L
from halfstep.kernels.cpu.run import GRADS, WorkItems, kernels
from halfstep.optim import arguments, rounding
from halfstep.optim.backends.backend import Backend
from halfstep.optim.bundles import KEY, TensorGroup
from halfstep.optim.shards import PLAIN, combine_stats


class Numba(Backend):
    """One call measures a group, one updates it; where nothing depends on the stats, one does both."""

    fuses = True

    def measure(
        self, groups: Sequence[TensorGroup], inv_scale: Scalar, params: Sequence[Tensor]
    ) -> HostStats:
        """Return the stats over all ranks as Python values."""
        return _combine(groups, WorkItems.measure, inv_scale, params)

    def update(self, groups: Sequence[TensorGroup], decision: Decision, seed: int, measures: bool) -> bool:
        """Update one group after the other; none that is skipped comes here."""
        left_range = False
        for group in groups:
            hyper = arguments.numbers_of(group.group)
            factor = -decision.factor(group.number) if hyper["maximize"] else decision.factor(group.number)
            left_range |= _update(group, hyper, factor, seed, measures)
        return left_range

    def measured(
        self, groups: Sequence[TensorGroup], inv_scale: Scalar, params: Sequence[Tensor]
    ) -> HostStats:
        """Return the stats that an update found on the way."""
        return _combine(groups, WorkItems.totals, inv_scale, params)


def _combine(
    groups: Sequence[TensorGroup], sums_of: Any, inv_scale: Scalar, params: Sequence[Tensor]
) -> HostStats:
    """Return the stats over all ranks; `sums_of` gives squares and largest magnitude of work items."""
    sums: list[tuple[Any, float, float]] = []
    for group in groups:
        (table, items), p = _work_of(group), group.params[0]
        split_over = () if type(p) in PLAIN else shard_groups(p)
        sums.append((split_over, *sums_of(items, GRADS[group.grad_dtype], table)))
    return combine_stats(sums, params, Decision(inv_scale).factor(0))


def _work_of(group: TensorGroup) -> tuple[Any, WorkItems]:
    """Return the kernels' arguments: the table, and work items with room for what they find."""
    if group.work is None:
        group.work = group.table(), WorkItems(group.elements, group.widths)
    return group.work


def _update(group: TensorGroup, hyper: Mapping[str, Any], factor: float, seed: int, measures: bool) -> bool:
    """Update every parameter, and measure if `measures`; true where one left its master's range.

    `hyper` is the parameter group with Python numbers; `factor` multiplies the gradients.
    """
    algorithm, compiled, steps = group.algorithm, kernels(), np.empty(len(group.params))
    table, items = _work_of(group)
    same = compiled.step_counter()(table, steps)
    counts = [steps.item(0)] if same else steps.tolist()  # one row serves all
    rows = {step: (factor, *algorithm.scalars(hyper, step)) for step in set(counts)}
    scalars = np.array(list(map(rows.__getitem__, counts)), np.float32)
    if group.rounds_randomly:
        widths = group.widths or repeat(None)
        places = np.array(list(map(rounding.place_of, group.origins(), widths)), np.int64)
        bases: Any = np.array(group.base_keys(seed), np.int64)
        keys = rounding.key_of(bases, cast(Any, steps.astype(np.int64))) + places // L.PANEL * rounding.WEYL
        table[KEY] = (keys & rounding.WORD) | (places % L.PANEL) << 32
    formats = group.kind, GRADS[group.grad_dtype], group.state_kind
    items.run(compiled.updater(algorithm.code, *formats, measures), table, scalars)
    increment_version(group.params)
    return group.kind == L.FP16_EXACT and bool(items.found[2].any())
