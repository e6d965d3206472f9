"""What is remembered of regions, per thread, and torch's own switch. See `regions.py`."""

from __future__ import annotations

import bisect
import contextvars
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch

from halfstep.casting import casts
from halfstep.casting.casts import Runner
from halfstep.casting.kernel_choice import KernelTable
from halfstep.policy.policy import Policy
from halfstep.torch_private import OpOverload, graph_task, has_thread_state, sequence_number, thread_state

Code = tuple[torch.dtype, torch.dtype]
# What a region changes in torch: device, on, its dtype, the code of its policy (None: leave the code alone).
Switch = tuple[str, bool, torch.dtype, Code | None]
# Torch's autocast state of one device type and of the two that carry codes: on, dtype; the weight cache.
Standing = tuple[bool, torch.dtype, bool, bool, torch.dtype, bool, torch.dtype]
_HISTORY = 16384
_clock = itertools.count(1).__next__


@dataclass(frozen=True, eq=False)
class Setting:
    """A policy made ready for one device type: what runs for each op, and how torch's own switch stands.

    `runs` (by the overload's full name) lacks the ops that torch's kernels already treat as the policy says.
    """

    policy: Policy
    switch: Switch
    runs: Mapping[str, Runner] = field(repr=False)
    ops: tuple[OpOverload, ...] = field(repr=False)
    low: frozenset[str] = field(repr=False)
    kernels: KernelTable | None = None
    device_type: str = field(init=False)
    dtype: torch.dtype = field(init=False)
    code: Code = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_type", self.switch[0])
        object.__setattr__(self, "dtype", self.switch[2])
        object.__setattr__(self, "code", self.switch[3] or (self.dtype, self.dtype))


class _SettingLog:
    """Which setting was in force at each autograd sequence number of one thread and device type."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, Setting | None]] = []
        self.latest = 0

    def record(self, setting: Setting | None) -> None:
        number, self.latest = sequence_number(), _clock()
        if self.entries and self.entries[-1][0] == number:
            self.entries[-1] = number, setting
            return
        self.entries.append((number, setting))
        if len(self.entries) > _HISTORY:
            del self.entries[: _HISTORY // 2]

    def at(self, number: int) -> Setting | None:
        place = bisect.bisect_right(self.entries, number, key=itemgetter(0)) - 1
        return self.entries[place][1] if place >= 0 else None


class Entered(NamedTuple):
    """A region that a thread is in, and what it found: leaving sets that again, however often it is done."""

    owner: object
    setting: Setting
    active: Setting | None
    place: tuple[int, int] | None
    depth: int
    torchs: Standing


class Thread:
    """The regions of one thread. Autograd's threads see the one of the thread that called backward."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.active: dict[str, Setting] = {}
        self.entered: tuple[Entered, ...] = ()
        # Torch's nesting depth and the running graph task when the region began.
        self.place: dict[str, tuple[int, int] | None] = {}
        self.histories: dict[str, _SettingLog] = {}
        self.frozen: casts.Frozen = {}
        # One more than torch's nesting depth when the innermost region began: deeper ones are not of here.
        self.depth = 1
        self.shown = False
        self.caller: Thread | None = None

    def show(self) -> None:
        """Put it where torch hands it on to the threads that run a backward started here.

        That is the context of variables, which torch copies for each backward. (An object of ours in torch's
        own thread-local store would be destroyed by a thread that ends while the interpreter does: SIGABRT.)
        """
        if graph_task() == -1:
            _shown.set(self)
            if not self.shown:
                self.shown = True
                _recent.append(self)


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = Thread()
        _threads.add(self.thread)


_threads: weakref.WeakSet[Thread] = weakref.WeakSet()
# A graph may outlive the thread that made it.
_recent: deque[Thread] = deque(maxlen=64)
_local = _Local()
_shown: contextvars.ContextVar[Thread] = contextvars.ContextVar("halfstep.casting.regions")


def thread() -> Thread:
    """The regions of the calling thread."""
    return _local.thread


def caller() -> Thread:
    """The regions of the thread that called the backward that runs, on this thread or on another."""
    here = _local.thread
    if here.shown:
        return here
    if has_thread_state("context"):
        # A backward inside that of a Python Function has a context of autograd's thread, which lacks it.
        here.caller = thread_state("context").get(_shown, here.caller)
    return here.caller or here


def nesting() -> int:
    """Torch's nesting depth, which it tells only as it changes it."""
    try:
        return torch.autocast_increment_nesting() - 1
    finally:
        torch.autocast_decrement_nesting()


def standing(device_type: str) -> Standing:
    """How torch's autocast state stands, as `stand` sets it again. Dynamo traces it, as all that follow."""
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        torch.is_autocast_enabled("maia"),
        torch.get_autocast_dtype("maia"),
        torch.is_autocast_enabled("ipu"),
        torch.get_autocast_dtype("ipu"),
    )


def stand(device_type: str, before: Standing) -> None:
    """Set torch's autocast state to what `standing` gave."""
    torch.set_autocast_enabled(device_type, before[0])
    torch.set_autocast_dtype(device_type, before[1])
    torch.set_autocast_cache_enabled(before[2])
    torch.set_autocast_enabled("maia", before[3])
    torch.set_autocast_dtype("maia", before[4])
    torch.set_autocast_enabled("ipu", before[5])
    torch.set_autocast_dtype("ipu", before[6])


def turn(switch: Switch) -> None:
    """Set torch's autocast state to a region's.

    The weight cache is off: a weight changed in place is seen by the next op (law 7, ARCHITECTURE.md).
    """
    device_type, on, dtype, code = switch
    torch.set_autocast_enabled(device_type, on)
    if on:
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(False)
    if code is not None:
        torch.set_autocast_enabled("maia", True)
        torch.set_autocast_dtype("maia", code[0])
        torch.set_autocast_enabled("ipu", True)
        torch.set_autocast_dtype("ipu", code[1])
