"""The command line on the device, as a person starts it."""

import json

import pytest

from halfstep import cli

SMALL = ("--level", "O2", "--dtype", "bf16", "--seeds", "1", "--steps", "1")


def test_train_runs_and_says_where(capsys: pytest.CaptureFixture[str]):
    assert cli.main(("train", "digits-mlp", "--device", "cuda", *SMALL, "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert "cuda" in json.dumps(document)


def test_doctor_finds_a_healthy_recipe_healthy(capsys: pytest.CaptureFixture[str]):
    assert cli.main(("doctor", "digits-mlp", "--device", "cuda", "--steps", "1")) == 0
    assert "healthy over 1 step" in capsys.readouterr().out


def test_devices_finds_each_op_as_its_rule_says(capsys: pytest.CaptureFixture[str]):
    assert cli.main(("devices", "--dtype", "bf16")) == 0
    assert " 0 differ" in (said := capsys.readouterr().out) or "differs" not in said
