"""`halfstep tune`: recipes in this process, scripts in processes of their own; the plan is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep as hs
from halfstep.cli import _tune_script, main
from halfstep.recipes import runs
from halfstep.tuning.choices import LevelChoice, Trial
from halfstep.tuning.engine import FirstStep

SCRIPT = """
import sys
import torch
import halfstep as hs
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 3))
amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), level="O2", dtype="bf16")
print(amp.level.name, file=sys.stderr)
for _ in range(50):
    with amp.autocast():
        loss = model(torch.randn(4, 1, 8, 8)).float().square().mean()
    amp.backward(loss)
    amp.step()
"""


def test_a_recipe_is_measured_and_its_plan_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.toml"
    asked = ["tune", "digits-mlp", "--seconds", "1.5", "--threads", "1", "--json", "--out", str(out)]
    assert main(asked) == 0
    document = json.loads(capsys.readouterr().out)
    plan = hs.Plan.read(out)
    assert plan.settings is not None
    assert plan.settings.level == document["chosen"]["level"]
    assert {row["setting"] for row in document["measured"]} >= {"O0", "O1 bf16", "O2 bf16"}
    assert all(row["milliseconds"] > 0 for row in document["measured"] if row["note"] == "")


def test_a_recipe_may_be_compiled_and_a_script_decides_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, script = list[bool](), tmp_path / "train.py"
    script.touch()

    def tune_recipe(recipe: Any, device: Any, *, compile: bool, **options: Any) -> hs.Tuning:
        asked.append(compile)
        return hs.Tuning((Trial(LevelChoice("O0"), (0.1,)),), LevelChoice("O0"), "so", 1.0)

    monkeypatch.setattr(runs, "tune_recipe", tune_recipe)
    assert main(["tune", "digits-mlp", "--compile"]) == main(["tune", "digits-mlp"]) == 0
    assert asked == [True, False]
    assert main(["tune", str(script), "--compile"]) == 2
    assert "--compile is for recipes" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_script_runs_under_the_choice_and_is_timed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    base = _tune_script.run_script(script, (), LevelChoice("O0"), 60.0)
    assert base.trial.failed is None
    assert base.trial.time > 0
    assert base.convolutions
    again = _tune_script.run_script(script, (), LevelChoice("O1", "bf16", "channels_last"), 60.0)
    error = again.beside(base).gradient_error
    assert error is not None
    assert 0 < error < 0.05


WAITING = """
import time
import torch
import halfstep as hs
time.sleep(1.5)
model = torch.nn.Linear(2, 2)
amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for number in range(50):
    time.sleep({0} if number else 0)
    amp.backward(model(torch.ones(1, 2)).sum())
    amp.step()
"""


def test_the_limit_counts_from_a_scripts_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITING.replace("{0}", "0"))
    assert _tune_script.run_script(script, (), LevelChoice("O0"), 1.0).trial.failed is None


def test_steps_longer_than_the_limit_name_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITING.replace("{0}", "0.5").replace("1.5", "0"))
    said = _tune_script.run_script(script, (), LevelChoice("O0"), 0.1).trial.failed
    assert said is not None
    assert "4 steps take longer than --seconds 0.1" in said


def test_the_fastest_of_a_script_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    times = {"O0": 0.1, "O1 bf16": 0.09, "O2 bf16": 0.06, "O2 bf16 channels_last": 0.04}

    def child(path: Any, args: Any, choice: LevelChoice, *more: Any) -> _tune_script.Run:
        trial = Trial(choice, (times.get(choice.label, 0.2),))
        return _tune_script.Run(trial, FirstStep(1.0, {(0, 0): torch.ones(2)}), "bf16", True)

    monkeypatch.setattr(_tune_script, "run_script", child)
    found = _tune_script.tune_script(script, (), None, 60.0)
    assert found.choice == LevelChoice("O2", "bf16", "channels_last")
    assert {t.choice.label for t in found.trials} == {*times, "O1 bf16 channels_last"}


def test_a_stopped_tuning_prints_what_it_measured_and_writes_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out, runs_begun = tmp_path / "train.py", tmp_path / "plan.toml", list[str]()
    script.write_text(SCRIPT)

    def child(path: Any, args: Any, choice: LevelChoice, *more: Any) -> _tune_script.Run:
        runs_begun.append(choice.label)
        if len(runs_begun) == 3:
            raise KeyboardInterrupt
        gradient = torch.tensor([1.0, 1.0]) if choice.dtype is None else torch.tensor([1.0, 3.0])
        first = FirstStep(1.0, {(0, 0): torch.ones(2), (0, 1): gradient})
        return _tune_script.Run(Trial(choice, (0.1,)), first, "bf16", False, {(0, 1): "head.weight"})

    monkeypatch.setattr(_tune_script, "run_script", child)
    assert main(["tune", str(script), "--out", str(out)]) == 130
    shown, told = capsys.readouterr()
    assert "fastest so far, of what was measured: O0: nothing else can be used; O1 bf16: its grad" in shown
    assert "more than 0.5, most in head.weight" in shown
    assert not out.exists()
    assert "under O0, run 1; each run takes at most 60 s from its first step on" in told
    assert "under O1 bf16, run 2 of at most 9, about " in told
    assert told.endswith("halfstep: interrupted\n")


def test_names_are_those_of_the_weights_that_the_optimizers_hold() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    model = torch.nn.Sequential(one, other)
    optimizer = torch.optim.SGD([other.weight, torch.zeros(3, requires_grad=True), one.bias])
    assert _tune_script._names_of([model], [optimizer]) == {(0, 0): "1.weight", (0, 2): "0.bias"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("import halfstep", "it neither calls hs.prepare nor steps a torch optimizer")],
)
def test_a_script_that_cannot_be_tuned_says_why(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert main(["tune", str(script)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["nowhere.py"], "no script nowhere.py"),
        (["digits-mpl"], "did you mean digits-mlp"),
        (["digits-mlp", "--seconds", "0"], "--seconds 0: expected seconds above 0"),
        (["digits-mlp", "--out", "/no/such/folder/plan.toml"], "cannot write into /no/such/folder"),
        (["digits-mlp", "--dtype", "fp33"], "fp33"),
    ],
)
def test_bad_input_is_told_in_one_line(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *asked]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_train_at_level_auto_names_what_it_came_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits-mlp", "--level", "O0,auto", "--steps", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["recipes"][0]["rows"]
    assert rows[1]["label"].startswith("auto: ")
    assert rows[1]["why"]
    assert len(rows[1]["runs"][0]["losses"]) == 3
