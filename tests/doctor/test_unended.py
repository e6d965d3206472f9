"""A step that a script begins and does not end is examined too: what its guards read is what was wrong."""

import warnings

import pytest
import torch

from halfstep.doctor import script as _script
from halfstep.doctor.script import examine_script
from tests.doctor.test_zoo import run_here

LOOP = """
import math
import numpy as np
import torch
from torch import nn

net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(8):
    x = torch.rand(6, 4)
    if step == 3:
        x[2] = BAD
    loss = (net(x) + torch.log(x)).square().mean()
    GUARD
    opt.zero_grad()
    loss.backward()
    AFTER
    opt.step()
"""
GUARDS = [
    "if not torch.isfinite(loss): continue",
    "if not torch.isfinite(loss): break",
    "if loss.isnan(): raise ValueError('nan')",
    "if math.isnan(loss.item()): raise SystemExit(3)",
    "assert loss == loss, 'nan'",
    "if not (loss < 1e6): continue",
    "if np.isnan(float(loss)): break",
    "if np.isnan(loss.detach().numpy()): continue",
    "torch.distributions.Normal(loss, 1.0)",
]


def examine(text, folder, monkeypatch, copies=True):
    monkeypatch.setattr(_script, "run_in_process", run_here)
    path = folder / "train.py"
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return examine_script(path, [], 0, 0, copies)


def loop(guard="pass", after="pass", bad="-1.0"):
    return LOOP.replace("GUARD", guard).replace("AFTER", after).replace("BAD", bad)


@pytest.mark.parametrize("guard", GUARDS)
def test_what_a_guard_reads_is_followed_to_its_op(guard, tmp_path, monkeypatch):
    document = examine(loop(guard), tmp_path, monkeypatch)
    (fault,) = document.faults
    assert (fault.step, fault.op, fault.where) == (3, "log", "train.py:13")
    assert any(cure.status == "works" for cure in fault.cures)


@pytest.mark.parametrize("guard", GUARDS[:3])
def test_a_fresh_process_says_the_same(guard, tmp_path, monkeypatch):
    (fault,) = examine(loop(guard), tmp_path, monkeypatch, copies=False).faults
    assert (fault.step, fault.op, fault.where) == (3, "log", "train.py:13")


def test_a_guard_of_gradients_is_followed_as_well(tmp_path, monkeypatch):
    text = loop(after="if net.weight.grad.isnan().any(): continue").replace(
        "torch.log(x)", "net(x * 0).sqrt()"
    )
    fault = examine(
        text.replace("nn.Linear(4, 1)", "nn.Linear(4, 1, bias=False)"), tmp_path, monkeypatch
    ).faults[0]
    assert (fault.step, fault.phase, fault.op) == (0, "backward", "sqrt")


def test_an_evaluation_that_is_not_finite_is_examined(tmp_path, monkeypatch):
    text = loop() + "    with torch.no_grad():\n        score = (net(x) / (step != 5)).mean().item()\n"
    (fault,) = examine(text.replace("if step == 3", "if step == 9"), tmp_path, monkeypatch).faults
    assert (fault.step, fault.op, fault.where) == (6, "div", "train.py:20")


def test_data_that_come_so_are_the_datas_fault(tmp_path, monkeypatch):
    text = loop("if torch.isnan(x).any(): continue", bad="float('nan')").replace("torch.log(x)", "x")
    (fault,) = examine(text, tmp_path, monkeypatch).faults
    assert (fault.step, fault.cause.kind) == (3, "data")
    assert "in x of batch 4" in fault.cause.words


@pytest.mark.parametrize(
    "text",
    [
        loop("if not torch.isfinite(loss): continue", bad="1.0"),
        loop("score = x[x > 2].mean().item()", bad="1.0"),
        loop("worst = torch.tensor(-math.inf); worst = max(worst.item(), loss.item())", bad="1.0"),
        loop("shown = torch.zeros(4).masked_fill(x[0] > 0.5, -math.inf).numpy()", bad="1.0"),
    ],
    ids=[
        "a guard that never fires",
        "the mean of nothing",
        "an infinity to begin with",
        "a mask that is shown",
    ],
)
def test_what_is_meant_so_is_healthy(text, tmp_path, monkeypatch):
    document = examine(text, tmp_path, monkeypatch)
    assert document.healthy, document.verdict


def test_a_buffer_that_is_a_mask_is_not_spoiled_by_a_skipped_first_step(tmp_path, monkeypatch):
    """The region opens before the model is met: what its buffers hold then is no damage of the step."""
    document = examine(MASKED, tmp_path, monkeypatch)
    assert document.healthy, document.verdict


MASKED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x):
        return torch.softmax(self.linear(x) @ x.T + self.mask, -1) @ x

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
for step in range(12):
    x = torch.randn(4, 4)
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = net(x).square().mean() + net.linear(x).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
"""


def test_nothing_of_the_reads_is_left(tmp_path, monkeypatch):
    before = torch.isnan, torch.Tensor.item, torch.Tensor.__lt__
    examine(loop(GUARDS[0]), tmp_path, monkeypatch)
    assert (torch.isnan, torch.Tensor.item, torch.Tensor.__lt__) == before
    assert "item" not in vars(torch.Tensor)
