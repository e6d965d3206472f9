"""Widens 16-bit gradients to fp32; a CPU kernel measures them on the way, so that nobody reads them again.

Without that kernel (other devices, few elements, no Numba) torch's own copy runs and measures nothing. The
wide values have the same bits either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.gradients.cpu import GRADS, HUGE, TINY, WorkItems, kernels_worth
from halfstep.gradients.stats import GradStats, HostStats
from halfstep.torch_private import foreach_copy_


@torch.no_grad()
def widen(grads: Sequence[Tensor]) -> tuple[list[Tensor], HostStats | None]:
    """Return fp32 copies of dense 16-bit gradients, in order, and their measurements where those are sound.

    Measurements are missing where torch's copy ran, where a value is not finite, and where fp32 squares may
    have overflowed or vanished.
    """
    wide = [torch.empty_like(g, dtype=torch.float32) for g in grads]
    kernels = kernels_worth(grads)
    if kernels is None:
        foreach_copy_(wide, grads)
        return wide, None
    total, largest = 0.0, 0.0
    for dtype in dict.fromkeys(g.dtype for g in grads):
        pairs = [(g, w) for g, w in zip(grads, wide) if g.dtype == dtype]
        work = WorkItems(tuple(w.numel() for _, w in pairs))
        table = np.array([[t.data_ptr() for t in column] for column in zip(*pairs)], np.int64)
        work.run(kernels.measurer(GRADS[dtype], kernels.WIDEN), table)
        squares, peak = work.sums()
        total, largest = total + squares, float(np.maximum(largest, peak))
    sound = largest == 0 or TINY < largest < HUGE
    return wide, GradStats(True, math.sqrt(total), largest) if sound else None
