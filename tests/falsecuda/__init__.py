"""A device that torch calls `cuda`, made of CPU memory, as strict as a GPU where it can be; see README.md."""

from tests.falsecuda.control import (
    ARRIVALS,
    arrival,
    blocks_alive,
    capturing,
    counted_waits,
    finish,
    installed,
    memory,
    recorded_ops,
    set_arrival,
    take,
    uncounted,
)

__all__ = [
    "ARRIVALS",
    "arrival",
    "blocks_alive",
    "capturing",
    "counted_waits",
    "finish",
    "installed",
    "memory",
    "recorded_ops",
    "set_arrival",
    "take",
    "uncounted",
]
