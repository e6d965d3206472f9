"""The paper's phenomena show up in short versions of the experiments; exact figures are not tested."""

import json
import sys
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest
import torch
from papers.mixed_precision_training_2018 import experiments, page, rescue, run


class Here(Executor):
    """Runs what it is given at once, in this process."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def test_updates_are_lost_from_the_ratio_the_paper_gives():
    rows = {row["ratio"]: row for row in experiments.lost_updates()}
    assert rows[2047]["plus"] == 1.0
    assert rows[2048]["plus"] == 0.0
    assert rows[4095]["minus"] == 1.0
    assert rows[4096]["minus"] == 0.0


def test_fp16_sums_lose_what_fp32_sums_keep():
    rows = experiments.accumulation((64, 4096))
    assert rows[0]["fp16"] < 0.01
    assert rows[1]["fp16"] > 20 * rows[1]["fp32"]


def test_fp16_zero_threshold_is_half_the_smallest_subnormal():
    facts = experiments.format_facts()
    assert facts["2^-25 becomes"] == 0.0
    assert facts["just above 2^-25 becomes"] == facts["fp16 smallest subnormal"] == 2.0**-24


def test_some_weight_gradients_fall_below_fp16_and_a_scale_saves_them():
    (row,) = experiments.weight_gradients({"text-gpt": 0.1}, 1.0)
    assert 0.005 < row["below_2^-24"] < 0.3
    assert row["flushed_by_scale"]["1024"] < row["flushed_by_scale"]["8"] < row["flushed_by_scale"]["1"]


@pytest.mark.exhaustive
def test_activation_gradients_leave_most_of_the_range_unused():
    result = experiments.activation_gradients(0.1)
    assert result["unused_binades"] >= 8
    assert result["flushed_by_scale"]["1024"] < 0.2 * result["flushed_by_scale"]["1"]
    assert result["overflow_by_scale"]["1024"] == 0.0


def test_fp16_sums_stall_and_fp32_sums_do_not():
    ones, small = torch.ones(1, 4096), torch.full((4096, 1), 0.75)
    assert rescue.summed_in_fp32(ones, small).item() == 3072
    assert rescue.summed_in_fp16(ones, small).item() == 2048  # 2048 + 0.75 rounds to 2048


def test_the_page_from_recorded_numbers(tmp_path):
    results = json.loads((Path(run.__file__).parent / "results.json").read_text())
    page.write_page(results, tmp_path / "paper.html")
    html = (tmp_path / "paper.html").read_text()
    assert html.count("<h2>") == 11
    assert "nan" not in html.lower().replace("finance", "")
    for named in ("table 1", "table 2", "figure 5", "figure 6", "15.82"):
        assert named in html
    (mlp, *_) = results["weight_gradients"]
    assert 0.02 < mlp["below_2^-24"] < 0.1  # the paper's 5 %
    assert mlp["below_by_step"][0][1] < 0.002 < 0.05 < mlp["below_by_step"][-1][1]
    assert page._kept(results["parity"], "mixed, dynamic scale") == 6
    assert page._kept(results["parity"], "mixed, no scale") == 5  # faint gradients need one
    final = results["language_model"]["final"]
    learned = {name: value - final["fp32"] for name, value in final.items()}
    assert learned["mixed, scale 1"] > 0.3
    assert max(learned["mixed, scale 128"], learned["mixed, dynamic scale"]) < 0.1
    scores = results["detector"]["score"]
    assert scores["mixed, scale 1"] < 0.5 * scores["fp32"]
    assert scores["mixed, scale 8"] > 0.7 * scores["fp32"]


def test_equal_scores_of_models_that_learned_nothing_are_no_parity():
    def row(mean, more=True, nothing=0.0):
        cell = {"mean": mean, "spread": 0.0, "skipped": 0, "diverged": 0}
        return {"more": more, "nothing": nothing, "cells": {"fp32": cell, "mixed": cell}}

    assert page._kept([row(0.0), row(10.0, nothing=10.0), row(2.3, more=False, nothing=2.3)], "mixed") == 0
    assert page._kept([row(80.0), row(90.0, nothing=10.0), row(0.5, more=False, nothing=2.3)], "mixed") == 3


@pytest.mark.exhaustive
def test_a_language_model_needs_a_scale_of_128():
    final = {name: rescue.language_model(name, 64)["final"] for name in rescue.RESCUES}
    assert final["mixed, scale 1"] > final["fp32"] + 0.3
    assert final["mixed, scale 128"] < final["fp32"] + 0.1


@pytest.mark.exhaustive
def test_masters_and_scale_both_matter_where_gradients_are_faint():
    curves = experiments.masters(Here(), 1, 1.0)
    learned = {name: curves["start"] - final for name, final in curves["final"].items()}
    assert learned["mixed, dynamic scale"] > 0.9 * learned["fp32"]
    assert learned["fp16 weights, no masters"] < 0.5 * learned["fp32"]


@pytest.mark.exhaustive
def test_the_page_is_written_from_the_numbers_alone(tmp_path):
    results = run.run(seeds=1, effort=0.05, workers=2)
    page.write_page(json.loads(json.dumps(results)), tmp_path / "paper.html")
    html = (tmp_path / "paper.html").read_text()
    assert html.count("<h2>") == 11
    assert "http" not in html.replace("http://www.w3.org", "")
    for row in results["parity"]:
        assert row["task"] in html


@pytest.mark.parametrize("given", [["--seeds", "0"], ["--effort", "-1"], ["--out", "/no/such/folder/x.html"]])
def test_wrong_arguments_end_before_any_training(given, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", *given])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert "run.py: error: " in capsys.readouterr().err
