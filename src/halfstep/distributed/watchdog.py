"""Who is to blame when ranks lose each other: the one that failed, was killed or hangs, by name and step.

While all goes well this costs nothing. A rank whose collective breaks off or runs out of time writes so into
the store of the process group and looks who else did: a rank that failed has written its error there, one
that ended has written that, one that was killed or hangs has written nothing.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from halfstep.distributed.reduce import rank, world_size
from halfstep.errors import ConfigError, RankError
from halfstep.torch_private import default_store, set_timeout

_BROKEN = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out waiting|broken pipe|timeout caused pair closure"
    r"|socket|store", re.IGNORECASE
)  # fmt: skip
_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)
_NUMBERS = itertools.count()
#: How many ranks have said how they ended.
_COUNT = "count"
#: Seconds that a rank waits for what the others have to say of themselves.
_PATIENCE = 5.0


@contextmanager
def watchdog(step: Callable[[], int], seconds: float | None = None) -> Generator[None]:
    """Within, a collective that another rank breaks raises RankError: which rank, at which step, why.

    Every rank enters it, in the same order. With one rank nothing happens. A rank's own errors pass as they
    are, and the others are informed.

    Args:
        step: the number of the step under way, as `lambda: amp.steps`.
        seconds: after how long a rank that does not answer counts as hanging; sets the time limit of the
            default process group for good. None leaves it (30 minutes with gloo).

    Raises:
        RankError: another rank failed, was killed or hangs.
        ConfigError: `seconds` is not above 0.
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"watchdog(seconds={seconds:g}): expected seconds above 0, or None")
    if world_size() == 1:
        yield
        return
    board = _Board(next(_NUMBERS), seconds)
    try:
        yield
        board.write({"step": step(), "done": True})
    except Exception as error:
        if not _is_broken(error):
            board.write({"step": step(), "error": _in_one_line(error)})
            raise
        board.write({"step": step(), "alone": True})
        raise RankError(board.verdict(step(), bool(_LATE.search(str(error))))) from error


class _Board:
    """The store of the process group as a place where each rank says once how it ended."""

    def __init__(self, number: int, seconds: float | None) -> None:
        from torch.distributed import distributed_c10d

        store: Any = default_store()
        self._store: Any = distributed_c10d.PrefixStore(f"halfstep/watchdog/{number}", store)
        self._seconds = seconds
        if seconds is not None:
            set_timeout(timedelta(seconds=seconds), dist.group.WORLD)

    def write(self, event: dict[str, Any]) -> None:
        """Say what happened to this rank; without a store it is lost."""
        with suppress(Exception):
            self._store.set(str(rank()), json.dumps(event))
            self._store.add(_COUNT, 1)

    def verdict(self, step: int, late: bool) -> str:
        """Which rank broke the collective of this step, as a sentence."""
        others = [number for number in range(world_size()) if number != rank()]
        events = self._read(others)
        failed = [n for n in others if "error" in events.get(n, {})]
        done = [n for n in others if "done" in events.get(n, {})]
        silent = [n for n in others if n not in events]
        if failed:
            cause = "; ".join(
                f"rank {n} failed at step {events[n]['step']}: {events[n]['error']}" for n in failed
            )
        elif done:
            steps = ", ".join(str(events[n]["step"]) for n in done)
            cause = f"{_ranks(done)} had ended (at step {steps}) and was not waited for: out of batches?"
        elif silent:
            why = "it hangs" if late else "it was killed, or its machine is gone"
            waited = f" within {self._seconds:g} s" if late and self._seconds is not None else ""
            cause = f"{_ranks(silent)} did not answer{waited}: {why}"
        else:
            cause = f"{_ranks(others)} gave up waiting for this rank (at step {events[others[0]]['step']})"
        return (
            f"rank {rank()} at step {step}: {cause}. All ranks must be started again; resume from the last "
            "checkpoint"
        )

    def _read(self, others: list[int]) -> dict[int, dict[str, Any]]:
        events: dict[int, dict[str, Any]] = {}
        until, last_count = time.monotonic() + _PATIENCE, 0
        with suppress(Exception):  # the store went with the rank that kept it
            while len(events) < len(others) and time.monotonic() < until:
                count = self._store.add(_COUNT, 0)  # one question, and not one for each rank
                for number in others if count > last_count else ():
                    if number not in events and self._store.check([str(number)]):
                        events[number] = json.loads(self._store.get(str(number)))
                last_count = count
                time.sleep(0.05)
        return events


def _is_broken(error: Exception) -> bool:
    """Whether an error says that other ranks cannot be reached, and not that this one is wrong."""
    if isinstance(error, RankError):
        return False
    return isinstance(error, RuntimeError) and bool(_BROKEN.search(str(error)))


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
