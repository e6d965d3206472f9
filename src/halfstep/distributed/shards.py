"""Sharding a model in the order that works: all fp32 normalisations in one group, blocks, then the root.

A group of `fully_shard` gathers tensors of one dtype, and at O2 normalisations stay fp32 among 16-bit
weights. Also here: which wrappers a model is in, and where in the whole tensor a shard begins.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from halfstep.distributed.hooks import OrderedReduceScatter
from halfstep.distributed.reduce import local_of, world_size
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.names import is_normalisation
from halfstep.torch_private import ddp_ignored, is_strided_shard, place_of_shard

_ORDERED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module] | None = None,
    mesh: Any = None,
    *,
    ordered: bool = False,
    plan: Any = None,
    **options: Any,
) -> nn.Module:
    """Apply torch's `fully_shard` to a model so that every level can be prepared; returns the model.

    Call it before the optimizer is built and before `hs.prepare`. All normalisations form one group of their
    own, kept gathered between forward and backward (they are small, and at O2 their weights are fp32 among
    16-bit ones); what else `plan` keeps in fp32 is a group for each module; then each of `blocks` is a group,
    then what is left.

    Args:
        model: plain parameters, or DTensors of tensor parallelism.
        blocks: modules gathered one at a time, in the order of forward; None takes the children of every
            `nn.ModuleList` and `nn.Sequential` at the top.
        mesh: a device mesh of one dimension (shards) or two (replicas of shards); None is all ranks.
        ordered: add gradients in the order of ranks. A backend adds those of four ranks or more in an order
            of its own (of two it does not matter); with this weights are those of one process that adds
            up the same micro-batches one after the other, bit for bit. Where a torch optimizer's gradients
            are clipped, each is then gathered on every rank, for the norm as one process takes it.
        plan: the `Plan` that `prepare` will get. Modules that it stores in a dtype of their own, norms of an
            own class for instance, need a group of their own too.
        options: for `fully_shard` (`reshard_after_forward`, `mp_policy`, `offload_policy`, ...). The
            `param_dtype` of an `mp_policy` is not for normalisations, which are gathered as they are.

    Raises:
        ConfigError: a block that is not the model's, or a model that is sharded already.
        UnsupportedError: `ordered` with replicas of shards, whose sums are added up once more.
    """
    from torch.distributed import fsdp

    fully_shard: Any = fsdp.fully_shard
    modules = set(model.modules())
    if any(isinstance(module, fsdp.FSDPModule) for module in modules):
        raise ConfigError(f"{type(model).__name__} is sharded already: call hs.distributed.shard once")
    chosen = _default_blocks(model) if blocks is None else list(blocks)
    for block in chosen:
        if block not in modules:
            raise ConfigError(f"block {type(block).__name__} is not a module of {type(model).__name__}")
    if ordered and mesh is not None and mesh.ndim > 1:
        raise UnsupportedError(
            f"ordered=True over a mesh of {mesh.ndim} dimensions: replicas of shards add their sums once "
            "more, which no single process does; leave it out, or give a mesh of one dimension"
        )
    fsdp_options = options if mesh is None else {**options, "mesh": mesh}
    norms = [m for m in model.modules() if is_normalisation(m) and any(True for _ in m.parameters())]
    if norms and model not in norms:
        # Gathered throughout, and in the dtype that they have.
        norm_options = {"reshard_after_forward": False}
        if (policy := options.get("mp_policy")) is not None:
            norm_options["mp_policy"] = replace(policy, param_dtype=None)
        fully_shard(norms, **{**fsdp_options, **norm_options})
    for module in _modules_kept_by(plan, model):
        if module not in norms and module not in chosen and module is not model:
            fully_shard(module, **fsdp_options)
    for block in chosen:
        if block not in norms and block is not model and _has_more(block, norms):
            fully_shard(block, **fsdp_options)
    fully_shard(model, **fsdp_options)
    if ordered:
        _ORDERED.add(model)
    for module in model.modules() if ordered else ():
        if isinstance(module, fsdp.FSDPModule):
            module.set_custom_reduce_scatter(cast(Any, OrderedReduceScatter()))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _modules_kept_by(plan: Any, model: nn.Module) -> list[nn.Module]:
    """The modules whose weights a plan may keep out of the level's dtype, the outermost of each rule."""
    if plan is None:
        return []
    resolved, modules = plan.resolve(model), dict(model.named_modules())
    rules = {p: r for p, r in resolved.items() if p in modules and (r.dtype is not None or r.output is None)}
    outermost = [p for p, rule in rules.items() if p and rules.get(p.rpartition(".")[0]) is not rule]
    return [modules[path] for path in outermost if any(True for _ in modules[path].parameters())]


def _has_more(block: nn.Module, norms: Sequence[nn.Module]) -> bool:
    """Whether something besides normalisations in the block has parameters of its own."""
    return any(m not in norms and any(True for _ in m.parameters(recurse=False)) for m in block.modules())


def _default_blocks(model: nn.Module) -> list[nn.Module]:
    lists = [m for m in (model, *model.children()) if isinstance(m, nn.ModuleList | nn.Sequential)]
    return [child for each in lists for child in each.children() if child not in lists]


def is_ordered(model: nn.Module) -> bool:
    """Whether `shard(..., ordered=True)` was applied to the model or a part of it."""
    return any(module in _ORDERED for module in model.modules()) if _ORDERED else False


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or a part of it."""
    return any(type(module).__name__.startswith("FSDP") for module in model.modules())


def ddp_around(parameters: Iterable[Tensor]) -> list[Any]:
    """Return every DistributedDataParallel that reduces the gradient of one of these parameters.

    A parameter does not know what wraps it, so all living objects are asked for their class (20 ms or more).
    """
    if not torch.distributed.is_available():
        return []
    mine = {id(p) for p in parameters}
    wrappers = _living(nn.parallel.DistributedDataParallel)
    return [ddp for ddp in wrappers if any(id(p) in mine for p in ddp.module.parameters())]


def _living(kind: Any) -> list[Any]:
    return [referrer for referrer in gc.get_referrers(kind) if type(referrer) is kind]


class RankLocal(NamedTuple):
    """A parameter that is not the same on all ranks, although it is no DTensor, which would say so."""

    parameter: Tensor
    why: str
    """What makes it so, as a sentence about the parameter."""
    group: Any
    """The ranks that have other parts or parameters, where these are all that they have; else None."""


def find_rank_local(parameters: Iterable[Tensor], optimizer: Any = None) -> RankLocal | None:
    """Return one of an optimizer's parameters whose gradient each rank has another part of, or None.

    Their norm, and whether they are finite, is of this rank alone. All living objects are asked for their
    class (20 ms or more), and nothing where there is one rank.
    """
    mine = {id(p): p for p in parameters}
    if world_size() == 1 or not mine:
        return None
    fsdp = cast(Any, sys.modules.get("torch.distributed.fsdp"))
    for wrap in _living(fsdp.FullyShardedDataParallel) if fsdp is not None else ():
        cut = wrap.sharding_strategy.name != "NO_SHARD"
        params = (mine[id(p)] for p in wrap.parameters() if id(p) in mine)
        if cut and world_size(wrap.process_group) > 1 and (p := next(params, None)) is not None:
            return RankLocal(p, "is cut up by torch's FullyShardedDataParallel", wrap.process_group)
    zero = cast(Any, sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer"))
    for wrapper in _living(zero.ZeroRedundancyOptimizer) if zero is not None else ():
        params = (p for group in wrapper.param_groups for p in group["params"] if id(p) in mine)
        if wrapper is not optimizer and wrapper.world_size > 1 and (p := next(params, None)) is not None:
            return RankLocal(p, "is updated on one rank alone, by torch's ZeroRedundancyOptimizer", None)
    for ddp in ddp_around(mine.values()):
        ignored = {id(p) for p in ddp_ignored(ddp) if p.requires_grad} & mine.keys()
        if ignored and len(ignored) < len(mine) and world_size(ddp.process_group) > 1:
            return RankLocal(mine[ignored.pop()], "is each rank's own, ignored by its DDP", None)
    return None


def first_element(t: Tensor) -> int | None:
    """Return where in the flat whole tensor this rank's shard begins; None where it is not one run of it.

    0 for ordinary, replicated and empty tensors. A shard of dimension 0 is one run of the whole; others are
    not (unless dimensions before the split one have one element).
    """
    placements = getattr(t, "placements", None)
    if placements is None or local_of(t).numel() in (0, t.numel()):
        return 0
    shape, offsets = place_of_shard(t.shape, cast(Any, t).device_mesh, placements)
    lead = next((i for i, (n, whole) in enumerate(zip(shape, t.shape)) if n != whole), 0)
    if any(n != whole for n, whole in zip(shape[lead + 1 :], t.shape[lead + 1 :])):
        return None
    if any(whole != 1 for whole in t.shape[:lead]):
        return None
    if any(is_strided_shard(p) for p in placements):
        return None
    return offsets[lead] * int(torch.Size(t.shape[lead + 1 :]).numel())
