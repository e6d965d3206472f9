"""`op`: a function of the user's own as one op of the policy's table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from halfstep.casting import regions
from halfstep.casting.casts import _CASTABLE, _F32, _F64, Args, Kwargs, refusal, widest
from halfstep.casting.context import autocast
from halfstep.errors import ConfigError
from halfstep.policy import op_names
from halfstep.policy.ops import OpRow, Rule
from halfstep.torch_private import constant_when_traced, pytree
from halfstep.trees import first_device

P = ParamSpec("P")
R = TypeVar("R")


def op(fn: Callable[P, R]) -> Callable[P, R]:
    """Register an own Python function as an op, so that `Policy.with_rules` can give it a rule.

    In an active region its floating tensor arguments are cast as its rule says; elsewhere, and without a
    rule, it runs as written. Its name is "module.qualname". ConfigError for anything but a function.
    """
    if not hasattr(fn, "__qualname__"):
        raise ConfigError(f"op decorates functions, not {type(fn).__name__}")
    name = f"{fn.__module__}.{fn.__qualname__}"

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return _call_own(name, fn, args, kwargs)

    op_names.OWN_OPS[name] = wrapper
    setattr(wrapper, op_names.OWN_OP_MARK, name)
    return wrapper


def _call_own(name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function registered by `halfstep.op`: one op, cast by its rule, with no casting inside."""
    kind = first_device((args, kwargs))
    row, compute = _rule(name, kind)
    if row is None:
        return fn(*args, **kwargs)
    args, kwargs = cast_arguments(row, compute, args, kwargs)
    with autocast(kind, enabled=False):
        return fn(*args, **kwargs)


@constant_when_traced
def _rule(name: str, device_type: str) -> tuple[OpRow | None, torch.dtype]:
    setting = regions.in_force(device_type)
    return (None, torch.float32) if setting is None else (setting.policy.rows().get(name), setting.dtype)


def cast_arguments(row: OpRow, compute: torch.dtype, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    """The arguments of an own Python function, trees included, cast as its rule says.

    Raises:
        BannedOpError: the rule is BANNED.
    """
    if row.rule is Rule.BANNED:
        raise refusal(row.name, row.reason, compute)
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    dtypes = [t.dtype for t in leaves if t.dtype in _CASTABLE or t.dtype is _F64]
    if not dtypes:
        return args, kwargs
    if row.rule is Rule.FULL:
        target = _F32
    elif row.rule is Rule.KEEP:
        target = dtypes[0]
    elif row.rule is Rule.WIDEST or _F64 in dtypes:
        target = cast("torch.dtype", widest(dtypes))
    else:
        target = compute

    def change(value: Any) -> Any:
        return value.to(target) if isinstance(value, torch.Tensor) and value.dtype in _CASTABLE else value

    return pytree.tree_map(change, (tuple(args), dict(kwargs)))
