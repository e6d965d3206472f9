"""The casts of a region as ops of an exported program.

`torch.export` records ops before they reach the dispatcher's Autocast key, where a region works, so that a
program would be recorded without casts. Within a region each op is here given the casts of its rule first;
they and the op below them are what is recorded, and the program needs no region to run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from halfstep.casting import casts, regions
from halfstep.casting.casts import OpOnDevice, Runner
from halfstep.casting.kernel_runners import tensors_of
from halfstep.policy.policy import Policy
from halfstep.torch_private import OpOverload, dispatch_key, schema_of

_MODE = "torch.fx.experimental.proxy_tensor"


class _Here(threading.local):
    def __init__(self) -> None:
        self.casts = False


_here = _Here()
_taught: list[type] = []


def record_casts() -> None:
    """Have the export that is under way record what regions cast."""
    mode: Any = sys.modules[_MODE].ProxyTorchDispatchMode
    if mode in _taught:
        return
    _taught.append(mode)
    record = mode.__torch_dispatch__

    def __torch_dispatch__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        run = None if _here.casts or not self.pre_dispatch else _runner_for(func, args, keywords)
        if run is None:
            return record(self, func, types, args, kwargs)
        _here.casts = True
        try:
            with self:  # on whose stack the casts are recorded too
                return run(None, args, keywords)
        finally:
            _here.casts = False

    mode.__torch_dispatch__ = __torch_dispatch__


def _runner_for(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Runner | None:
    """Return what the region does with an op; None where it leaves the op alone, or there is none of ours."""
    for device_type in dict.fromkeys(t.device.type for t in tensors_of((*args, *kwargs.values()))):
        setting = regions.in_force(device_type)
        if setting is not None:
            return _runner(func, device_type, setting.policy)
    return None


@cache
def _runner(op: OpOverload, device_type: str, policy: Policy) -> Runner | None:
    name = schema_of(op).name.removeprefix("aten::")
    if schema_of(op).is_mutable and not name.endswith("_"):
        return None
    site = OpOnDevice(op, device_type, dispatch_key(regions.key_name(device_type)), None, None)
    return casts.runner(site, policy.rows(device_type).get(name), policy.compute_dtype, False)
