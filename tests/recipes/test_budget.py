"""A time limit over many trainings: shares, what is left over, and the row that says why it was stopped."""

import contextlib

import pytest
import torch

from halfstep.recipes import recipe_of
from halfstep.recipes.runs import OutOfTime, TimeBudget, TrainSetting, run_recipe


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def _train(budget, clock, steps, seconds):
    """A training of `steps` steps of `seconds` each; how many were done."""
    budget.start()
    for done in range(1, steps + 1):
        clock.now += seconds
        budget.check(done, steps)
    return steps


def test_a_share_is_three_times_an_equal_part_and_what_is_left_goes_on():
    clock = Clock()
    budget = TimeBudget(60.0, 6, clock)
    assert _train(budget, clock, 10, 2.9) == 10  # 29 s of at most 30
    with pytest.raises(OutOfTime, match=r"stopped after 7 of 10 steps, 21 s: at 3 s a step"):
        _train(budget, clock, 10, 3.0)  # 31 s are left for five: 18.6
    budget.start()
    assert budget.limit == pytest.approx(3 * 10.0 / 4)


@pytest.mark.parametrize("seconds_a_step", [0.3, 2.0, 40.0])
def test_together_they_take_the_limit_and_at_most_a_step_each(seconds_a_step):
    clock = Clock()
    budget = TimeBudget(60.0, 9, clock)
    for _ in range(9):
        with contextlib.suppress(OutOfTime):
            _train(budget, clock, 1000, seconds_a_step)
    assert clock.now - 100.0 <= 60.0 + 9 * seconds_a_step


def test_the_last_step_is_never_too_late_and_no_limit_stops_nothing():
    clock = Clock()
    assert _train(TimeBudget(10.0, 1, clock), clock, 1, 1000.0) == 1
    assert _train(TimeBudget(None, 1, clock), clock, 5, 1e9) == 5


def test_a_stopped_row_says_so_is_not_measured_and_the_others_are():
    clock = Clock()

    def slow_in_bf16(name):
        clock.now += 100.0 if "bf16" in name else 0.1

    report = run_recipe(
        recipe_of("digits-mlp"),
        [TrainSetting("O0", None), TrainSetting("O1", "bf16")],
        seeds=2,
        steps=3,
        device=torch.device("cpu"),
        folder=None,
        rounds=1,
        on_step=slow_in_bf16,
        budget=TimeBudget(50.0, 4, clock),
    )
    good, stopped = report.rows
    assert good.stopped is None
    assert good.seconds > 0
    assert stopped.stopped.startswith("stopped after 1 of 3 steps, 100 s")
    assert stopped.failed is None
    assert stopped.mean is None
    assert stopped.seconds is None
    assert len(stopped.runs) == 1
