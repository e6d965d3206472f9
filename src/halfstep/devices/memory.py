"""What the process does with freed memory, on request."""

from __future__ import annotations

import ctypes
import platform
import sys

from halfstep.errors import warn

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def keep_freed_memory() -> bool:
    """Make the C allocator keep large freed blocks for the next tensor instead of returning them.

    Without it, every tensor of 32 MiB or more is mapped afresh and its pages are cleared again, which can
    cost more than the cast that asked for it. The process keeps its peak memory until it ends. Returns
    whether it took effect; where it cannot (no glibc), one warning says why.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        warn(
            f"keep_freed_memory needs Linux with glibc, this is {sys.platform} "
            f"{platform.libc_ver()[0]}; large tensors are mapped afresh each time"
        )
        return False
    mallopt = ctypes.CDLL(None).mallopt
    largest = 2**31 - 1
    # Older glibc refuses thresholds above 32 MiB; no mmap at all does the same.
    mapped = mallopt(_M_MMAP_THRESHOLD, largest) or mallopt(_M_MMAP_MAX, 0)
    return bool(mapped and mallopt(_M_TRIM_THRESHOLD, largest))
