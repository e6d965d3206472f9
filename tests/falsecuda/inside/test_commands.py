"""The command line on the device, as a person starts it."""

import pytest
import torch

from halfstep import cli
from halfstep.recipes.measure import memory_peak


def test_doctor_finds_a_healthy_recipe_healthy(capsys: pytest.CaptureFixture[str]):
    assert cli.main(("doctor", "digits-mlp", "--device", "cuda", "--steps", "1")) == 0
    assert "healthy over 1 step" in capsys.readouterr().out


def test_devices_finds_each_op_as_its_rule_says(capsys: pytest.CaptureFixture[str]):
    assert cli.main(("devices", "--dtype", "bf16")) == 0
    assert " 0 differ" in (said := capsys.readouterr().out) or "differs" not in said


def test_the_peak_of_memory_is_the_allocators():
    kept = torch.zeros(1 << 20, device="cuda")
    before = torch.cuda.memory_allocated()
    with memory_peak([kept], kept.device) as peak:
        torch.zeros(1 << 20, device="cuda")
    assert peak == [before + (4 << 20)]
