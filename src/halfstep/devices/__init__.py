"""What a device can do with each dtype, how fast, and why not; and how a vendor's device is registered."""

from halfstep.devices.capabilities import (
    SLOW_RATIO,
    Accelerator,
    Capability,
    Status,
    available,
    cache_file,
    capability,
    check_dtype,
    declare,
    declared,
    default_dtype,
    is_slow,
    machine,
    resolve,
)
from halfstep.devices.memory import keep_freed_memory
from halfstep.devices.register import on_register, register
from halfstep.devices.transfer import AsyncCopy, capturing, refuse_capture, refuse_reading, send_to_host

__all__ = [
    "SLOW_RATIO",
    "Accelerator",
    "AsyncCopy",
    "Capability",
    "Status",
    "available",
    "cache_file",
    "capability",
    "capturing",
    "check_dtype",
    "declare",
    "declared",
    "default_dtype",
    "is_slow",
    "keep_freed_memory",
    "machine",
    "on_register",
    "refuse_capture",
    "refuse_reading",
    "register",
    "resolve",
    "send_to_host",
]


def __dir__() -> list[str]:
    return __all__
