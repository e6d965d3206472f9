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
# Torch's autocast state: by device type on and dtype, and whether weights are kept; None leaves as it is.
Switch = tuple[tuple[tuple[str, bool, torch.dtype | None], ...], bool | None]
# Torch keeps autocast state for these, Dynamo guards it, and no build of torch since 2.0 has kernels for
# them: their dtypes carry the code of a policy.
CARRIERS = ("maia", "ipu")
_HISTORY = 16384
_clock = itertools.count(1).__next__


@dataclass(frozen=True, eq=False)
class Setting:
    """A policy made ready for one device type: what runs for each op, and how torch's own switch stands.

    `runs` (by the overload's full name) lacks the ops that torch's kernels already treat as the policy says.
    `code` stands for the policy in compiled code; without one autocast is off.
    """

    policy: Policy
    device_type: str
    code: Code | None = None
    runs: Mapping[str, Runner] = field(default_factory=dict[str, Runner], repr=False)
    ops: tuple[OpOverload, ...] = field(default=(), repr=False)
    low: frozenset[str] = field(default=frozenset(), repr=False)
    kernels: KernelTable | None = None
    dtype: torch.dtype = field(init=False)
    switch: Switch = field(init=False)

    def __post_init__(self) -> None:
        """No weights are kept: one changed in place is seen by the next op (law 7, ARCHITECTURE.md)."""
        dtype = self.policy.compute_dtype
        switch: Switch = ((self.device_type, False, None),), None
        if self.code is not None:
            carrier_states = [(kind, True, low) for kind, low in zip(CARRIERS, self.code)]
            switch = ((self.device_type, True, dtype), *carrier_states), False
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "switch", switch)


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


class ActiveRegion(NamedTuple):
    """A region that a thread is in, and what it found: leaving sets that again, however often it is done."""

    owner: object
    setting: Setting
    active: Setting | None
    depth: int
    # Torch's nesting depth and the running graph task.
    began: tuple[int, int]
    torchs: Switch


class Thread:
    """The regions of one thread. Autograd's threads see the one of the thread that called backward."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.active: dict[str, Setting] = {}
        self.entered: tuple[ActiveRegion, ...] = ()
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
    """Return the regions of the calling thread."""
    return _local.thread


def caller() -> Thread:
    """Return the regions of the thread that called the backward that runs, on this thread or on another."""
    this_thread = _local.thread
    if this_thread.shown:
        return this_thread
    if has_thread_state("context"):
        # A backward inside that of a Python Function has a context of autograd's thread, which lacks it.
        this_thread.caller = thread_state("context").get(_shown, this_thread.caller)
    return this_thread.caller or this_thread


def nesting() -> int:
    """Torch's nesting depth, which it tells only as it changes it."""
    try:
        return torch.autocast_increment_nesting() - 1
    finally:
        torch.autocast_decrement_nesting()


def standing(switch: Switch) -> Switch:
    """Return torch's setting where `turn(switch)` would change it. Dynamo traces both."""
    is_on, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    kinds = [(kind, is_on(kind), dtype_of(kind)) for kind, _, _ in switch[0]]
    return tuple(kinds), torch.is_autocast_cache_enabled()


def turn(switch: Switch) -> None:
    """Set torch's autocast state to a region's, or back to what `standing` gave."""
    kinds, cache = switch
    set_on, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    for kind, on, dtype in kinds:
        set_on(kind, on)
        if dtype is not None:
            set_dtype(kind, dtype)
    if cache is not None:
        torch.set_autocast_cache_enabled(cache)
