"""The seconds that measuring may take, by the wall clock: each phase asks before it begins."""

from __future__ import annotations

import time
from typing import Any

from halfstep.distributed import gather
from halfstep.distributed.reduce import Group


class Budget:
    """What is left of `seconds`, and what a step of each choice was last seen to take of them.

    Every rank of `group` asks in the same order and hears the first one's answer.
    """

    def __init__(self, seconds: float, group: Group | None = None) -> None:
        self._seconds, self.group = seconds, group
        self._steps: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Count from now."""
        self._until = time.perf_counter() + self._seconds

    def left(self) -> float:
        """Seconds that are left; below 0 where too many were spent."""
        return float(self.of_first_rank(self._until - time.perf_counter()))

    def saw(self, label: str, seconds: float) -> None:
        """Note what a step of a choice took."""
        self._steps[label] = seconds

    def affords(self, label: str, steps: int) -> bool:
        """Whether so many steps of a choice fit; one never seen is taken to be as fast as the first seen."""
        first = next(iter(self._steps.values()), 0.0)
        return self.left() > float(self.of_first_rank(steps * self._steps.get(label, first)))

    def of_first_rank(self, value: Any) -> Any:
        """The first rank's value, on every rank; every rank must ask."""
        return gather(value, self.group)[0]
