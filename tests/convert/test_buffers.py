"""Buffers are data: levels leave them alone, and what a plan stores in 16 bits is never silently stuck."""

import warnings

import pytest
import torch
from torch import nn

import halfstep as hs

ROUNDS = 600


class Counting(nn.Module):
    """A count, a running mean and a table; `write` says how the first two are changed."""

    def __init__(self, write):
        super().__init__()
        self.line, self.write = nn.Linear(4, 1), write
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("table", torch.rand(4))

    def forward(self, x):
        if self.training:
            self.write(self, x.mean(0))
        return self.line(x + self.center + self.table)


def in_place(model, mean):
    model.seen += 1
    model.center.mul_(0.999).add_(mean, alpha=0.001)


def through_data(model, mean):
    model.seen.data += 1
    model.center.data.lerp_(mean.to(model.center.dtype), 0.001)


def replaced(model, mean):
    model.seen = model.seen + 1
    model.center = (model.center * 0.999 + mean * 0.001).to(model.center.dtype)


def nothing(model, mean):
    del model, mean


def trained(write, steps, plan=None, level="O2"):
    torch.manual_seed(0)
    model = Counting(write)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp = hs.prepare(model, optimizer, level=level, dtype="bf16", plan=plan, kernels="native")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            with amp.autocast():
                loss = model(torch.ones(2, 4)).float().mean()
            amp.backward(loss)
            amp.step()
    return model, [str(one.message) for one in told]


@pytest.mark.parametrize("write", [in_place, through_data, replaced])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_low_buffer_that_training_changes_is_told_once_by_name(write, level):
    model, told = trained(write, 6, hs.Plan([hs.PlanRule("**", dtype="bf16")]), level)
    assert model.seen.dtype == torch.bfloat16
    assert len(told) == 1
    assert "'seen', 'center'" in told[0]
    assert "table" not in told[0]
    assert "hs.PlanRule('seen', dtype='fp32')" in told[0]


def test_tables_and_full_precision_say_nothing():
    assert trained(nothing, 6)[1] == []
    assert trained(in_place, 6, level="O1")[1] == []


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_vectors_that_spectral_norm_finds_anew_say_nothing(norm):
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), level="O2", dtype="bf16")
    for _ in range(6):
        with amp.autocast():
            loss = model(torch.ones(2, 4)).float().mean()
        amp.backward(loss)
        assert amp.step().taken


def test_a_buffer_that_is_changed_once_says_nothing():
    def once(model, mean):
        if model.line.weight.grad is None and not model.center.any():
            model.center.fill_(float(mean[0]))

    assert trained(once, 6)[1] == []


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_levels_leave_buffers_as_they_are(level):
    model, told = trained(in_place, ROUNDS, level=level)
    assert told == []
    assert model.seen.item() == ROUNDS
    torch.testing.assert_close(model.center, torch.full((4,), 1 - 0.999**ROUNDS))
    assert (model.table.dtype, model.line.weight.dtype) == (torch.float32, torch.bfloat16)


def test_the_cure_named_moves_the_buffers_exactly():
    rules = [hs.PlanRule(name, dtype="fp32") for name in ("seen", "**.center")]
    model, told = trained(in_place, ROUNDS, hs.Plan([*rules, hs.PlanRule("**", dtype="bf16")]))
    assert told == []
    assert model.seen.item() == ROUNDS
    torch.testing.assert_close(model.center, torch.full((4,), 1 - 0.999**ROUNDS))
    assert model.table.dtype == model.line.weight.dtype == torch.bfloat16


def test_a_record_names_the_rule_and_revert_brings_all_back():
    model = Counting(nothing)
    table = model.table.clone()
    plan = hs.Plan([hs.PlanRule("center", torch.float32, reason="mine")])
    record = hs.convert(model, "O2", "bf16", plan=plan)
    assert "buffer center kept fp32 (mine)" in str(record)
    record.revert()
    assert model.center.dtype == torch.float32
    assert torch.equal(model.table, table)
