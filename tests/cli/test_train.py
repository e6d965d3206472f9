"""`halfstep train`: the table, the JSON, the report, and one line for each wrong input."""

import json
import re

import pytest
import torch

from halfstep.cli import main
from halfstep.trainer.loop import Trainer


@pytest.fixture(autouse=True)
def _wide_and_threads_put_back(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_prints_a_table_and_writes_a_report(capsys, tmp_path):
    report = tmp_path / "out.html"
    given = [
        "train",
        "digits-mlp",
        "--level",
        "O0,O1,O2",
        "--dtype",
        "bf16,fp16",
        "--steps",
        "8",
        "--seeds",
        "2",
    ]
    assert main([*given, "--report", str(report), "--threads", "1"]) == 0
    shown, told = capsys.readouterr()
    lines = [line.split() for line in shown.splitlines() if re.match(r" ?O[0-3]", line)]
    assert [line[0] for line in lines] == ["O0", "O1", "O1", "O2", "O2"]
    assert all(re.fullmatch(r"[+-]\d+\.\d\d", word) for line in lines for word in line if word[0] in "+-")
    assert lines[2][-1] == "65,536"
    assert "±" in shown
    assert "digits-mlp: 784-512-512-10" in shown
    slow = (" s left", "compiled a kernel")  # what a slow machine says
    begun = [line for line in told.splitlines() if not any(words in line for words in slow)]
    assert begun == ["training digits-mlp"]
    page = report.read_text()
    assert page.startswith("<!doctype html>")
    assert "O2 fp16" in page
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]


def test_json_is_strict_and_complete(capsys):
    given = ["train", "digits-mlp", "--level", "bf16-mixed,O0", "--steps", "4", "--threads", "1", "--json"]
    assert main(given) == 0
    shown, told = capsys.readouterr()
    assert told == ""
    document = json.loads(shown, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["machine"]["threads"] == 1
    recipe = document["recipes"][0]
    assert [row["label"] for row in recipe["rows"]] == ["O1 bf16", "O0"]
    row = recipe["rows"][0]
    assert len(row["runs"][0]["losses"]) == 4
    assert row["seconds"] > 0
    assert row["saved_bytes"] > 0
    assert row["peak_bytes"] > row["saved_bytes"]
    assert row["bound"]["what"] in ("arithmetic", "memory", "latency")
    assert recipe["rows"][1]["difference"] == 0.0


def test_epochs_count_passes(capsys):
    assert main(["train", "digits-mlp", "--level", "O0", "--epochs", "1", "--json", "--threads", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"][0]["steps"] == 1297 // 64


def test_o0_takes_its_own_dtype_by_name(capsys):
    given = ["--level", "O0", "--dtype", "fp32", "--steps", "1", "--threads", "1", "--json"]
    assert main(["train", "digits-mlp", *given]) == 0
    (recipe,) = json.loads(capsys.readouterr().out)["recipes"]
    assert [row["label"] for row in recipe["rows"]] == ["O0"]


def test_loss_scales_are_compared(capsys):
    given = [
        "train",
        "digits-mlp",
        "--level",
        "O2",
        "--dtype",
        "fp16",
        "--loss-scale",
        "none,1024",
        "--steps",
        "3",
    ]
    assert main([*given, "--json", "--threads", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)["recipes"][0]["rows"]
    assert [(row["label"], row["last_scale"]) for row in rows] == [
        ("O2 fp16 no scale", 1.0),
        ("O2 fp16 scale 1024", 1024.0),
    ]


WRONG = {
    "recipe": (["digit-mlp"], r"unknown recipe 'digit-mlp'; expected one of .*did you mean digits-mlp\?"),
    "level": (["digits-mlp", "--level", "O7"], "unknown level 'O7'"),
    "level list": (["digits-mlp", "--level", "O0,,O1"], "level list 'O0,,O1' has an empty entry"),
    "dtype": (["digits-mlp", "--dtype", "fp17"], "fp17"),
    "dtype of O0": (
        ["digits-mlp", "--level", "O0", "--dtype", "fp16"],
        "O0 is fp32 throughout, given fp16",
    ),
    "dtype of no": (
        ["digits-mlp", "--level", "no", "--dtype", "bf16"],
        "O0 is fp32 throughout, given bf16",
    ),
    "level number": (["digits-mlp", "--level", "2"], "did you mean 'O2'"),
    "dtype fp8": (["digits-mlp", "--dtype", "fp8"], "a level computes in fp16 or bf16"),
    "dtype fp32": (["digits-mlp", "--dtype", "fp32"], "expected bf16 or fp16"),
    "steps": (["digits-mlp", "--steps", "0"], "--steps 0: expected 1 or more"),
    "steps word": (["digits-mlp", "--steps", "many"], "many"),
    "seeds": (["digits-mlp", "--seeds", "-2"], "--seeds -2: expected 1 or more"),
    "epochs": (["digits-mlp", "--epochs", "1", "--steps", "1"], "choose one"),
    "threads": (["digits-mlp", "--threads", "0"], "--threads 0: expected 1 or more"),
    "threads beyond": (
        ["digits-mlp", "--threads", "1000000"],
        "1000000: expected 1 or more, at most",
    ),
    "empty level": (["digits-mlp", "--level", ""], "level list '' has an empty entry"),
    "empty dtype": (["digits-mlp", "--dtype", ""], "dtype list '' has an empty entry"),
    "demo and another": (["demo,digits-mlp"], "demo is all recipes, give it alone"),
    "meta": (["digits-mlp", "--device", "meta"], "'meta' has no values to compute with"),
    "scale beyond": (["digits-mlp", "--loss-scale", "1e60"], "a positive number from"),
    "scale": (["digits-mlp", "--loss-scale", "big"], "--loss-scale 'big'"),
    "negative scale": (["digits-mlp", "--loss-scale", "-4"], "loss-scale"),
    "device": (["digits-mlp", "--device", "quantum"], "quantum"),
    "data": (["digits-mlp", "--steps", "1", "--data", "/no/such/folder"], "/no/such/folder is not a folder"),
    "data of text": (["text-gpt", "--steps", "1", "--data", "."], "--data is for the digits recipes"),
    "report folder": (
        ["digits-mlp", "--report", "/no/such/place/r.html"],
        "cannot write into /no/such/place",
    ),
    "report is folder": (["digits-mlp", "--report", "."], "is a folder"),
    "option": (["digits-mlp", "--lvel", "O1"], "--lvel"),
    "nothing": ([], ""),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_ends_in_one_line_and_code_2(capsys, case):
    given, message = WRONG[case]
    assert main(["train", *given]) == 2
    shown, told = capsys.readouterr()
    assert shown == ""
    assert told.count("\n") == 1
    assert told.startswith("halfstep: ")
    assert re.search(message, told)


@pytest.mark.parametrize("content", [b"", b"rubbish"])
def test_corrupt_data_leaves_no_report(capsys, tmp_path, content):
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(content)
    report = tmp_path / "out.html"
    assert (
        main(["train", "digits-mlp", "--data", str(tmp_path), "--report", str(report), "--steps", "1"]) == 2
    )
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "train-images-idx3-ubyte is not an IDX file" in told
    assert not report.exists()


def test_an_unsupported_dtype_on_this_device_is_told(capsys, monkeypatch):
    from halfstep.devices import capabilities

    absent = capabilities.Capability("cpu", torch.float16, "absent", "no kernels were built", None)
    real = capabilities.capability
    monkeypatch.setattr(
        capabilities,
        "capability",
        lambda d, t: absent if capabilities.parse_dtype(t) == torch.float16 else real(d, t),
    )
    assert main(["train", "digits-mlp", "--level", "O1", "--dtype", "fp16", "--steps", "1"]) == 2
    assert "fp16 does not work on cpu: no kernels were built" in capsys.readouterr().err


def test_a_slow_dtype_is_told_in_the_table(capsys, monkeypatch):
    from halfstep import devices
    from halfstep.devices import capabilities

    slow = capabilities.Capability("cpu", torch.bfloat16, "slow", "no bf16 arithmetic", 3.0)
    real = capabilities.capability
    monkeypatch.setattr(
        devices,
        "capability",
        lambda d, t: slow if capabilities.parse_dtype(t) == torch.bfloat16 else real(d, t),
    )
    assert (
        main(["train", "digits-mlp", "--level", "O1", "--dtype", "bf16", "--steps", "2", "--threads", "1"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "O1 bf16 (slow here)" in shown
    assert "bf16 is slow here (no bf16 arithmetic)" in shown


def test_help_names_every_recipe(capsys):
    from halfstep.recipes import RECIPES

    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)


def test_a_short_limit_gives_whole_tables_of_fewer_steps_each_when_it_is_ready(capsys, monkeypatch):
    from halfstep.cli import train

    shown, run_recipe = [], train.run_recipe

    def after_the_last_table(*args, **options):
        shown.append(capsys.readouterr())
        return run_recipe(*args, **options)

    monkeypatch.setattr(train, "run_recipe", after_the_last_table)
    given = ["--level", "O0,O2", "--dtype", "bf16", "--steps", "20", "--threads", "1", "--time-limit", "0.01"]
    assert main(["train", "digits-mlp,digits-faint", *given]) == 0
    said = capsys.readouterr()
    assert "digits-mlp" in shown[1].out
    assert "(digits, 1 of 20 steps, 1 seed)" in shown[1].out
    assert "digits-mlp" not in said.out
    assert "(digits, 1 of 20 steps, 1 seed)" in said.out
    assert "Trainings were shortened to end within 0.01 s; --time-limit SECONDS gives them more." in said.out
    assert shown[1].err.splitlines() == ["training digits-mlp"]


@pytest.mark.exhaustive
def test_the_demo_runs_every_recipe_at_every_level(capsys, tmp_path):
    report = tmp_path / "r.html"
    assert (
        main(["train", "demo", "--steps", "3", "--seeds", "2", "--threads", "1", "--report", str(report)])
        == 0
    )
    shown = capsys.readouterr().out
    assert "text-gpt" in shown
    # O3 on text-gpt in fp16 too: halfstep's AdamW works in fp32, where its epsilon is not zero.
    assert "diverged" not in shown
    assert report.read_text().count("<section id=") == 4


def test_a_plan_holds_at_every_level_but_o0(capsys, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[[rule]]\npattern = "**"\nreason = "all of it"\nrule = "full"\n')
    given = ["train", "digits-mlp", "--level", "O0,O1", "--dtype", "bf16", "--steps", "4", "--json"]
    assert main([*given, "--plan", str(plan)]) == 0
    plain, planned = json.loads(capsys.readouterr().out)["recipes"][0]["rows"]
    assert [plain["label"], planned["label"]] == ["O0", "plan: O1 bf16"]
    assert planned["mean"] == plain["mean"]  # every op in fp32


def test_a_plan_with_a_level_of_its_own_or_none_that_can_be_read_is_refused(capsys, tmp_path):
    plan = tmp_path / "plan.toml"
    assert main(["train", "digits-mlp", "--plan", str(plan)]) == 2
    assert "cannot read the plan" in capsys.readouterr().err
    plan.write_text('[settings]\nlevel = "O1"\ndtype = "bf16"\nreason = "measured"\n')
    assert main(["train", "digits-mlp", "--plan", str(plan)]) == 2
    assert capsys.readouterr().err.startswith("halfstep: ")


def test_ctrl_c_prints_and_reports_what_is_finished(capsys, monkeypatch, tmp_path):
    fit, begun = Trainer.fit, []

    def interrupted(trainer, *args, **options):
        begun.append(trainer)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return fit(trainer, *args, **options)

    monkeypatch.setattr(Trainer, "fit", interrupted)
    report = tmp_path / "out.html"
    given = [
        "train",
        "digits-mlp",
        "--level",
        "O0,O1,O2",
        "--dtype",
        "bf16",
        "--steps",
        "3",
        "--threads",
        "1",
    ]
    assert main([*given, "--report", str(report)]) == 130
    shown, said = capsys.readouterr()
    assert "digits-mlp: Interrupted: no verdict; 2 settings trained" in shown
    assert [line.split()[0] for line in shown.splitlines() if re.match(r" ?O[0-3]", line)] == ["O0", "O1"]
    assert "Interrupted" in report.read_text()
    assert said.endswith("halfstep: interrupted\n")
