"""Which of several ways is fastest here: short runs in turns, and whether what they took was theirs.

An op on several threads ends with its last one, and the caller waits for that actively, in its own processor
time. Where other programs hold the cores, a kernel of 0.3 ms is then seen to take 4 or 24: what the scheduler
took. Linux counts for how long each thread stood in line for a core; a run in which one did is made again
after a rest, and a race that never had an undisturbed run of each way says so.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

#: A candidate is given up where it takes this many times the best so far.
HOPELESS = 3.0
_ROUNDS = 4
_SHORTEST = 1e-4
_LONGEST_FIRST = 0.01
_LONGEST = 0.008
#: A run is disturbed where its threads stood in line for more than this share of it.
_DISTURBED = 0.1
#: Seconds to rest before a disturbed run is made again: threads that slept get their core at once.
_REST = 0.003
#: Seconds that a race may spend on disturbed runs, and how long one may be to be made again.
_PATIENCE = 0.1
_LONGEST_AGAIN = 0.1

Call = Callable[[], object]
Clock = Callable[[], float]

#: The caller's own processor time does not count while other processes hold the core. Of an op on several
#: threads the caller does its share and then waits actively, so that it stands for the whole.
CLOCK: Clock = time.thread_time


class RaceTimes(NamedTuple):
    """Shortest time of each way that could run, in seconds; `steady` where these are surely the ways' own."""

    times: dict[str, float]
    steady: bool


def stood_in_line() -> float:
    """Seconds for which threads of this process have waited for a core so far; 0.0 where nothing tells."""
    waited = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
                    waited += int(file.read().split()[1])
            except (OSError, IndexError, ValueError):  # the thread has ended
                continue
    except OSError:  # not Linux
        return 0.0
    return waited / 1e9


class _Disturbed(Exception):
    """Other programs hold the cores: no use in going on."""


class _Race:
    """The runs of a race so far."""

    def __init__(self, candidates: Mapping[str, Call], clock: Clock, in_line: Clock | None) -> None:
        self._candidates, self._clock, self._in_line = candidates, clock, in_line
        self.times: dict[str, float] = {}
        self._least: dict[str, float] = {}
        self._undisturbed: set[str] = set()
        self._patience = _PATIENCE

    @property
    def best(self) -> float:
        return min(self.times.values(), default=math.inf)

    def run(self, name: str, repeats: int = 1) -> float:
        """Shortest time so far of one way, after one run more; several where these were disturbed."""
        while True:
            began = time.monotonic()
            long = self._once(name, repeats) * repeats > _LONGEST_AGAIN
            if name in self._undisturbed or long:
                return self.times[name]
            if self._patience <= 0:
                raise _Disturbed
            time.sleep(_REST)
            self._patience -= time.monotonic() - began

    def _once(self, name: str, repeats: int) -> float:
        call = self._candidates[name]
        lost = self._in_line() if self._in_line else 0.0
        start = self._clock()
        for _ in range(repeats):
            call()
        took = max(1e-8, (self._clock() - start) / repeats)
        lost = (self._in_line() - lost if self._in_line else 0.0) / repeats
        if lost <= _DISTURBED * took:
            self._undisturbed.add(name)
        self.times[name] = min(took, self.times.get(name, math.inf))
        self._least[name] = max(took - lost, self._least.get(name, 0.0))
        return took

    def is_steady(self, name: str) -> bool:
        """Whether a way was seen undisturbed, or is hopeless even without what it may have waited."""
        return name in self._undisturbed or self._least[name] > HOPELESS * self.best


def race(candidates: Mapping[str, Call], clock: Clock = CLOCK, in_line: Clock | None = None) -> RaceTimes:
    """The shortest time of each candidate, runs interleaved.

    The likely fast ones come first. One that cannot run has no time. One that is far slower than the best so
    far is run once, or twice where its first run was short enough to have been spent on preparing the kernel.
    `in_line` tells for how long threads have waited for a core (`stood_in_line`); needless on one thread.
    """
    state = _Race(candidates, clock, in_line)
    try:
        _run_all(state, candidates, clock)
    except _Disturbed:
        return RaceTimes(state.times, steady=False)
    return RaceTimes(state.times, all(map(state.is_steady, state.times)))


def _run_all(state: _Race, names: Iterable[str], clock: Clock) -> None:
    for name in names:
        if name == "channels_last" and state.times.get("native", math.inf) > HOPELESS * state.best:
            continue  # the same kernels
        best = state.best
        try:
            first = state.run(name)
        except RuntimeError:  # this torch has no such kernel
            continue
        if first < _LONGEST_FIRST or first <= HOPELESS * best:
            state.run(name)
    found = state.times
    alive = [name for name, t in found.items() if t <= HOPELESS * state.best]
    begun = clock()
    for _ in range(_ROUNDS if len(alive) > 1 or len(found) == 1 else 0):
        if clock() - begun > _LONGEST:
            break
        for name in alive:
            state.run(name, max(1, min(50, int(_SHORTEST / found[name]))))
