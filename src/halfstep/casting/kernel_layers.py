"""What an op takes as a layer calls it, both ways and in a region: by torch's own kernels, and as chosen.

The times of bare kernels do not tell it: an op that leaves torch's own dispatch pays for Python and for casts
one by one, and in a small op that is all it won.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.casting.context import autocast
from halfstep.casting.kernel_choice import NATIVE, Choice, KernelTable, OpClass, Row
from halfstep.casting.kernel_probes import (
    BATCHES,
    Taken,
    convolution_probe,
    matrix_of,
    take,
    values_of,
)
from halfstep.formats import parse_dtype


def _layer(cls: OpClass) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """An op of this class and what it is called with, in fp32."""
    if cls.op == "convolution":
        probe = convolution_probe(cls)

        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            return torch.convolution(x, weight, None, *probe.geometry)

        return convolve, [probe.x.float(), probe.weight.float()]
    n, k, m = matrix_of(cls) if cls.op == "linear" else (*BATCHES[cls.geometry][cls.size], 0)
    shapes = ((n, k), (m, k), (m,)) if cls.op == "linear" else ((n, k, k), (n, k, k))
    leaves = [values_of(shape, torch.float32, seed) for seed, shape in enumerate(shapes, 1)]
    return torch.nn.functional.linear if cls.op == "linear" else torch.matmul, leaves


def time_layer(cls: OpClass, needs: str, choice: Choice) -> Taken:
    """A layer's forward and backward in a region: by torch's own kernels, and as chosen (`rounded`)."""
    op, leaves = _layer(cls)
    wanted = [t.requires_grad_() for t, need in zip(leaves, "iww") if need in needs]
    dtype = parse_dtype(cls.dtype)

    def run(region: Any) -> object:
        with region:
            out = op(*leaves)
        return torch.autograd.grad(out, wanted, torch.ones_like(out)) if wanted else out

    tables = {"native": KernelTable([Row(NATIVE)]), "rounded": KernelTable([Row(choice)])}
    regions = {name: autocast("cpu", dtype, kernels=table) for name, table in tables.items()}
    layers = {name: functools.partial(run, region) for name, region in regions.items()}
    return take(layers, cls.threads)
