"""Torch's private names that halfstep uses, each with what it is for and what is lost without it.

A torch that lacks one gets another way, or an UnsupportedError that names it. No other module of the package
may gain a private name of torch; `tests/test_torch_private.py` names those that a new torch lacks.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import UnsupportedError


def _lacking(name: str, use: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch {torch.__version__} has no {name}, which halfstep needs {use}: use a torch that "
        "halfstep was tested with (its README names them), or a newer halfstep"
    )


def _of(owner: Any, name: str, use: str) -> Any:
    """The attribute of an object of torch's; UnsupportedError where there is none."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _lacking(f"{type(owner).__name__}.{name}", use) from error


# --- fully_shard -------------------------------------------------------------------------------------------

_SHARDS = "to prepare a model that fully_shard has cut up"


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that `fully_shard` made for this module; [] where it was not applied.

    FSDPModule tells its groups nowhere in public. Without them no 16-bit weights under `fully_shard`.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return []
    state = _of(module, "_get_fsdp_state", _SHARDS)()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = _of(state, "_fsdp_param_group", _SHARDS)  # torch 2.11 makes one group for a call
    return [] if group is None else [group]


def fsdp_shards(group: Any) -> list[Tensor]:
    """Return the shards of a group; while it is gathered, modules hold whole tensors instead."""
    return [_of(own, "sharded_param", _SHARDS) for own in _of(group, "fsdp_params", _SHARDS)]


def fsdp_has_read_dtypes(group: Any) -> bool:
    """Return whether a group has seen its first forward, after which it takes no other dtypes."""
    return any(hasattr(own, "orig_dtype") for own in _of(group, "fsdp_params", _SHARDS))


def fsdp_read_again(group: Any) -> None:
    """Make a group take the data that its parameters have now; it keeps references of its own to them."""
    for own in _of(group, "fsdp_params", _SHARDS):
        _of(own, "reset_sharded_param", _SHARDS)()


def fsdp_policy_holders(group: Any) -> list[Any]:
    """Return what has a `mp_policy` that the first forward reads: the group, each of its parameters, or both.

    A MixedPrecisionPolicy can be given to `fully_shard` and not changed later. Without it the levels cannot
    choose in which dtype fp32 shards are gathered.
    """
    holders = [h for h in (group, *_of(group, "fsdp_params", _SHARDS)) if hasattr(h, "mp_policy")]
    if not holders:
        raise _lacking(f"{type(group).__name__}.mp_policy", _SHARDS)
    return holders


# --- torch.compile -----------------------------------------------------------------------------------------


def dynamo_traces_autocast() -> bool:
    """Return whether Dynamo traces the functions that switch autocast; torch 2.11 does not.

    Where it does not, code that it compiles breaks at each region, and runs the region as it is.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rule = getattr(rules, "manual_torch_name_rule_map", {}).get("torch._C.set_autocast_enabled")
    return rule is None or rule.__name__ != "SkipFunctionVariable"
