"""The command line on the device, as a person starts it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import Plan, cli
from halfstep.cli import train
from halfstep.recipes import RECIPES, registry
from halfstep.recipes.measure import memory_peak
from halfstep.tuning import op_times


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch):
    """Kernels are interpreted: a network of 13,000 weights, and nothing is timed in earnest."""
    small = replace(
        RECIPES["digits-mlp"],
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10)),
    )
    run_recipe: Any = train.run_recipe
    monkeypatch.setattr(registry, "RECIPES", {**RECIPES, "digits-mlp": small})
    monkeypatch.setattr(train, "run_recipe", lambda *args, **how: run_recipe(*args, **how | {"rounds": 1}))


@pytest.mark.long
def test_doctor_finds_a_healthy_recipe_healthy(capsys: pytest.CaptureFixture[str]):
    assert cli.main(("doctor", "digits-mlp", "--device", "cuda", "--steps", "1")) == 0
    assert "healthy over 1 step" in capsys.readouterr().out


def test_devices_finds_each_op_as_its_rule_says(capsys: pytest.CaptureFixture[str]):
    assert cli.main(("devices", "--dtype", "bf16")) == 0
    assert " 0 differ" in (said := capsys.readouterr().out) or "differs" not in said


@pytest.mark.long
def test_train_compares_levels_and_writes_its_report(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    report = tmp_path / "report.html"
    asked = ("train", "digits-mlp", "--level", "O0,O2", "--steps", "2", "--device", "cuda")
    assert cli.main((*asked, "--report", str(report))) == 0
    said = capsys.readouterr().out
    assert "O2 bf16" in said
    assert "False CUDA device" in report.read_text()


@pytest.mark.parametrize("seconds", ["1", pytest.param("20", marks=pytest.mark.exhaustive)])
def test_tune_measures_and_writes_its_plan(seconds: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "plan.toml"
    asked = ("tune", "digits-mlp", "--device", "cuda", "--seconds", seconds, "--out", str(out))
    assert cli.main(asked) == 0
    assert "chosen: " in capsys.readouterr().out
    assert Plan.read(out).settings is not None


def test_a_step_is_profiled_by_what_this_torch_can_watch():
    watched = op_times._activities([torch.nn.Linear(2, 2, device="cuda")])
    assert watched == list(torch.profiler.supported_activities())  # of others it warns at every op, in 30 ms


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore::halfstep.HalfstepWarning"
)  # of O3, whose steps are too small for its weights
def test_the_demo_trains_every_recipe_at_every_level(capsys: pytest.CaptureFixture[str]):
    asked = ("train", "demo", "--steps", "2", "--seeds", "1", "--time-limit", "3600")
    assert cli.main((*asked, "--device", "cuda")) == 0
    said = capsys.readouterr().out
    assert "text-gpt" in said
    assert "diverged" not in said


def test_the_peak_of_memory_is_the_allocators():
    kept = torch.zeros(1 << 20, device="cuda")
    before = torch.cuda.memory_allocated()
    with memory_peak([kept], kept.device) as peak:
        torch.zeros(1 << 20, device="cuda")
    assert peak == [before + (4 << 20)]
