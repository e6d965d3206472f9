"""Which way is fastest: runs in turns, what is given up early, and how long threads waited for a core."""

import os
import subprocess
import sys
import time

import pytest

from halfstep.casting.kernel_race import race, read_scheduler_wait


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
        return race(calls, lambda: self.now)


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

    assert "native" not in race({"rounded": lambda: None, "native": absent})


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux tells how long threads waited")
def test_threads_that_share_a_core_stand_in_line() -> None:
    """Two processes on one core: each waits while the other computes."""
    everywhere = os.sched_getaffinity(0)
    core = {min(everywhere)}
    before = read_scheduler_wait()
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
    assert read_scheduler_wait() > before
