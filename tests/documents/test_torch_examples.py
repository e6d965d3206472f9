"""The PyTorch documents' code patterns, as the examples write them."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from halfstep.compat import torch_amp

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(capsys, monkeypatch):
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(torch_amp, "_warn_once", lambda message: None)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_cnn_with_bare_autocast_and_gradscaler(run):
    printed = run("torch_cnn_autocast_gradscaler.py", "--epochs", "3", "--samples", "1280")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0] < 2.4
    assert "0 steps skipped" in printed
    assert torch.is_autocast_enabled("cpu") is False


def test_autocast_and_gradscaler_apart(run):
    printed = run("autocast_and_gradscaler_apart.py")
    accuracies = [float(x) for x in re.findall(r"accuracy ([\d.]+)", printed)]
    alone, unscaled, scaled, both = accuracies
    assert min(alone, scaled, both) > 0.9
    assert unscaled < 0.5
    skipped = int(re.search(r"(\d+) steps skipped", printed)[1])
    assert skipped > 0
