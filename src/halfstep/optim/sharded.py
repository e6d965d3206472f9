"""Optimizers over shards: the step runs on each rank's local tensors, what the user sees are DTensors.

An optimizer whose parameters are DTensors (fully_shard, tensor parallel) keeps a twin of its own kind over
the local tensors, which does all arithmetic; no kernel knows of shards. Norm, finite flag and largest
magnitude cross ranks in one collective for each set of groups over which parameters are split. States are
shown and saved as DTensors placed like their parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from halfstep.distributed import first_element, local_of, shard_groups, sums_over
from halfstep.errors import CheckpointError, UnsupportedError
from halfstep.gradients import cpu as cpus_
from halfstep.gradients.stats import GradStats, HostStats, measure_shards
from halfstep.kernels import codes as L
from halfstep.optim import backends, checkpoints, counts, storage
from halfstep.optim.backends import Scalar
from halfstep.optim.checkpoints import EXPONENTS
from halfstep.optim.rounding import WEYL, WORD
from halfstep.optim.shard_facts import Locals, ShardGradients, gradients_of_shards
from halfstep.optim.source import SetSums
from halfstep.optim.tensor_facts import Gradients

if TYPE_CHECKING:
    from halfstep.optim.base import OnePassOptimizer


def any_shard(params: list[Tensor]) -> bool:
    """Whether one of the parameters is a DTensor."""
    return any(local_of(p) is not p for p in params)


@dataclass
class _ShardList:
    """A list of local tensors, the parameters they are shards of, and how their gradients were placed.

    `sums`: parts of gradients that were added up over ranks just now, which nothing else keeps alive.
    """

    params: Sequence[Tensor]
    wholes: list[Any]
    specs: list[Any]
    sums: list[Tensor]


_LISTS = 8


class Shards:
    """The twin of one optimizer over its local tensors, and what ties the two together."""

    def __init__(self, outer: OnePassOptimizer) -> None:
        if outer.release_gradients or outer.accumulate:
            what = "release_gradients" if outer.release_gradients else "accumulate='fp32'"
            raise UnsupportedError(
                f"{what} is for parameters that are not sharded: fully_shard frees whole gradients by itself "
                "and reduces them in MixedPrecisionPolicy(reduce_dtype=torch.float32) where asked"
            )
        for group in outer.param_groups:
            _check_blocks(group)
        self._outer = outer
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._locals = Locals([])
        self._empty: list[tuple[Any, Tensor]] = []
        self._known: dict[Tensor, Tensor] = {}
        self._whole: dict[Tensor, Tensor] = {}
        self._lists: dict[int, _ShardList] = {}
        self._options: list[Mapping[str, Any]] = []
        self.twin = self._make_twin()

    def _make_twin(self) -> OnePassOptimizer:
        from halfstep.optim.base import OnePassOptimizer

        outer = self._outer
        groups = [{**g, "params": [self._local(p) for p in g["params"]]} for g in outer.param_groups]
        twin = type(outer).__new__(type(outer))
        OnePassOptimizer.__init__(twin, groups, dict(outer.defaults), seed=outer.seed, backend=outer.backend)
        self._settle(twin)
        twin.source = self
        twin._edits.wholes = self._whole
        return twin

    def _local(self, p: Tensor) -> Tensor:
        """The tensor that stands for `p` on this rank; the parameter itself where it is not a DTensor."""
        if p in self._known:
            return self._known[p]
        local = local_of(p)
        twin = p if local is p else nn.Parameter(local.detach(), requires_grad=p.requires_grad)
        self._known[p], self._whole[twin] = twin, p
        if twin is not p:
            self._pairs.append((p, twin))
        return twin

    def _settle(self, twin: OnePassOptimizer) -> None:
        """Note which parameters there are and what they hold; the twin's own lists change here alone."""
        self._groups = list(dict.fromkeys(map(shard_groups, self._known)))
        self._look()
        self._watch(None, [])
        twin.key_shifts = _key_shifts(self._pairs)
        for group in twin.param_groups:
            group["params"] = tuple(group["params"])

    def add_group(self) -> None:
        """Take in the parameter group that was added last."""
        group = self._outer.param_groups[-1]
        _check_blocks(group)
        params = [self._local(p) for p in group["params"]]
        self.twin.add_param_group({**group, "params": params})
        self._settle(self.twin)

    # ---- before and after a step --------------------------------------------------------------------

    def enter(self) -> OnePassOptimizer:
        """The twin with this moment's options and local tensors."""
        outer, twin = self._outer, self.twin
        if not _same_options(outer.param_groups, self._options):
            for group, local in zip(outer.param_groups, twin.param_groups):
                if group["state_dtype"] != local["state_dtype"]:
                    _check_blocks(group)
                local.update({k: v for k, v in group.items() if k != "params"})
            self._options = [dict(group) for group in outer.param_groups]
        if not self._locals.hold():
            self._move()
        return twin

    def _move(self) -> None:
        """Follow parameters whose shards are other tensors now."""
        for (p, local), seen in zip(self._pairs, self._locals.seen):
            now = local_of(p)
            if now is not seen:
                local.data = now.detach()
        self._look()

    def _look(self) -> None:
        self._locals = Locals([p for p, _ in self._pairs])
        self._empty = [pair for pair in self._pairs if pair[1].numel() == 0]

    def count(self, found_inf: bool | Tensor | None) -> None:
        """Count the step that was made in shards without elements whose parameter has a gradient."""
        if not self._empty:
            return
        with torch._C.DisableTorchFunctionSubclass():
            had = [local for p, local in self._empty if p.grad is not None]
        if had:
            counts.advance([self._count_of(local) for local in had], found_inf)

    def _count_of(self, local: Tensor) -> Tensor:
        entry = self.twin.state.get(local) or {}
        step = entry.get("step")
        return step if isinstance(step, Tensor) else self.twin._slot(local, *self.twin._find(local)).step

    # ---- gradients, as the twin asks for them (`Source`) -----------------------------------------------

    def of(self, p: Tensor) -> Tensor | None:
        """This rank's part of the gradient of the parameter that `p` is a shard of."""
        whole = self._whole[p]
        grad = whole.grad
        if grad is None or whole is p:
            return grad
        return _local_gradient(whole, grad) if p.numel() else None

    def of_all(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """`of` each, without a look at placements where gradients are placed as they were before."""
        shards = self._lists.get(id(params))
        if shards is None or shards.params is not params:
            if len(self._lists) > _LISTS:
                del self._lists[next(iter(self._lists))]  # the oldest: the newest may have sums in use
            shards = self._lists[id(params)] = _ShardList(params, [self._whole[p] for p in params], [], [])
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
        shards.sums = [part for part, own in zip(parts, found) if part is not None and part is not own]
        return parts

    def watched(self, params: Sequence[Tensor]) -> Gradients:
        """`of_all` of `params` at every step."""
        wholes = [self._whole[p] for p in params]
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
        for shards in self._lists.values():
            shards.sums.clear()
        with torch._C.DisableTorchFunctionSubclass():
            if self._watched is not None:
                self._watched.drop()
            for p in self._unwatched:
                p.grad = None

    def set_of(self, p: Tensor) -> int:
        """The number of the set of process groups over which the parameter is split."""
        return self._groups.index(shard_groups(self._whole[p]))

    def combined(self, found: Sequence[SetSums], inv_scale: float) -> HostStats:
        """The answer over all ranks, by one collective for each set of process groups that split tensors."""
        if not any(self._groups):
            return cpus_.combined([(squares, peak) for _, squares, peak in found], inv_scale)
        sets = [[two for n, *two in found if n == number] for number in range(len(self._groups))]
        return cpus_.combined([_over(*one) for one in zip(self._groups, sets)], inv_scale)

    def show(self) -> None:
        """Make `optimizer.state` what the twin's is now, as DTensors."""
        for p, local in self._known.items():
            entry = self.twin.state.get(local)
            if entry is not None:
                self._outer.state[p] = {k: _as_shard(k, v, local, p) for k, v in entry.items()}

    # ---- what an optimizer is asked -----------------------------------------------------------------

    def measure(self, inv_scale: Scalar) -> GradStats:
        """`OnePassOptimizer.measure` over all shards; every rank must call it."""
        params = [p for group in self._outer.param_groups for p in group["params"]]
        return measure_shards([p.grad for p in params], inv_scale, self._groups)

    def measure_on_host(self, inv_scale: Scalar) -> HostStats | None:
        """The same as Python numbers, by the CPU kernels; None where they do not run."""
        twin = self.enter()
        known = twin.measure_by_plan(inv_scale)
        if known is not None:
            return known
        sets: dict[int, list[Tensor]] = {}
        for p, local in self._known.items():
            grad = self.of(local)
            if grad is not None and grad.numel():
                sets.setdefault(self._groups.index(shard_groups(p)), []).append(grad)
        grads = [g for own in sets.values() for g in own]
        if any(not g.is_cpu or g.dtype not in cpus_.GRADS for g in grads) or not twin.on_kernels():
            return None
        found = [(number, *cpus_.wide_sums(own)) for number, own in sets.items()]
        return self.combined(found, backends.number(inv_scale))

    def seed_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """`OnePassOptimizer.seed_masters` of whole or sharded fp32 values."""
        own = {self._known[p]: local_of(value) for p, value in values.items() if p in self._known}
        self.enter().seed_masters(own)
        self.show()

    def masters(self) -> dict[Tensor, Tensor]:
        """The exact fp32 value of every parameter, as DTensors."""
        return {p: self.master_of(p) for p in self._known}

    def awaits(self, p: Tensor) -> bool:
        """`OnePassOptimizer.awaits`."""
        return self.twin.awaits(self._known[p])

    def master_of(self, p: Tensor) -> Tensor:
        """The exact fp32 value of one parameter."""
        local = self._known[p]
        value = self.enter().master_of(local)
        return value if local is p else _placed(value, p)

    def state_dict(self) -> dict[str, Any]:
        """The twin's state dict with DTensors in it."""
        self.enter()
        self.show()
        packed = self.twin.state_dict()
        by_number = [p for group in self._outer.param_groups for p in group["params"]]
        for number, entry in packed["state"].items():
            p = by_number[number]
            packed["state"][number] = _as_shards(entry, self._known[p], p)
        return packed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of DTensors or of whole tensors; every rank must call it with the same."""
        numbers = [key for group in state["param_groups"] for key in group["params"]]
        params = [p for group in self._outer.param_groups for p in group["params"]]
        try:
            entries = {
                key: {k: _cut(k, v, p) for k, v in state["state"][key].items()}
                for key, p in zip(numbers, params)
                if key in state["state"]
            }
            self.enter().load_state_dict({**state, "state": entries})
        finally:
            _agree_on_counts(self._groups, self._pairs, self.twin.state)
        for group, local in zip(self._outer.param_groups, self.twin.param_groups):
            group.update({k: v for k, v in local.items() if k != "params"})
        self._outer.state.clear()
        self.show()


def _key_shifts(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[Tensor, int]:
    """What is added to the random key of each local tensor: bits count from the whole tensor's start."""
    starts = {twin: first_element(p) for p, twin in pairs}
    return {twin: (start * WEYL) & WORD for twin, start in starts.items() if start}


def _agree_on_counts(
    sets: Sequence[tuple[Any, ...]], pairs: Sequence[tuple[Tensor, Tensor]], state: Mapping[Any, Any]
) -> None:
    """Give shards without elements the count that other ranks loaded; even where a load failed."""
    for groups in sets:
        own = [pair for pair in pairs if shard_groups(pair[0]) == groups]
        steps = [state.get(local, {}).get("step") for _, local in own]
        counts.agree(groups, steps, [local.numel() > 0 for _, local in own])


def _same_options(groups: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups hold the very objects that were seen in them."""
    return len(groups) == len(seen) and all(
        group.keys() == known.keys() and all(map(is_, group.values(), known.values()))
        for group, known in zip(groups, seen)
    )


def _local_gradient(p: Tensor, grad: Tensor) -> Tensor:
    """This rank's part of a gradient; partial sums (tensor parallel) are added up first."""
    shard: Any = grad
    if getattr(shard, "placements", None) != cast(Any, p).placements and hasattr(shard, "redistribute"):
        shard = shard.redistribute(cast(Any, p).device_mesh, cast(Any, p).placements)
    return local_of(shard)


def _over(groups: tuple[Any, ...], own: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The sum of squares and the largest magnitude of this rank's sums and peaks and those of other ranks."""
    squares, peaks = sum(a for a, _ in own), [b for _, b in own]
    peak = math.nan if any(map(math.isnan, peaks)) else max(peaks, default=0.0)
    if not groups:
        return squares, peak
    wide = torch.tensor([squares, peak], dtype=torch.float64)
    total, largest = sums_over(groups, wide[0], wide[1])
    return float(total), float(largest)


def _placed(local: Tensor, p: Tensor) -> Tensor:
    """A local tensor of the shape of p's shard as a DTensor placed like `p`."""
    from torch.distributed.tensor import DTensor

    own: Any = p
    return DTensor.from_local(
        local.view(local_of(p).shape), own.device_mesh, own.placements, run_check=False,
        shape=p.shape, stride=p.stride(),
    )  # fmt: skip


def _placed_rows(local: Tensor, p: Tensor) -> Tensor:
    """The block exponents of the rows of p's shard as a DTensor of those of all rows."""
    from torch.distributed.tensor import DTensor

    own: Any = p
    shape = torch.Size((p.shape[0], local.shape[1]))
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=shape, stride=(local.shape[1], 1)
    )


def _as_shards(entry: dict[str, Any], local: Tensor, p: Tensor) -> dict[str, Any]:
    """A packed entry of a local tensor as a checkpoint of all ranks holds it."""
    if local is p:
        return entry
    kept = {k: _as_shard(k, v, local, p) for k, v in entry.items() if k != "weight"}
    if "lacking" in entry:
        kept["lacking"] = _as_shard("lacking", entry["lacking"].to(checkpoints.WIDE), local, p)
        kept["weight"] = checkpoints.of_shards(entry["weight"])
    return kept


def _as_shard(key: str, value: Any, local: Tensor, p: Tensor) -> Any:
    """A state of a local tensor as the user sees it: a DTensor where it is cut as the parameter is."""
    if local is p or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if key.endswith(EXPONENTS):
        return _placed_rows(value, p)
    return _placed(value, p) if value.shape == local.shape else value


def _check_blocks(group: Mapping[str, Any]) -> None:
    """Raise UnsupportedError where 8-bit blocks of a shard would not be those of the whole tensor."""
    if group["state_dtype"] != "8bit":
        return
    for p in group["params"]:
        local = local_of(p)
        kind = storage.state_kind_of(p, "8bit")
        if local is p or kind == storage.state_kind_of(local, "8bit") != L.STATE_8BIT:
            continue
        placements = p.placements
        by_rows = all(one.is_replicate() or one.is_shard(0) for one in placements)
        if not by_rows or p.dim() < 2 or storage.width_of(local) != math.prod(p.shape[1:]):
            raise UnsupportedError(
                f"state_dtype='8bit' over shards wants tensors cut between rows, so that every block of "
                f"elements with one exponent lies on one rank; one of shape {list(p.shape)} is placed "
                f"{placements}: give it a parameter group with state_dtype='bf16'"
            )


def _cut(key: str, value: Any, p: Tensor) -> Any:
    """This rank's part of a saved state: of a DTensor placed in any way, or of a whole tensor."""
    if key == "weight" and local_of(p) is not p:
        return checkpoints.of_shards(value)
    if not isinstance(value, Tensor) or local_of(p) is p:
        return local_of(value) if isinstance(value, Tensor) else value
    own: Any = p
    if local_of(value) is not value:
        shard: Any = value
        return local_of(shard.redistribute(own.device_mesh, own.placements))
    if value.dim() == 0 or value.shape == local_of(p).shape != p.shape:
        return value
    whole = value.shape[:1] == p.shape[:1] if key.endswith(EXPONENTS) else value.shape == p.shape
    if not whole:
        raise CheckpointError(
            f"a saved state has shape {list(value.shape)}, the sharded parameter {list(p.shape)} (here "
            f"{list(local_of(p).shape)}): save and load with Session.save and Session.load"
        )
    from torch.distributed.tensor import distribute_tensor

    return local_of(distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None))
