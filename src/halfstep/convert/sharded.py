"""Converting a model that `fully_shard` has cut up: which modules and groups there are, and what they refuse.

fully_shard keeps references of its own to each shard, so a shard whose dtype changes is announced to it; it
reads dtypes once, before the first forward, so that is how long a conversion may come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import torch_private
from halfstep.distributed import ddp_around, local_of
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.formats import dtype_name


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return local_of(tensor) is not tensor


def groups_of(model: nn.Module) -> Iterator[Any]:
    """Yield the parameter groups of `fully_shard` in a model."""
    for module in model.modules():
        yield from torch_private.fsdp_groups(module)


def shards_of(model: nn.Module) -> list[Tensor]:
    """The shards that `fully_shard` keeps; while a group is gathered, modules hold whole tensors instead."""
    return [shard for group in groups_of(model) for shard in torch_private.fsdp_shards(group)]


def announce(model: nn.Module) -> None:
    """Tell `fully_shard` that shards of the model have changed their dtype."""
    with torch.no_grad():
        for group in groups_of(model):
            torch_private.fsdp_read_again(group)


def has_run(model: nn.Module) -> bool:
    """Whether `fully_shard` has read the dtypes already, at the first forward."""
    return any(map(torch_private.fsdp_has_read_dtypes, groups_of(model)))


def check_before(model: nn.Module) -> None:
    """Raise where 16-bit weights can no longer be had: in DDP already, or after a sharded forward."""
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and ddp_around(model.parameters())
    ):
        raise ConfigError(
            f"{type(model).__name__} is in a DistributedDataParallel already, whose buffers have the old "
            "dtypes: prepare (or convert) the model first, then wrap it"
        )
    if has_run(model):
        raise UnsupportedError(
            f"{type(model).__name__} has run a forward since fully_shard, which fixes dtypes then: "
            "prepare (or convert) between fully_shard and the first forward"
        )


def check_groups(
    model: nn.Module, targets: Mapping[int, tuple[Tensor, torch.dtype]], low: torch.dtype, keep_shards: bool
) -> None:
    """Raise ConfigError where a group would hold two dtypes, or its policy contradicts the level.

    A policy that gathers in the level's own dtype fits, whatever the weights: it rounds them on the way.
    """
    for group in groups_of(model):
        dtypes, holders = _dtypes(group, targets), torch_private.fsdp_policy_holders(group)
        policy_dtypes = {holder.mp_policy.param_dtype for holder in holders} - {None}
        if len(dtypes) > 1 and not (keep_shards and policy_dtypes == {low}):
            names = " and ".join(sorted(dtype_name(d) for d in dtypes))
            raise ConfigError(
                f"a group of fully_shard would hold {names} weights here (normalisations stay fp32, and so "
                "does what a plan says), and a group gathers one dtype: shard with "
                "hs.distributed.shard(model, blocks, plan=plan), which gives them groups of their own"
            )
        for other in policy_dtypes - {*dtypes, low}:
            raise ConfigError(
                f"fully_shard's MixedPrecisionPolicy(param_dtype={dtype_name(other)}) contradicts the level, "
                f"which computes in {dtype_name(low)}: drop param_dtype, or give it that dtype"
            )


def _dtypes(group: Any, targets: Mapping[int, tuple[Tensor, torch.dtype]]) -> set[torch.dtype]:
    shards = [shard for shard in torch_private.fsdp_shards(group) if shard.requires_grad]
    return {targets[id(p)][1] if id(p) in targets else p.dtype for p in shards}


def gather_in(model: nn.Module, targets: Mapping[int, tuple[Tensor, torch.dtype]]) -> list[tuple[Any, Any]]:
    """Make `fully_shard` gather fp32 shards in the wanted dtypes; returns (holder, policy before)."""
    before: list[tuple[Any, Any]] = []
    for group in groups_of(model):
        dtype = next(iter(_dtypes(group, targets)), torch.float32)
        for holder in torch_private.fsdp_policy_holders(group) if dtype != torch.float32 else ():
            policy = holder.mp_policy
            if policy.param_dtype is None:
                before.append((holder, policy))
                # Reduced as they were computed: torch 2.15 else widens gradients before it adds them up.
                reduce = policy.reduce_dtype or dtype
                holder.mp_policy = replace(
                    policy, param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False
                )
    return before
