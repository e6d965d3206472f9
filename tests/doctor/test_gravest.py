"""The headline is the fault that harms, not the earliest one; each fault is harmless or not by itself."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.doctor.ledger import Ledger, Note
from halfstep.numerics.cause import Cause
from halfstep.numerics.fault import Fault
from halfstep.numerics.remedies.base import WORKS
from halfstep.numerics.remedies.loss import larger_scale, lift_loss_scale
from halfstep.numerics.snapshot import StepParticipants
from halfstep.numerics.tape import OpLocation
from halfstep.numerics.trace import first_bad_op
from tests.doctor import zoo
from tests.doctor.test_zoo import check, examine

BEGIN = """
import torch, halfstep as hs
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = self.a(x)
        return self.b(h * h)  # MUL

torch.manual_seed(1)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
"""

BEHIND_A_START = (
    BEGIN.replace("# MUL", "# HERE")
    + """
amp = hs.prepare(model, opt, dtype="fp16", loss_scale=hs.DynamicLossScale(2.0**24, backoff=0.7))
for i in range(12):
    x = torch.randn(6, 8)
    if i >= 9:
        x = x * 1e3
    with amp.autocast():
        loss = model(x).float().square().mean()
    amp.backward(loss)
    amp.step()
"""
)

AFTER_A_START = """
import torch, halfstep as hs
from torch import nn

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
amp = hs.prepare(model, opt, dtype="fp16", loss_scale=hs.DynamicLossScale(2.0**20))
for i in range(14):
    x = torch.randn(6, 8)
    with amp.autocast():
        out = model(x).float()
        loss = out.square().mean()
        if i >= 9:
            loss = loss + torch.log(loss - loss)  # HERE
    amp.backward(loss)
    amp.step()
"""


@pytest.mark.parametrize("way", ["copies", "anew"])
def test_a_fault_that_follows_a_run_of_skips_at_once_leads(way, tmp_path, monkeypatch):
    """12 of 12 steps are skipped: the first nine by a scale that is too high, the rest by another op."""
    script = zoo.Script("behind", BEHIND_A_START, 9, "forward", "", ("mul",), ("range",))
    document = examine(script, tmp_path, monkeypatch, way)
    check(script, document)
    assert "12 of 12 steps skipped" in "\n".join(document.verdict)


LIKE_THE_START = """
import torch, halfstep as hs
from torch import nn

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
amp = hs.prepare(model, opt, dtype="fp16", loss_scale=hs.DynamicLossScale(2.0**24))
for i in range(14):
    with amp.autocast():
        out = model(torch.randn(6, 8))
    loss = out.float().square().mean()
    if i >= 6:
        loss = loss + (loss - loss).sqrt()  # HERE
    amp.backward(loss)
    amp.step()
"""


@pytest.mark.parametrize("way", ["copies", "anew"])
def test_a_fault_that_spoils_what_the_skips_before_it_spoiled_leads(way, tmp_path, monkeypatch):
    """Nothing but the op tells them apart; a run of skips is traced again, ever more seldom."""
    script = zoo.Script("like", LIKE_THE_START, -1, "backward", "", ("sqrt",), ("mathematics",))
    document = examine(script, tmp_path, monkeypatch, way)
    check(script, document)
    assert document.faults[0].step == 7
    assert [(c.kind, c.status) for c in document.faults[0].cures] == [("clamp", WORKS)]


@pytest.mark.parametrize("way", ["copies", "anew"])
def test_a_start_that_settled_is_harmless_beside_a_later_fault(way, tmp_path, monkeypatch):
    script = zoo.Script("after", AFTER_A_START, 9, "forward", "", ("log",), ("mathematics",), cure="clamp")
    document = examine(script, tmp_path, monkeypatch, way)
    check(script, document)
    early = [fault for fault in document.bad if fault.step < 9]
    assert early
    assert all(fault.harmless for fault in early)


def ledger(*steps):
    """`s`: skipped, its gradients not finite; `l`: skipped, its loss not finite; `.`: taken."""
    kinds = {"s": ("gradient", True), "l": ("loss", True), ".": ("", False), "x": ("parameter", False)}
    found = Ledger()
    for number, kind in enumerate(*steps):
        bad, skipped = kinds[kind]
        found.notes.append(Note(number, bad=bad, skipped=skipped, taken=not skipped))
    return found


@pytest.mark.parametrize(
    ("steps", "index", "settled"),
    [
        ("ss......", 0, True),
        ("ss......llll", 0, True),
        ("ss......x", 0, True),
        ("sssss", 0, False),
        ("ssslll", 0, False),
        (".....sssss", 5, False),
        (".....s", 5, True),
        (".....ss.", 5, True),
        ("x.......", 0, False),
    ],
)
def test_a_skip_is_judged_by_what_follows_it(steps, index, settled):
    assert ledger(steps).is_recovered(index) is settled


def test_a_dynamic_scale_is_not_offered_where_the_scale_is_dynamic():
    model = nn.Linear(4, 2)
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="fp16")
    moving = larger_scale(4, StepParticipants(None, [amp]))
    assert moving.code == "hs.prepare(..., loss_scale=hs.DynamicLossScale(268435456))"
    amp.revert()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="fp16", loss_scale=8.0)
    assert 'loss_scale="dynamic"' in larger_scale(4, StepParticipants(None, [amp])).code


def test_a_trial_of_another_scale_keeps_its_kind_and_bounds():
    model = nn.Linear(4, 2)
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="fp16")
    parts = StepParticipants(None, [amp])
    with ExitStack() as stack:
        lift_loss_scale(parts, stack, -40.0)
        assert parts.scale_moves
        assert amp.loss_scale.read() == 1.0
    assert amp.loss_scale.read() == 2.0**16


def test_an_infinite_loss_is_not_nothing():
    cause = Cause("range", "range: it ends")
    fault = Fault("forward", "mul", OpLocation("", "", None, "", 0), cause, reached=("loss",))
    assert "spoiled: the loss" in fault.story()
    assert fault.as_dict()["spoiled"] == "the loss"


def test_a_value_just_beyond_the_range_is_not_one_time_too_large():
    def over():
        return (torch.tensor([65504.0]).half() + torch.tensor([40.0]).half()).sum()

    bad = first_bad_op(over)
    assert bad is not None
    assert "just beyond" in bad.cause.text
    assert "1 times" not in bad.cause.text
