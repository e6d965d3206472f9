"""A limit on the wall-clock time of many trainings, so that one that is hopelessly slow cannot use it all."""

from __future__ import annotations

import time
from collections.abc import Callable

from halfstep.errors import HalfstepError


class OutOfTime(HalfstepError):
    """A training has used its share of the time; the message says how far it came."""


class TimeBudget:
    """`seconds` in all for a number of trainings, None for no limit.

    A training may take up to three times an equal share of what is left, so that long recipes fit beside
    short ones; what it does not use stays for the others. All take at most `seconds` and a step each.
    """

    PATIENCE = 3.0

    def __init__(
        self, seconds: float | None, trainings: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.trainings, self.clock = seconds, trainings, clock
        self.ends = None if seconds is None else clock() + seconds

    def start(self) -> TrainingTime:
        """The next training's share, running from now."""
        now = self.clock()
        left = max(1, self.trainings)
        self.trainings -= 1
        if self.ends is None:
            return TrainingTime(now, None, self.clock)
        remaining = max(0.0, self.ends - now)
        return TrainingTime(now, min(remaining, self.PATIENCE * remaining / left), self.clock)


class TrainingTime:
    """One training's part of a `TimeBudget`: `limit` seconds from `started`, None for no limit."""

    def __init__(self, started: float, limit: float | None, clock: Callable[[], float]) -> None:
        self.started, self.limit, self.clock = started, limit, clock

    def check(self, done: int, steps: int) -> None:
        """Raise OutOfTime if the share is used up after `done` of `steps` steps; not at the last one."""
        if self.limit is None or done >= steps:
            return
        used = self.clock() - self.started
        if used > self.limit:
            raise OutOfTime(
                f"stopped after {done} of {steps} steps, {used:.0f} s: at {used / max(1, done):.2g} s a step "
                "it would use more than its share of the time limit; raise --time-limit or give fewer --steps"
            )


NO_LIMIT = TrainingTime(0.0, None, time.monotonic)
"""The share of a training that nothing stops."""
