"""Gradients of DTensors as the optimizer over their local tensors asks for them.

Partial sums (tensor parallel) are added up over ranks first. Norm, finite flag and largest magnitude cross
ranks in one collective for each set of groups over which parameters are split.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from halfstep.distributed import local_of, shard_groups, sums_over
from halfstep.gradients import cpu as cpus_
from halfstep.gradients.stats import HostStats
from halfstep.optim.shard_facts import ShardGradients, gradients_of_shards
from halfstep.optim.source import SetSums
from halfstep.optim.tensor_facts import Gradients


@dataclass
class _ShardList:
    """A list of local tensors, the parameters they are shards of, and how their gradients were placed."""

    params: Sequence[Tensor]
    wholes: list[Any]
    specs: list[Any]


@dataclass(frozen=True)
class _Sum:
    """This rank's part of a gradient, added up over ranks when the gradient had these versions."""

    gradient: weakref.ref[Tensor]
    versions: tuple[int, int] | None
    part: Tensor

    def is_of(self, grad: Tensor) -> bool:
        """Whether it is of this gradient as it is now."""
        return self.gradient() is grad and self.versions is not None and self.versions == _versions(grad)


_LISTS = 8


class ShardSource:
    """`Source` of the tensors that stand for `known` parameters on this rank, by parameter."""

    def __init__(self, known: Mapping[Tensor, Tensor]) -> None:
        self._known = known
        self.wholes: dict[Tensor, Tensor] = {}
        """What each tensor is a shard of."""
        self.groups: list[tuple[Any, ...]] = []
        """The sets of process groups over which parameters are split, by number."""
        self._lists: dict[int, _ShardList] = {}
        self._sums: dict[Tensor, _Sum] = {}
        self.settle()

    def settle(self) -> None:
        """Note which parameters there are now."""
        self.groups = list(dict.fromkeys(map(shard_groups, self._known)))
        self.wholes.clear()
        self.wholes.update({local: p for p, local in self._known.items()})
        self._lists.clear()
        self._sums.clear()
        self._watch(None, [])

    def of(self, p: Tensor) -> Tensor | None:
        """This rank's part of the gradient of the parameter that `p` is a shard of."""
        whole = self.wholes[p]
        grad = whole.grad
        if grad is None or whole is p:
            return grad
        part = self._sum_of(whole, grad) if _is_apart(whole, grad) else local_of(grad)
        return part if p.numel() else None

    def _sum_of(self, whole: Tensor, grad: Tensor) -> Tensor:
        """This rank's part of a gradient that is placed otherwise than its parameter.

        Each is a collective, so all that were not added up yet are, in the order of parameters: the same on
        every rank, whatever its step asks for and however often.
        """
        if not self._is_summed(whole, grad):
            for p, local in self._known.items():
                own = None if local is p else p.grad
                if own is not None and _is_apart(p, own) and not self._is_summed(p, own):
                    self._sums[p] = _Sum(weakref.ref(own), _versions(own), _placed_as(p, own))
        return self._sums[whole].part

    def _is_summed(self, p: Tensor, grad: Tensor) -> bool:
        return p in self._sums and self._sums[p].is_of(grad)

    def of_all(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """`of` each, without a look at placements where gradients are placed as they were before."""
        shards = self._lists.get(id(params))
        if shards is None or shards.params is not params:
            if len(self._lists) > _LISTS:
                del self._lists[next(iter(self._lists))]  # the oldest
            shards = self._lists[id(params)] = _ShardList(params, [self.wholes[p] for p in params], [])
        with torch._C.DisableTorchFunctionSubclass():  # the getter else asks every DTensor's class for one
            grads: list[Any] = [p.grad for p in shards.wholes]
        try:
            found = [grad._local_tensor for grad in grads]
            specs = [(p._spec, grad._spec) for p, grad in zip(shards.wholes, grads)]
        except AttributeError:  # none, or of a parameter that is not sharded
            found, specs = [getattr(grad, "_local_tensor", grad) for grad in grads], []
        if specs and specs == shards.specs and set(map(type, found)) <= {Tensor}:
            return found
        parts = [self.of(p) for p in params]
        shards.specs = specs if all(map(is_, parts, found)) else []
        return parts

    def watched(self, params: Sequence[Tensor]) -> Gradients:
        """`of_all` of `params` at every step."""
        wholes = [self.wholes[p] for p in params]
        found = gradients_of_shards(self, wholes, params)
        self._watch(found, wholes)
        return found

    def _watch(self, found: Gradients | None, wholes: Sequence[Tensor]) -> None:
        """Note what may drop the gradients of `wholes` in one call; the others are dropped one by one."""
        self._watched = found if isinstance(found, ShardGradients) else None
        others = self._known.keys() - (() if self._watched is None else wholes)
        self._unwatched = [p for p in self._known if p in others]

    def clear(self) -> None:
        """Drop the gradients of all parameters."""
        self._sums.clear()
        with torch._C.DisableTorchFunctionSubclass():
            if self._watched is not None:
                self._watched.drop()
            for p in self._unwatched:
                p.grad = None

    def set_of(self, p: Tensor) -> int:
        """The number of the set of process groups over which the parameter is split."""
        return self.groups.index(shard_groups(self.wholes[p]))

    def combined(self, found: Sequence[SetSums], inv_scale: float) -> HostStats:
        """The answer over all ranks, by one collective for each set of process groups that split tensors."""
        if not any(self.groups):
            return cpus_.combined([(squares, peak) for _, squares, peak in found], inv_scale)
        sets = [[two for n, *two in found if n == number] for number in range(len(self.groups))]
        return cpus_.combined([_over(*one) for one in zip(self.groups, sets)], inv_scale)


def _is_apart(p: Any, grad: Any) -> bool:
    """Whether a DTensor's gradient is placed otherwise than it."""
    return getattr(grad, "placements", None) != p.placements and hasattr(grad, "redistribute")


def _placed_as(p: Any, grad: Any) -> Tensor:
    """This rank's part of a gradient that is placed as its parameter first; a collective."""
    return local_of(grad.redistribute(p.device_mesh, p.placements))


def _versions(grad: Tensor) -> tuple[int, int] | None:
    """How often a gradient and its local tensor were changed; None where nobody counts."""
    local = local_of(grad)
    return None if grad.is_inference() or local.is_inference() else (grad._version, local._version)


def _over(groups: tuple[Any, ...], own: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The sum of squares and the largest magnitude of this rank's sums and peaks and those of other ranks."""
    squares, peaks = sum(a for a, _ in own), [b for _, b in own]
    peak = math.nan if any(map(math.isnan, peaks)) else max(peaks, default=0.0)
    if not groups:
        return squares, peak
    wide = torch.tensor([squares, peak], dtype=torch.float64)
    total, largest = sums_over(groups, wide[0], wide[1])
    return float(total), float(largest)
