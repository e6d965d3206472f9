"""Functions of the user's own under a policy: `op`, `custom_fwd` and `custom_bwd`; `frozen_weights`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch

from halfstep.casting import regions, state
from halfstep.casting.casts import _F32, _F64, Args, Kwargs, refusal, widest
from halfstep.casting.context import autocast
from halfstep.casting.kernel_runners import CASTABLE
from halfstep.errors import ConfigError
from halfstep.formats import parse_dtype
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
    """Return the arguments of an own Python function, trees included, cast as its rule says.

    Raises:
        BannedOpError: the rule is BANNED.
    """
    if row.rule is Rule.BANNED:
        raise refusal(row.name, row.reason, compute)
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    dtypes = [t.dtype for t in leaves if t.dtype in CASTABLE or t.dtype is _F64]
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
    wide_out = row.rule is Rule.FP32_OUT and target is compute

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in CASTABLE:
            return value
        return value.to(compute).to(_F32) if wide_out else value.to(target)

    return pytree.tree_map(change, (tuple(args), dict(kwargs)))


def _here(device_type: str) -> Callable[[], Any]:
    """Return what enters again the region, ours or torch's, that is in force now."""
    setting = regions.in_force(device_type)
    if setting is not None:
        return functools.partial(autocast, device_type, policy=setting.policy, kernels=setting.kernels)
    on, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return functools.partial(torch.autocast, device_type, dtype if on else None, on)


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: str | torch.dtype | None = None,
) -> Callable[..., Any]:
    """Decorate `forward` of a `torch.autograd.Function`; its `backward` takes `custom_bwd`.

    Without `cast_inputs`, forward runs in the region it is called in and backward in the same. With it,
    inside a region the floating inputs are cast to that dtype, and both run with autocast off.

    Args:
        fwd: the static method; None when called with keywords only.
        device_type: whose region counts; None takes the device of the first floating input.
        cast_inputs: a dtype; fp64 inputs keep theirs.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    input_dtype = None if cast_inputs is None else parse_dtype(cast_inputs)

    @functools.wraps(fwd)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        kind = device_type or first_device((args, kwargs))
        if input_dtype is None or not torch.is_autocast_enabled(kind):
            ctx.halfstep_region = _here(kind)
            return fwd(ctx, *args, **kwargs)
        ctx.halfstep_region = functools.partial(autocast, kind, enabled=False)

        def change(value: Any) -> Any:
            fits = isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == kind
            return value.to(input_dtype) if fits and value.dtype is not torch.float64 else value

        args, kwargs = pytree.tree_map(change, (args, kwargs))
        with ctx.halfstep_region():
            return fwd(ctx, *args, **kwargs)

    return wrapper


def custom_bwd(
    bwd: Callable[..., Any] | None = None, *, device_type: str | None = None
) -> Callable[..., Any]:
    """Decorate `backward` of a Function whose forward has `custom_fwd`: it runs in forward's region.

    `device_type` is accepted for likeness with torch.amp; forward decides.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        region = getattr(ctx, "halfstep_region", None)
        if region is None:
            raise ConfigError(
                "custom_bwd needs custom_fwd on the forward of the same Function, which takes ctx: torch "
                "calls one beside a setup_context without it"
            )
        with region():
            return bwd(ctx, *grads)

    return wrapper


@contextmanager
def frozen_weights(module: torch.nn.Module) -> Generator[None]:
    """A scope in which autocast casts each fp32 weight of `module` once instead of at every use.

    For recurrent cells and shared weights. The promise is the caller's: no weight changes inside, for a
    change would not be seen. Every use sends its gradient to the fp32 weight, where they are summed in fp32.
    The copies (2 bytes an element) live until the scope ends and in graphs made inside; the scope holds for
    this thread, and does nothing in compiled code, which casts once anyway.
    """
    if torch.compiler.is_compiling():
        yield
        return
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"frozen_weights takes a torch.nn.Module, got {type(module).__name__}")
    frozen = state.thread().frozen
    weights = [p for p in module.parameters() if p.dtype is torch.float32 and id(p) not in frozen]
    frozen.update((id(p), (p, {})) for p in weights)
    try:
        yield
    finally:
        for p in weights:
            del frozen[id(p)]
