"""Which way is fastest: runs in turns, what is given up early, and what a busy machine took."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from halfstep.casting import kernel_race
from halfstep.casting.kernel_race import RaceTimes, race, stood_in_line


class Clock:
    """Time that passes only as candidates say."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: dict[str, int] = {}

    def candidate(self, name: str, *seconds: float):
        def call() -> None:
            count = self.runs[name] = self.runs.get(name, 0) + 1
            self.now += seconds[min(count, len(seconds)) - 1]

        return call

    def race(self, **candidates: tuple[float, ...]) -> dict[str, float]:
        calls = {name: self.candidate(name, *seconds) for name, seconds in candidates.items()}
        return race(calls, lambda: self.now).times

    def disturbed(self, waits: Iterable[float], **candidates: tuple[float, ...]) -> RaceTimes:
        """A race in whose runs a thread waits for so many seconds, and the caller for it."""
        line, waiting = [0.0], iter(waits)

        def wait(call: Callable[[], None]) -> None:
            call()
            lost = next(waiting, 0.0)
            line[0] += lost
            self.now += lost

        calls = {name: partial(wait, self.candidate(name, *times)) for name, times in candidates.items()}
        return race(calls, lambda: self.now, lambda: line[0])


def test_a_hopeless_candidate_is_run_once() -> None:
    clock = Clock()
    found = clock.race(rounded=(1.0,), native=(100.0,))
    assert found == {"rounded": 1.0, "native": pytest.approx(100.0)}
    assert clock.runs["native"] == 1


def test_a_slow_first_run_is_the_kernels_preparation() -> None:
    clock = Clock()
    found = clock.race(rounded=(1e-4,), native=(5e-3, 5e-5))
    assert found["native"] == pytest.approx(5e-5)


def test_channels_last_is_not_tried_where_the_same_kernel_lost() -> None:
    assert "channels_last" not in Clock().race(rounded=(1.0,), native=(9.0,), channels_last=(0.1,))


def test_channels_last_is_not_tried_where_native_was_left_out() -> None:
    assert Clock().race(rounded=(1.0,), channels_last=(0.1,)) == {"rounded": 1.0}


def test_a_kernel_that_torch_lacks_has_no_time() -> None:
    def absent() -> None:
        raise RuntimeError("not implemented for 'Half'")

    assert "native" not in race({"rounded": lambda: None, "native": absent}).times


def test_a_run_in_which_a_thread_waited_is_made_again() -> None:
    clock = Clock()
    found = clock.disturbed([0.024, 0.0, 0.024, 0.024, 0.024], rounded=(1e-3,), native=(3e-4,))
    assert found.steady
    assert found.times == {"rounded": pytest.approx(1e-3), "native": pytest.approx(3e-4)}


def test_times_of_a_machine_that_is_always_busy_are_not_steady(monkeypatch) -> None:
    monkeypatch.setattr(kernel_race, "_PATIENCE", 0.02)
    assert not Clock().disturbed(itertools.repeat(0.024), rounded=(1e-3,), native=(3e-4,)).steady


def test_what_is_hopeless_whatever_it_waited_need_not_be_run_again() -> None:
    clock = Clock()
    found = clock.disturbed([0.0, 0.0, 0.5], rounded=(1e-3,), native=(1.3,))
    assert found.steady
    assert clock.runs["native"] == 1


def test_a_long_run_that_was_disturbed_is_not_steady_where_it_may_have_won() -> None:
    assert not Clock().disturbed([0.0, 0.0, *[0.5] * 9], rounded=(0.2,), native=(0.3,)).steady


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux tells how long threads waited")
def test_threads_that_share_a_core_stand_in_line() -> None:
    """Two processes on one core: each waits while the other computes."""
    everywhere = os.sched_getaffinity(0)
    core = {min(everywhere)}
    before = stood_in_line()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            os.sched_setaffinity(other.pid, core)
            os.sched_setaffinity(0, core)
            until = time.thread_time() + 0.05
            while time.thread_time() < until:
                pass
        finally:
            os.sched_setaffinity(0, everywhere)
            other.kill()
    assert stood_in_line() > before
