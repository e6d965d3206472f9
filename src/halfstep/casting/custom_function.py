"""`custom_fwd` and `custom_bwd`: regions for a `torch.autograd.Function`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from halfstep.casting import regions
from halfstep.casting.context import autocast
from halfstep.errors import ConfigError
from halfstep.formats import parse_dtype
from halfstep.torch_private import pytree
from halfstep.trees import first_device


def _here(device_type: str) -> Callable[[], Any]:
    """What enters again the region, ours or torch's, that is in force now."""
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
    wanted = None if cast_inputs is None else parse_dtype(cast_inputs)

    @functools.wraps(fwd)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        kind = device_type or first_device((args, kwargs))
        if wanted is None or not torch.is_autocast_enabled(kind):
            ctx.halfstep_region = _here(kind)
            return fwd(ctx, *args, **kwargs)
        ctx.halfstep_region = functools.partial(autocast, kind, enabled=False)

        def change(value: Any) -> Any:
            fits = isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == kind
            return value.to(wanted) if fits and value.dtype is not torch.float64 else value

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
            raise ConfigError("custom_bwd needs custom_fwd on the forward of the same Function")
        with region():
            return bwd(ctx, *grads)

    return wrapper
