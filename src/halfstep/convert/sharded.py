"""Converting a model that `fully_shard` has cut up: which modules and groups there are, and what they refuse.

fully_shard keeps references of its own to each shard, so a shard whose dtype changes is announced to it; it
reads dtypes once, before the first forward, so that is how long a conversion may come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.distributed import ddp_around, local_of
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.formats import dtype_name


def replace_shard(tensor: Tensor, data: Tensor) -> None:
    """Give a DTensor parameter other data under the same identity (`.data` alone keeps the old shard)."""
    given: Any = data
    local, spec = given._local_tensor, given._spec
    tensor.data = data
    cast(Any, tensor)._local_tensor, cast(Any, tensor)._spec = local, spec


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return local_of(tensor) is not tensor


def groups_of(model: nn.Module) -> Iterator[Any]:
    """The parameter groups of `fully_shard` in a model."""
    for module in model.modules():
        state: Any = cast(Any, module)._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        if state is not None:
            yield from getattr(state, "_fsdp_param_groups", None) or ()


def shards_of(model: nn.Module) -> list[Tensor]:
    """The shards that `fully_shard` keeps; while a group is gathered, modules hold whole tensors instead."""
    return [own.sharded_param for group in groups_of(model) for own in group.fsdp_params]


def announce(model: nn.Module) -> None:
    """Tell `fully_shard` that shards of the model have changed their dtype."""
    with torch.no_grad():
        for group in groups_of(model):
            for own in group.fsdp_params:
                own.reset_sharded_param()


def has_run(model: nn.Module) -> bool:
    """Whether `fully_shard` has read the dtypes already, at the first forward."""
    return any(hasattr(own, "orig_dtype") for group in groups_of(model) for own in group.fsdp_params)


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
    model: nn.Module, wanted: Mapping[int, tuple[Tensor, torch.dtype]], low: torch.dtype
) -> None:
    """Raise ConfigError where a group would hold two dtypes, or its policy contradicts the level."""
    for group in groups_of(model):
        dtypes = _dtypes(group, wanted)
        if len(dtypes) > 1:
            names = " and ".join(sorted(dtype_name(d) for d in dtypes))
            raise ConfigError(
                f"a group of fully_shard would hold {names} weights here (normalisations stay fp32), and "
                "a group gathers one dtype: shard with hs.distributed.shard(model, blocks), which gives "
                "normalisations a group of their own"
            )
        asked = group.mp_policy.param_dtype
        if asked is not None and asked not in dtypes:
            raise ConfigError(
                f"fully_shard's MixedPrecisionPolicy(param_dtype={dtype_name(asked)}) contradicts the level, "
                f"which computes in {dtype_name(low)}: drop param_dtype, or give it that dtype"
            )


def _dtypes(group: Any, wanted: Mapping[int, tuple[Tensor, torch.dtype]]) -> set[torch.dtype]:
    shards = [own.sharded_param for own in group.fsdp_params if own.sharded_param.requires_grad]
    return {wanted[id(p)][1] if id(p) in wanted else p.dtype for p in shards}


def gather_in(model: nn.Module, wanted: Mapping[int, tuple[Tensor, torch.dtype]]) -> list[tuple[Any, Any]]:
    """Make `fully_shard` gather fp32 shards in the wanted dtypes; returns (group, its policy before)."""
    before: list[tuple[Any, Any]] = []
    for group in groups_of(model):
        (dtype,) = _dtypes(group, wanted) or {torch.float32}
        if dtype != torch.float32 and group.mp_policy.param_dtype is None:
            before.append((group, group.mp_policy))
            group.mp_policy = replace(group.mp_policy, param_dtype=dtype)
    return before
