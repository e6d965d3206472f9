"""What a newly registered device gets from the floors above: kernels, `torch.<name>.amp`, collectives.

`devices.register` declares the device and calls `install` here. Only what the vendor's own module lacks is
added to it; nothing of the vendor's is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

import torch
from torch.utils import backend_registration

from halfstep import devices
from halfstep.casting import regions
from halfstep.casting.context import autocast
from halfstep.casting.functions import custom_bwd, custom_fwd
from halfstep.errors import ConfigError
from halfstep.policy.levels import LOW_DTYPES
from halfstep.policy.policy import Policy, dict_to_text, names_dtype
from halfstep.scaling.grad_scaler import GradScaler
from halfstep.torch_private import dispatch_key, has_fallback

_kept: list[torch.library.Library] = []
_policies: dict[str, Any] = {}
"""The op table of `torch.<name>.amp.autocast`, by device, as `Policy.parse` takes it."""


def install(row: devices.Accelerator) -> None:
    """Make scalers, regions and process groups work on a device that was just registered."""
    policy = row.policy
    if isinstance(policy, Mapping):
        policy = dict_to_text(cast("Mapping[str, Any]", policy)) or None
    if policy is not None:
        Policy.parse(policy)
    module = _device_module(row.name)
    if not hasattr(module, "amp"):
        module.amp = _amp_module(row.name)
    if not hasattr(torch.Tensor, row.name):
        backend_registration.generate_methods_for_privateuse1_backend()
    _let_other_ops_through()
    if row.collective is not None:
        _install_collective(row.name, row.collective)
    _policies[row.name] = policy
    # What regions cached may rest on what was declared before, or on there being no such device.
    regions.forget()


def _let_other_ops_through() -> None:
    """Torch has no Autocast fallback for PrivateUse1; without one, ops that no rule names would fail."""
    key = dispatch_key("AutocastPrivateUse1")
    if not has_fallback(key):
        library = torch.library.Library("_", "IMPL")
        library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        _kept.append(library)


def _device_module(name: str) -> Any:
    """`torch.<name>`: the vendor's, or the least that torch asks of one."""
    if not hasattr(torch, name):
        module = cast("Any", ModuleType(f"torch.{name}", f"Device module of {name}."))
        module.is_available = lambda: True
        module.is_initialized = lambda: True
        module.device_count = lambda: 1
        module.current_device = lambda: 0
        module._is_in_bad_fork = lambda: False
        module.manual_seed_all = _seed_nothing
        torch._register_device_module(name, module)
    module = getattr(torch, name)
    for public, default in _defaults(name).items():
        if not hasattr(module, public):
            setattr(module, public, default)
    if not hasattr(module, "device"):
        _let_files_be_read(name)
    return module


def _defaults(name: str) -> dict[str, Any]:
    """What scripts ask of a device module, by what the device's guard can do."""

    def index_of(device: Any) -> int | None:
        if isinstance(device, int):
            return device
        target = torch.device(device)
        if target.type != name:
            raise ConfigError(f"torch.{name} was given {target}: give a device of {name}, or its number")
        return target.index

    def synchronize(device: Any = None) -> None:
        with contextlib.suppress(RuntimeError):  # said by a backend without streams: nothing is under way
            torch.accelerator.synchronize(None if device is None else index_of(device))

    def set_device(device: Any) -> None:
        index = index_of(device)
        if index is not None:
            torch.accelerator.set_device_index(index)

    def get_amp_supported_dtype() -> list[torch.dtype]:
        return list(devices.declared(name).dtypes)

    return {
        "set_device": set_device,
        "synchronize": synchronize,
        "get_amp_supported_dtype": get_amp_supported_dtype,
    }


@functools.cache
def _let_files_be_read(name: str) -> None:
    """`torch.load` onto a device whose module has no `device`, which torch's own way of copying needs."""
    pattern = re.compile(rf"{name}(:\d+)?")

    def read(saved: Any, location: str) -> Any:
        if pattern.fullmatch(location) is None:
            return None
        host = torch.empty(0, dtype=torch.uint8).set_(saved)
        return host.to(location).untyped_storage()

    torch.serialization.register_package(_BEFORE_TORCHS_OWN, lambda _: None, read)


_BEFORE_TORCHS_OWN = 19


def _seed_nothing(seed: int) -> None:
    """A device without generators of its own."""


def _amp_module(name: str) -> ModuleType:
    """`torch.<name>.amp` as users of such ports know it."""
    path = f"torch.{name}.amp"

    class DeviceAutocast(autocast):
        """`halfstep.autocast` on this device under the vendor's table; the first argument is `enabled`."""

        def __init__(
            self,
            enabled: bool = True,
            dtype: str | torch.dtype | None = None,
            cache_enabled: bool = True,
            policy: str | Policy | None = None,
        ) -> None:
            if not isinstance(enabled, bool):
                raise ConfigError(f"{path}.autocast takes enabled first, was given {enabled!r}; name dtype=")
            row = devices.declared(name)
            chosen = _policies[name] if policy is None else policy
            if dtype is None and enabled and not names_dtype(chosen):
                fast = (low for low in row.dtypes if low in LOW_DTYPES and low not in row.slow)
                dtype = next(fast, None) or devices.default_dtype(name)
            super().__init__(name, dtype, enabled, chosen)

    class DeviceGradScaler(GradScaler):
        """`halfstep.GradScaler` on this device, without the device argument."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(name, *args, **kwargs)

    module = cast("Any", ModuleType(path, f"Mixed precision on {name}."))
    for public, cls in (("autocast", DeviceAutocast), ("GradScaler", DeviceGradScaler)):
        cls.__name__ = cls.__qualname__ = public
        cls.__module__ = path
        setattr(module, public, cls)
    module.custom_fwd = functools.partial(custom_fwd, device_type=name)
    module.custom_bwd = functools.partial(custom_bwd, device_type=name)
    sys.modules[path] = module
    return module


def _install_collective(name: str, collective: Any) -> None:
    """Tell torch.distributed which backend serves the device; `init_process_group()` then finds it."""
    import torch.distributed as dist

    if not dist.is_available():
        raise ConfigError(f"register({name!r}, collective=...) needs a torch built with distributed")
    if isinstance(collective, str):
        if collective not in dist.Backend.backend_list:
            backends = ", ".join(dist.Backend.backend_list)
            raise ConfigError(
                f"collective={collective!r} is no backend of torch.distributed; expected one of {backends}"
            )
        dist.Backend.default_device_backend_map[name] = collective
        return
    backend = f"{name}ccl"
    if backend not in dist.Backend.backend_list:
        dist.Backend.register_backend(backend, collective, devices=[name])


devices.on_register(install)
