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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.distributed import first_element, local_of, shard_groups
from halfstep.errors import CheckpointError, UnsupportedError
from halfstep.gradients import cpu as cpus_
from halfstep.gradients.stats import GradStats, HostStats, measure_shards
from halfstep.kernels import codes as L
from halfstep.optim import backends, checkpoints, counts, storage
from halfstep.optim.backends import Scalar
from halfstep.optim.checkpoints import EXPONENTS
from halfstep.optim.rounding import WEYL, WORD
from halfstep.optim.shard_facts import Locals
from halfstep.optim.shard_source import ShardSource
from halfstep.optim.state import State

if TYPE_CHECKING:
    from halfstep.optim.base import OnePassOptimizer


def any_shard(params: list[Tensor]) -> bool:
    """Whether one of the parameters is a DTensor."""
    return any(local_of(p) is not p for p in params)


@dataclass
class _Shown:
    """What `optimizer.state` was made of last, and how often it and the twin's had been changed by then."""

    state: Any
    entries: dict[Tensor, dict[str, Any]]
    count: int
    twin_count: int


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
        self._known: dict[Tensor, Tensor] = {}
        self._members: list[list[Tensor]] = []
        self._options: list[Mapping[str, Any]] = []
        self._shown = _Shown(None, {}, 0, 0)
        self.source = ShardSource(self._known)
        self._know()
        self.twin = self._make_twin()

    def _know(self) -> None:
        """Have a tensor of this rank for each parameter of the groups, and none for those that left."""
        groups = self._outer.param_groups
        known = {p: self._known[p] if p in self._known else _stand_in(p) for g in groups for p in g["params"]}
        self._known.clear()
        self._known.update(known)
        self._members = [list(group["params"]) for group in groups]
        self._pairs = [(p, local) for p, local in known.items() if local is not p]
        self._look()
        self.source.settle()

    def _local_groups(self) -> list[dict[str, Any]]:
        """The groups of the twin, whose lists of parameters change here alone."""
        return [
            {**group, "params": tuple(self._known[p] for p in group["params"])}
            for group in self._outer.param_groups
        ]

    def _make_twin(self) -> OnePassOptimizer:
        from halfstep.optim.base import OnePassOptimizer

        outer, groups = self._outer, self._local_groups()
        twin = type(outer).__new__(type(outer))
        OnePassOptimizer.__init__(twin, groups, dict(outer.defaults), seed=outer.seed, backend=outer.backend)
        twin.param_groups = groups
        twin.key_shifts = _key_shifts(self._pairs)
        twin.source = self.source
        twin._edits.wholes = self.source.wholes
        return twin

    def regroup(self) -> None:
        """Follow parameter groups that were added, removed, or have other members now."""
        for group in self._outer.param_groups:
            _check_blocks(group)
        before = dict(self._known)
        self._know()
        for p in before.keys() - self._known.keys():
            self.twin.state.pop(before[p], None)
        self.twin.param_groups = self._local_groups()
        self.twin.key_shifts = _key_shifts(self._pairs)
        self._shown.state = None  # those that came may have had a state before

    # ---- before and after a step --------------------------------------------------------------------

    def enter(self) -> OnePassOptimizer:
        """The twin with this moment's groups, options, local tensors and states."""
        outer, twin = self._outer, self.twin
        if not _same_members(outer.param_groups, self._members):
            self.regroup()
        if not _same_options(outer.param_groups, self._options):
            self._take_options()
        if not self._locals.hold():
            self._move()
        state = outer.state
        if state is not self._shown.state or state.changes.count != self._shown.count:
            self._take_state()
            self.show()
        return twin

    def _take_options(self) -> None:
        groups, formats = self._outer.param_groups, ("state_dtype", "master")
        for group, local in zip(groups, self.twin.param_groups):
            other_formats = any(group[name] != local[name] for name in formats)
            if other_formats:
                _check_blocks(group)
            local.update({k: v for k, v in group.items() if k != "params"})
            if other_formats:
                self._settle_empty(local["params"])
        self._options = [dict(group) for group in groups]

    def _settle_empty(self, params: Sequence[Tensor]) -> None:
        """Have states of shards without elements, which no step looks at, in the formats of the others."""
        for p in params:
            if p.numel() == 0 and self.twin.state.get(p):
                self.twin._slots.pop(p, None)
                self.twin._slot(p, *self.twin._find(p))

    def leave(self, found_inf: bool | Tensor | None) -> None:
        """After a step: count it where there was nothing to update, and show states that are others now."""
        self._count(found_inf)
        self._show_changes()

    def _take_state(self) -> None:
        """Make the twin's state what `optimizer.state` says, where that was changed from outside."""
        for p, local in self._known.items():
            entry, shown = self._outer.state.get(p), self._shown.entries.get(p, {})
            if entry is None:
                self.twin.state.pop(local, None)
                continue
            own = self.twin.state[local]
            kept = {k for k, v in entry.items() if k in own and shown.get(k) is v}
            now = {k: own[k] if k in kept else _cut(k, v, p) for k, v in entry.items()}
            if len(kept) != len(own) or now.keys() != own.keys():
                own.clear()
                own.update(now)

    def show(self) -> None:
        """Make `optimizer.state` what the twin's is now, as DTensors, in the order of the parameters."""
        state, twin = self._outer.state, self.twin.state
        others = {key: entry for key, entry in state.items() if key not in self._known}
        if not isinstance(state, State):
            state = self._outer.state = State()
        state.clear()
        for p, local in self._known.items():
            if local in twin:
                state[p].update({k: _as_shard(k, v, local, p) for k, v in twin[local].items()})
        state.update(others)
        entries = {p: dict(state[p]) for p in self._known if p in state}
        self._shown = _Shown(state, entries, state.changes.count, twin.changes.count)

    def _show_changes(self) -> None:
        if self.twin.state.changes.count != self._shown.twin_count:
            self.show()

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

    def _count(self, found_inf: bool | Tensor | None) -> None:
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

    # ---- what an optimizer is asked -----------------------------------------------------------------

    def measure(self, inv_scale: Scalar) -> GradStats:
        """`OnePassOptimizer.measure` over all shards; every rank must call it."""
        return measure_shards([p.grad for p in self._known], inv_scale, self.source.groups)

    def measure_on_host(self, inv_scale: Scalar) -> HostStats | None:
        """The same as Python numbers, by the CPU kernels; None where they do not run."""
        twin = self.enter()
        known = twin.measure_by_plan(inv_scale)
        if known is not None:
            return known
        sets: dict[int, list[Tensor]] = {}
        for local in self._known.values():
            grad = self.source.of(local)
            if grad is not None and grad.numel():
                sets.setdefault(self.source.set_of(local), []).append(grad)
        grads = [g for own in sets.values() for g in own]
        if any(not g.is_cpu or g.dtype not in cpus_.GRADS for g in grads) or not twin.on_kernels():
            return None
        found = [(number, *cpus_.wide_sums(own)) for number, own in sets.items()]
        return self.source.combined(found, backends.number(inv_scale))

    def seed_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """`OnePassOptimizer.seed_masters` of whole or sharded fp32 values."""
        twin = self.enter()
        twin.seed_masters({self._known[p]: local_of(v) for p, v in values.items() if p in self._known})
        self._show_changes()

    def masters(self) -> dict[Tensor, Tensor]:
        """The exact fp32 value of every parameter, as DTensors."""
        self.enter()
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
        packed = self.enter().state_dict()
        self._show_changes()
        numbered = list(self._known.items())
        packed["state"] = {n: _as_shards(packed["state"][n], *numbered[n]) for n in sorted(packed["state"])}
        return packed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of DTensors or of whole tensors; every rank must call it with the same."""
        numbers = [key for group in state["param_groups"] for key in group["params"]]
        twin = self.enter()
        try:
            entries = {
                key: {k: _cut(k, v, p) for k, v in state["state"][key].items()}
                for key, p in zip(numbers, self._known)
                if key in state["state"]
            }
            twin.load_state_dict({**state, "state": entries})
        finally:
            _agree_on_counts(self.source.groups, self._pairs, twin.state)
        for group, local in zip(self._outer.param_groups, twin.param_groups):
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


def _stand_in(p: Tensor) -> Tensor:
    """The tensor that stands for `p` on this rank; the parameter itself where it is not a DTensor."""
    local = local_of(p)
    return p if local is p else nn.Parameter(local.detach(), requires_grad=p.requires_grad)


def _same_members(groups: Sequence[Mapping[str, Any]], seen: Sequence[Sequence[Tensor]]) -> bool:
    """Whether groups have the parameters that were seen in them."""
    return len(groups) == len(seen) and all(
        len(group["params"]) == len(known) and all(map(is_, group["params"], known))
        for group, known in zip(groups, seen)
    )


def _same_options(groups: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups hold the very objects that were seen in them."""
    return len(groups) == len(seen) and all(
        group.keys() == known.keys() and all(map(is_, group.values(), known.values()))
        for group, known in zip(groups, seen)
    )


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


def _as_shards(entry: dict[str, Any], p: Tensor, local: Tensor) -> dict[str, Any]:
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
