"""Measures CPU gradients in one pass by compiled kernels."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from halfstep.gradients.stats import GradStats, HostStats
from halfstep.kernels.cpu.run import GRADS, work_items_for
from halfstep.trees import as_float32


def measure(grads: Sequence[Tensor], inv_scale: float) -> HostStats:
    """Return finite flag, norm and largest magnitude (fp32) of dense CPU gradients, in one pass over each.

    Squares are added in float64, so that the norm, by which gradients are clipped, does not depend on how
    tensors are cut up.
    """
    sums: list[tuple[float, float]] = []
    for dtype in dict.fromkeys(g.dtype for g in grads):
        work, table = work_items_for([g for g in grads if g.dtype is dtype])
        sums.append(work.measure(GRADS[dtype], table))
    return combine(sums, inv_scale)


def combine(sums: list[tuple[float, float]], inv_scale: float) -> HostStats:
    """Combine the sums of several sets of gradients into stats; NaN wins over inf."""
    total, largest = sums[0] if sums else (0.0, 0.0)
    for squares, peak in sums[1:]:
        total, largest = total + squares, float(np.maximum(largest, peak))
    norm, amax = as_float32(total**0.5 * inv_scale), as_float32(largest * inv_scale)
    return GradStats(math.isfinite(largest), norm, amax)
