"""A look for gradients that `fully_shard` mixed: ranks that used different parameters.

torch adds up what ranks send without asking which parameter it is of. Where the sizes differ its collective
fails; where they are the same every rank lacks a gradient, so that ranks which lack none need not be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.reduce import gather, to_backend
from halfstep.errors import ConfigError
from halfstep.torch_private import without_subclasses

_LOOKS_ON_ACCELERATORS = 16  # each waits for the device


class SameGradients:
    """Asks the ranks of a mesh, where one has no gradients, whether the others have none of the same."""

    def __init__(self) -> None:
        self._comparisons = 0

    def check(self, weights: Sequence[Tensor], name_of: Callable[[Tensor], str]) -> None:
        """Look at what `weights` have for gradients; every rank must call it with the same.

        Raises:
            ConfigError: on every rank of a mesh whose ranks have gradients of different parameters.
        """
        # a getter else asks every DTensor's class for its value
        with without_subclasses():
            if not any(p.grad is None and p.requires_grad for p in weights):
                return
        meshes: dict[Any, list[Tensor]] = {}
        for p in weights:
            if p.requires_grad and (mesh := getattr(p, "device_mesh", None)) is not None:
                meshes.setdefault(mesh, []).append(p)
        for mesh, mesh_weights in meshes.items():
            self._comparisons += 1
            if mesh_weights[0].device.type == "cpu" or self._comparisons <= _LOOKS_ON_ACCELERATORS:
                _compare(mesh_weights, mesh, name_of)


def _compare(weights: Sequence[Tensor], mesh: Any, name_of: Callable[[Tensor], str]) -> None:
    """Raise ConfigError where a weight has a gradient on some ranks of a mesh and none on others."""
    has = [p.grad is not None for p in weights]
    if not any(has) or all(has):
        return
    groups = [mesh.get_group(dim) for dim in reversed(range(mesh.ndim))]
    counts = torch.tensor(has, dtype=torch.int32, device="cpu")
    for group in groups:
        counts = to_backend(counts, group)
        dist.all_reduce(counts, group=group)
    for place, count in enumerate(counts.tolist()):
        if 0 < count < mesh.size():
            everyone = [has]
            for group in groups:
                everyone = [flags for part in gather(everyone, group) for flags in part]
            ranks = [number for number, theirs in enumerate(everyone) if theirs[place]]
            raise ConfigError(
                f"{name_of(weights[place])} has a gradient on ranks {ranks} of {mesh.size()}, none on "
                "others. fully_shard joins what ranks send whatever parameter it is of, so gradients were "
                "mixed (nothing was updated). Let all ranks run the same blocks, blocks= of "
                "hs.distributed.shard, and call set_reduce_scatter_unused_params(True) on the model (torch "
                "2.13), by which what a rank did not use counts as zeros"
            )
