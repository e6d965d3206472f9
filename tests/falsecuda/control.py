"""How a test speaks to the false CUDA device: speeds of arrival, what was waited for, what is alive.

Nothing here imports torch. Every function raises where the device is not installed in this process.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

ARRIVALS = ("at once", "late", "when waited for")
_LOGS = ("syncs", "event waits", "ops", "faults")
_library: ctypes.CDLL | None = None


class Memory(NamedTuple):
    """Bytes or blocks of one memory: now, at most, and all that were ever allocated and freed."""

    current: int
    peak: int
    allocated: int
    freed: int


def installed() -> bool:
    """Whether this process has the device."""
    return _library is not None


def load(path: str) -> None:
    """Load the device's library; before torch is imported, which keeps what it finds then."""
    global _library
    _library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    _library.falsecuda_log.restype = ctypes.c_size_t
    _library.falsecuda_arrival.argtypes = (ctypes.c_int, ctypes.c_long)
    _library.falsecuda_stream.argtypes = (ctypes.c_long,)
    _library.falsecuda_stream.restype = ctypes.c_long


def library() -> ctypes.CDLL:
    """The device's library."""
    assert _library is not None, "the false CUDA device is not installed in this process"
    return _library


# ---- speeds of arrival ----------------------------------------------------------------------------------


def set_arrival(speed: str, lag: int = 16) -> None:
    """Say when copies arrive and events are done: "at once", "late" or "when waited for".

    "late" is `lag` ops after they were handed to the device, or when waited for.
    """
    library().falsecuda_arrival(ARRIVALS.index(speed), lag)
    _chosen[:] = [speed, lag]


_chosen: list[str | int] = ["when waited for", 16]


@contextmanager
def arrival(speed: str, lag: int = 16) -> Iterator[None]:
    """Set the speed of arrival inside; see `set_arrival`."""
    before = list(_chosen)
    set_arrival(speed, lag)
    try:
        yield
    finally:
        set_arrival(str(before[0]), int(before[1]))


def finish() -> bool:
    """Let all work arrive, as nobody's wait; whether no pinned memory was written while it was read."""
    return bool(library().falsecuda_drain())


@contextmanager
def uncounted() -> Iterator[None]:
    """Copies of this thread inside arrive at once and nothing is counted: for a test that looks in."""
    library().falsecuda_uncounted(1)
    try:
        yield
    finally:
        library().falsecuda_uncounted(-1)


@contextmanager
def capturing() -> Iterator[None]:
    """Inside torch says that a CUDA graph is captured, and waiting is an error; but the work is done."""
    library().falsecuda_capturing(1)
    try:
        yield
    finally:
        library().falsecuda_capturing(0)


# ---- what happened --------------------------------------------------------------------------------------


def take(log: str) -> list[str]:
    """The names in a log since it was last taken.

    "syncs": waits that torch's sync debug mode may see, by op. "event waits": waits for an event, with how
    much work was handed in since it was recorded. "ops": what `recorded_ops` asked for. "faults": pinned
    memory that was written while a copy from it was under way.
    """
    size = 1 << 16
    while True:
        room = ctypes.create_string_buffer(size)
        needed = library().falsecuda_log(_LOGS.index(log), room, size)
        if needed < size:
            return room.value.decode().splitlines()
        size = needed + 1


class Waits:
    """The waits of a region: `names`, once it is over."""

    names: list[str]


@contextmanager
def counted_waits(events: bool = False) -> Iterator[Waits]:
    """Count the host's waits for the device inside, those for events too where `events`."""
    waits = Waits()
    take("syncs"), take("event waits")
    yield waits
    waits.names = take("syncs") + (take("event waits") if events else [])


class Ops:
    """The ops of a region: `names`, in their order, once it is over."""

    names: list[str]


@contextmanager
def recorded_ops() -> Iterator[Ops]:
    """Record the names of ops, copies and Triton kernels that are handed to the device inside."""
    ops = Ops()
    take("ops")
    library().falsecuda_log_ops(1)
    try:
        yield ops
    finally:
        library().falsecuda_log_ops(0)
        ops.names = take("ops")


def submit(name: str) -> None:
    """Hand one more op to the device: for work that does not come through torch."""
    library().falsecuda_submit(name.encode())


# ---- what is alive --------------------------------------------------------------------------------------


def memory(pinned: bool = False) -> tuple[Memory, Memory]:
    """Bytes and blocks of the device, or of pinned memory; a block is the storage of a tensor."""
    numbers = (ctypes.c_long * 8)()
    library().falsecuda_memory(int(pinned), numbers)
    return Memory(*numbers[:4]), Memory(*numbers[4:])


def blocks_alive(pinned: bool = False) -> int:
    """How many storages are alive on the device, or in pinned memory."""
    return memory(pinned)[1].current
