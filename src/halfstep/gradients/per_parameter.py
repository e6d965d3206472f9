"""Each parameter's largest gradient at every step: one pass on the device, Python values only when read.

This runs at every step of a watched training, so it keeps what it found as one small tensor and leaves names,
notes and series for whoever asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.cpu.run import GRADS, kernels_if_worthwhile, work_items_for
from halfstep.trees import Ends, dense_values, ends_of, home_device, stack_scalars


def amaxes_of(ends: Sequence[Ends]) -> Tensor:
    """Return the largest magnitudes [n] of tensors from their minima and maxima, in fp32 (or fp64)."""
    scalars = [end for pair in ends for end in pair]
    both = stack_scalars(scalars, home_device(scalars)).view(-1, 2)
    return torch.maximum(-both[:, 0], both[:, 1])


@torch.no_grad()
def amaxes(gradients: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of each gradient: [n], fp32 (fp64 if one is), NaN where there is one.

    Gradients may differ in dtype and device; of a sharded one only the local shard is looked at.
    """
    tensors = [dense_values(g) for g in gradients]
    home = home_device(tensors)
    if home.type == "cpu":  # its infinity norm is 20 times slower than its aminmax
        kernels = kernels_if_worthwhile(tensors) if len({t.dtype for t in tensors}) == 1 else None
        return _peaks(kernels, tensors) if kernels else amaxes_of([ends_of(t) for t in tensors])
    norms = [torch.linalg.vector_norm(t, math.inf) if t.numel() else t.new_zeros(()) for t in tensors]
    return stack_scalars(norms, home)


def _peaks(kernels: Any, tensors: Sequence[Tensor]) -> Tensor:
    work, table = work_items_for(tensors)
    work.run(kernels.measurer(GRADS[tensors[0].dtype]), table)
    peaks, maxima = work.found[1].astype(np.float32), np.zeros(len(tensors), np.float32)
    # As integers: magnitudes keep their order, and NaN lies above infinity.
    np.maximum.at(maxima.view(np.int32), work.items[:, 0], peaks.view(np.int32))
    return torch.from_numpy(maxima)


def worst_of(amaxes: dict[str, float]) -> str:
    """Return the name with the largest magnitude; NaN is larger than all."""
    return max(amaxes, key=lambda n: math.inf if math.isnan(amaxes[n]) else amaxes[n])
