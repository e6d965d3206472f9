"""A limit of time over several recipes: shares, trainings in turns, tables that are whole."""

import math
from functools import partial

import pytest
import torch

from halfstep.recipes import recipe_of
from halfstep.recipes.runs import Pace, Training, TrainSetting, run_recipe, seconds_of

CPU = torch.device("cpu")
SETTINGS = [TrainSetting("O0", None), TrainSetting("O1", "bf16")]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def train(seconds, seconds_a_step, steps=40, seeds=2):
    """The rows of a recipe under a limit, each step taking so long; the clock; the names of steps; shares."""
    clock, names, shares = Clock(), [], []

    def on_step(name, share):
        if name == "measuring digits-mlp":
            return
        clock.now += seconds_a_step
        names.append(name)
        shares.append(share)

    rows = run_recipe(
        recipe_of("digits-mlp"), SETTINGS, seeds=seeds, steps=steps, device=CPU, folder=None, rounds=6,
        on_step=on_step, pace=Pace(seconds, [1.0], clock),
    )  # fmt: skip
    return rows, clock.now - 100.0, names, shares


def test_a_job_gets_its_weight_of_what_is_left():
    clock = Clock()
    pace = Pace(60.0, [1.0, 3.0, 2.0], clock)
    pace.begin()
    assert pace.until == pytest.approx(110.0)
    clock.now += 5.0
    assert pace.share_used() == pytest.approx(0.5)
    assert pace.allows(5.0)
    assert not pace.allows(5.1)
    pace.begin()
    assert pace.until == pytest.approx(105.0 + 55.0 * 3 / 5)
    clock.now += 100.0
    pace.begin()
    assert pace.until == clock.now


def test_no_limit_allows_everything():
    pace = Pace(None, [1.0, 2.0])
    pace.begin()
    assert pace.allows(1e9)
    assert pace.share_used() == 0.0
    assert pace.until == math.inf


def test_where_time_is_short_all_runs_end_at_the_same_step_in_time():
    # 40 steps of two settings and seeds take 160 s; 30 rounds of both are kept to evaluate and measure.
    rows, seconds, _, shares = train(seconds=120.0, seconds_a_step=1.0)
    assert rows.steps == 15
    assert rows.trained == "15 of 40 steps, 2 seeds"
    assert [len(run.losses) for row in rows.rows for run in row.runs] == [15] * 4
    assert all(row.mean is not None and row.seconds for row in rows.rows)
    assert seconds + 60.0 <= 120.0
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(59 / 120)


def test_a_tenth_may_use_the_time_to_measure_and_a_late_table_leaves_out_what_a_report_shows():
    rows, seconds, _, _ = train(seconds=40.0, seconds_a_step=1.0)
    assert (rows.steps, seconds) == (4, 16.0)
    assert all(row.mean is not None and row.seconds and row.bound is None for row in rows.rows)
    assert train(seconds=1.0, seconds_a_step=1.0)[0].steps == 1
    rows, _, _, _ = train(seconds=1e6, seconds_a_step=10.0, steps=4, seeds=1)
    assert all(row.bound is not None and row.ops for row in rows.rows)


def test_trainings_take_turns_only_where_there_is_a_limit():
    o0, o1 = "digits-mlp O0", "digits-mlp O1 bf16"
    assert train(None, 0.0, steps=2, seeds=1)[2] == [o0, o0, o1, o1]
    rows, _, names, shares = train(1e9, 0.0, steps=2, seeds=1)
    assert names == [o0, o1, o0, o1]
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert (rows.trained, rows.shortened) == ("2 steps, 1 seed", False)


def test_a_training_in_parts_is_the_training_at_once():
    recipe = recipe_of("digits-mlp")
    task = recipe.task()
    make = partial(Training, recipe, task, TrainSetting("O2", "fp16"), 0, lambda name: None)
    whole, parts = make(), make()
    whole.train_to(25, CPU)
    for step in (1, 20, 25):  # a pass over the digits has 20 batches
        parts.train_to(step, CPU)
    whole.end()
    parts.end()
    assert parts.run == whole.run
    assert len(parts.run.losses) == len(parts.run.scales) == 25
    assert whole.ended


def test_an_error_ends_one_training_and_no_other():
    recipe = recipe_of("digits-mlp")
    training = Training(recipe, recipe.task(), TrainSetting("O1", "fp16", "1e38"), 0, lambda name: None)
    training.train_to(1, CPU)
    training.run.failed = "the scale collapsed"
    training.train_to(9, CPU)
    training.end()
    assert len(training.run.losses) == 1
    assert training.ended
    assert training.run.test == {}


def test_the_whole_is_estimated_from_the_first_setting():
    recipe = recipe_of("digits-mlp")
    short, long = (seconds_of(recipe, SETTINGS, 2, steps, CPU, None) for steps in (1, 3_000))
    assert 0.0 < short < long
