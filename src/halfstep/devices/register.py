"""Registers a device of a vendor's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import backend_registration

from halfstep.devices.capabilities import Accelerator, computes_in, keep
from halfstep.errors import ConfigError

_followers: list[Callable[[Accelerator], None]] = []


def on_register(follower: Callable[[Accelerator], None]) -> None:
    """Have `follower` called for every device registered from now on; upper floors install their parts so."""
    _followers.append(follower)


def register(
    name: str,
    *,
    dtypes: Sequence[str | torch.dtype] = ("bf16", "fp16"),
    slow: Sequence[str | torch.dtype] = (),
    finite_check: Callable[..., None] | None = None,
    update_scale: Callable[..., None] | None = None,
    collective: str | Callable[..., Any] | None = None,
    policy: Any = None,
) -> Accelerator:
    """Bring up a new accelerator: everything in halfstep works on it from here on.

    Renames torch's PrivateUse1 device to `name` unless the vendor's plugin did, adds to `torch.<name>` what
    is missing of `get_amp_supported_dtype` and `amp` (`torch.<name>.amp.autocast(enabled, dtype)`,
    `torch.<name>.amp.GradScaler(enabled=...)`), and declares what the device computes in. The kernels of the
    device itself are the vendor's, registered with torch as usual. Registering again replaces what was said.

    Args:
        name: device type as in `torch.device(name)`.
        dtypes: floating dtypes with kernels; fp32 needs no mention. The first 16-bit one that is not slow
            is what `torch.<name>.amp.autocast()` computes in.
        slow: those among them without fast kernels: LOW ops round and compute in fp32 instead.
        finite_check: `f(grads, found_inf, inv_scale)`: multiplies gradients in place, sets the 0-d fp32
            `found_inf` to 1 where one was not finite (torch's `_amp_foreach_non_finite_check_and_unscale_`).
        update_scale: `f(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)`,
            in place (torch's `_amp_update_scale_`).
        collective: the device's torch.distributed backend: the name of one that torch knows, or a function
            `f(store, rank, size, timeout)` that makes a process group.
        policy: the op table of `torch.<name>.amp.autocast`, where the vendor's differs from ours: a table's
            name ("mlu"), a text such as "table=mlu,full=exp", a Policy, or a dict: {"table": "mlu",
            "full": ["exp"]}, or op by op {"exp": "full", "matmul": "low"}. `hs.autocast` keeps the table
            that it has on every device.

    Raises:
        ConfigError: a name that cannot be used, unknown dtypes, a kernel that is no function, no policy, or
            another device already took PrivateUse1.
    """
    private_type = torch.device("privateuseone").type
    if not re.fullmatch("[a-z_]+", str(name)) or name != str(name) or name in _TORCH_DEVICES:
        raise ConfigError(f"{name!r:.60} cannot name a device: expected lower-case letters, new to torch")
    if private_type not in (name, "privateuseone"):
        raise ConfigError(
            f"a process has one PrivateUse1 device, {private_type!r}; register {name!r} elsewhere"
        )
    functions = finite_check, update_scale, None if isinstance(collective, str) else collective
    if strays := [f"{f!r:.60}" for f in functions if not (f is None or callable(f))]:
        raise ConfigError(f"{strays[0]} is no function: finite_check, update_scale and collective must be")
    row = replace(
        computes_in(name, dtypes, slow),
        finite_check=finite_check,
        update_scale=update_scale,
        collective=collective,
        policy=policy,
    )
    if private_type != name:
        backend_registration.rename_privateuse1_backend(name)
    for follower in _followers:
        follower(row)
    keep(row)
    return row


_TORCH_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "maia", "ipu", "xla", "meta", "vulkan", "hip")
