"""Which of several ways is fastest here: short runs in turns, and whether other programs were in the way.

An op on several threads ends with its last one, and the caller waits for that actively, in its own processor
time. Where other programs hold the cores, a kernel of 0.3 ms is then seen to take 4 or 24: what the scheduler
took. Linux counts for how long each thread waited for a core.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping

#: A candidate is given up where it takes this many times the best so far.
HOPELESS = 3.0
_ROUNDS = 4
_SHORTEST = 1e-4
_LONGEST_FIRST = 0.01
_LONGEST = 0.008

Call = Callable[[], object]
Clock = Callable[[], float]

#: The caller's own processor time does not count while other processes hold the core. Of an op on several
#: threads the caller does its share and then waits actively, so that it stands for the whole.
CLOCK: Clock = time.thread_time


def read_scheduler_wait() -> float:
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


def race(candidates: Mapping[str, Call], clock: Clock = CLOCK) -> dict[str, float]:
    """Return the shortest time of each candidate that can run, in seconds; runs interleaved.

    The likely fast ones come first. One that is far slower than the best so far is run once, or twice where
    its first run was short enough to have been spent on preparing the kernel.
    """
    times: dict[str, float] = {}

    def run(name: str, repeats: int = 1) -> float:
        start = clock()
        for _ in range(repeats):
            candidates[name]()
        took = max(1e-8, (clock() - start) / repeats)
        times[name] = min(took, times.get(name, math.inf))
        return took

    for name in candidates:
        best = min(times.values(), default=math.inf)
        if name == "channels_last" and times.get("native", math.inf) > HOPELESS * best:
            continue  # the same kernels
        try:
            first = run(name)
        except RuntimeError:  # this torch has no such kernel
            continue
        if first < _LONGEST_FIRST or first <= HOPELESS * best:
            run(name)
    alive = [name for name, t in times.items() if t <= HOPELESS * min(times.values())]
    begun = clock()
    for _ in range(_ROUNDS if len(alive) > 1 or len(times) == 1 else 0):
        if clock() - begun > _LONGEST:
            break
        for name in alive:
            run(name, max(1, min(50, int(_SHORTEST / times[name]))))
    return times
