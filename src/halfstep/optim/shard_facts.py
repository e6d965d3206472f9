"""What DTensors hold, looked at in one compiled pass: local tensors, specs, and those of their gradients.

A gradient is another DTensor at every step; asked for in Python, one object after the other, gradients of
many small shards take longer than their arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.optim.source import ListedGradients, Source
from halfstep.optim.tensor_facts import CompiledLikeness, addresses_of, compiled_facts


class Locals:
    """The local tensors of DTensors, as they were when this was made."""

    def __init__(self, shards: Sequence[Any]) -> None:
        self._shards, self.seen = list(shards), [p._local_tensor for p in shards]
        self.hold: Callable[[], bool] = self._first_look
        """Whether every DTensor has the local tensor that it had."""

    def _first_look(self) -> bool:
        self.hold = self._compiled() or self._listed
        return self.hold()

    def _listed(self) -> bool:
        return all(map(is_, [p._local_tensor for p in self._shards], self.seen))

    def _compiled(self) -> Callable[[], bool] | None:
        """The same without Python; None where compiled code cannot see it."""
        kernels, layout = compiled_facts(), _layout(self._shards)
        if kernels is None or layout is None or not all(map(_is_shard, self._shards)):
            return None
        self._arrays = addresses_of(self._shards), addresses_of(self.seen)
        shard, local = (one.ctypes.data for one in self._arrays)
        return partial(kernels.holders(), int(layout[kernels.LOCAL_OF]), len(self.seen), shard, local)


class ShardGradients:
    """`Gradients` of DTensors: their local tensors, found without Python where the specs are as they were."""

    def __init__(self, wholes: Sequence[Any], listed: ListedGradients, likeness: CompiledLikeness) -> None:
        kernels, count = compiled_facts(), len(wholes)
        self._listed, self._likeness, self.addresses = listed, likeness, likeness.addresses
        self._wholes = list(wholes)
        self._specs = [spec for p in wholes for spec in _specs_of(p)]
        wanted = addresses_of(self._specs) * [spec is not None for spec in self._specs]
        found, rows = np.zeros(count, np.int64), np.zeros((count, kernels.ROW), np.int64)
        self._arrays = _layout(self._wholes), addresses_of(self._wholes), wanted, found, rows
        layout, owners, specs, self._places, rows = (one.ctypes.data for one in self._arrays)
        self._given = likeness.asked, layout, count, owners, specs, self._places, rows
        self._find = kernels.shard_gradients()
        self.drop: Callable[[], None] = partial(kernels.dropper(), layout, count, owners, rows)
        """Drop them, where functions of classes are off; in Python, 400 small ones take 0.05 ms longer."""

    def alike(self) -> bool:
        """See `Gradients`."""
        if self._find(*self._given):
            return self._likeness.alike_at(self._places)
        return self._listed.alike()


def gradients_of_shards(
    source: Source, wholes: Sequence[Any], params: Sequence[Tensor]
) -> ListedGradients | ShardGradients:
    """The gradients of `wholes`, some of them DTensors, as `source` gives them to the local `params`."""
    listed = ListedGradients(source, params)
    likeness = listed.likeness
    if not isinstance(likeness, CompiledLikeness) or _layout(wholes) is None:
        return listed
    return ShardGradients(wholes, listed, likeness) if all(map(_is_direct, wholes)) else listed


def _is_shard(p: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(p, DTensor)


def _specs_of(p: Any) -> tuple[Any, Any]:
    """How p and its gradient are placed; None where p is no DTensor."""
    return (p._spec, p.grad._spec) if _is_shard(p) else (None, None)


def _is_direct(p: Any) -> bool:
    """Whether p's gradient stands for the local tensor that it holds; that of a plain tensor for itself."""
    from torch.distributed.tensor import DTensor

    if type(p).grad is not Tensor.grad:
        return False
    if not isinstance(p, DTensor):
        return type(p) in (Tensor, torch.nn.Parameter)
    grad: Any = p.grad
    return type(grad) is DTensor and type(grad._local_tensor) is Tensor and grad.placements == p.placements


def _layout(tensors: Sequence[Any]) -> Any:
    """At which bytes DTensors hold what, and functions to call; None where it cannot be seen."""
    from torch.distributed.tensor import DTensor

    from halfstep.kernels.cpu import torch_functions

    shards = [p for p in tensors if isinstance(p, DTensor)][:3]
    functions, inside = torch_functions.objects(), torch_functions.inside()
    if functions is None or inside is None or not shards:
        return None
    places = [
        torch_functions.place_in(shards, [id(one) for one in held], DTensor.__basicsize__)
        for held in ([p._spec for p in shards], [p._local_tensor for p in shards], [type(p) for p in shards])
    ]
    if any(place is None for place in places):
        return None
    return np.array(
        [*places, inside, id(DTensor), id(Tensor), *functions, id(Tensor.grad), id(None)], np.int64
    )
