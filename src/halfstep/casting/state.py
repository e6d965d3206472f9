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
from typing import Any

import torch

from halfstep.casting import casts
from halfstep.casting.casts import Runner
from halfstep.casting.kernel_choice import KernelTable
from halfstep.policy.policy import Policy
from halfstep.torch_private import OpOverload, graph_task, has_thread_state, sequence_number, thread_state

Code = tuple[torch.dtype, torch.dtype]
# What a region changes in torch: device, on, its dtype, the code of its policy (None: leave the code alone).
Switch = tuple[str, bool, torch.dtype, Code | None]
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
        self.numbers: list[int] = []
        self.settings: list[Setting | None] = []
        self.latest = 0

    def record(self, setting: Setting | None) -> None:
        number, self.latest = sequence_number(), _clock()
        if self.numbers and self.numbers[-1] == number:
            self.settings[-1] = setting
            return
        self.numbers.append(number)
        self.settings.append(setting)
        if len(self.numbers) > _HISTORY:
            del self.numbers[: _HISTORY // 2], self.settings[: _HISTORY // 2]

    def at(self, number: int) -> Setting | None:
        place = bisect.bisect_right(self.numbers, number) - 1
        return self.settings[place] if place >= 0 else None


class Thread:
    """The regions of one thread. Autograd's threads see the one of the thread that called backward."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.active: dict[str, Setting] = {}
        self.entered: list[Setting] = []
        # Torch's nesting depth and the running graph task when the region began.
        self.entry: dict[str, tuple[int, int] | None] = {}
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


def turn(switch: Switch) -> tuple[Any, ...]:
    """Set torch's autocast state; returns what `turn_back` needs. Dynamo traces both.

    The weight cache is off: a weight changed in place is seen by the next op (law 7, ARCHITECTURE.md).
    """
    device_type, on, dtype, code = switch
    saved = (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        torch.is_autocast_enabled("maia"),
        torch.get_autocast_dtype("maia"),
        torch.is_autocast_enabled("ipu"),
        torch.get_autocast_dtype("ipu"),
    )
    torch.set_autocast_enabled(device_type, on)
    if on:
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(False)
    if code is not None:
        torch.set_autocast_enabled("maia", True)
        torch.set_autocast_dtype("maia", code[0])
        torch.set_autocast_enabled("ipu", True)
        torch.set_autocast_dtype("ipu", code[1])
    return (*saved, torch.autocast_increment_nesting())


def turn_back(device_type: str, saved: tuple[Any, ...]) -> None:
    """Undo `turn`."""
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    torch.set_autocast_enabled(device_type, saved[0])
    torch.set_autocast_dtype(device_type, saved[1])
    torch.set_autocast_cache_enabled(saved[2])
    torch.set_autocast_enabled("maia", saved[3])
    torch.set_autocast_dtype("maia", saved[4])
    torch.set_autocast_enabled("ipu", saved[5])
    torch.set_autocast_dtype("ipu", saved[6])
