from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.casting import frozen_weights
from halfstep.numerics.lint import lint, lint_source
from halfstep.optim import AdamW
from halfstep.policy.plan import Plan, PlanRule
from halfstep.recipes import RECIPES
from halfstep.scaling import NoLossScale
from halfstep.session import prepare


def half_step(forward, size=8):
    """A step in pure fp16 whose forward is `forward(layer, x)`."""
    layer = nn.Linear(size, size).half()

    def step(x):
        loss = forward(layer, x.half()).float().mean()
        loss.backward()

    return step, torch.randn(4, size)


def tiny_epsilon(layer, x):
    h = layer(x)
    return h / (h.abs() + 1e-8)


def mask_filled(layer, x):
    return torch.softmax(layer(x).masked_fill(x > 0, -1e9), -1)


def mask_added(layer, x):
    return torch.softmax(layer(x) + (x > 0).half() * -1e9, -1)


def mask_cast(layer, x):
    bias = torch.zeros(x.shape).masked_fill(x > 0, -1e9)
    return torch.softmax(layer(x) + bias.half(), -1)


def long_softmax(layer, x):
    return torch.softmax(layer(x)[:1, :1].expand(1, 70_000) * 1, -1)


def long_sum(layer, x):
    return layer(x)[:1, :1].expand(1, 70_000).sum() / 70_000


def long_mean(layer, x):
    return layer(x)[:1, :1].expand(1, 70_000).mean()


@pytest.mark.parametrize(
    ("forward", "rule"),
    [
        (tiny_epsilon, "epsilon"),
        (mask_filled, "mask"),
        (mask_added, "mask"),
        (mask_cast, "mask"),
        (long_softmax, "softmax"),
        (long_sum, "long reduction"),
        (long_mean, "long reduction"),
    ],
)
def test_what_one_step_shows(forward, rule):
    step, x = half_step(forward)
    found = lint(step, x)
    assert [f.rule for f in found] == [rule]
    assert found[0].where.startswith("test_lint.py:")
    assert found[0].cure


def test_bce_on_probabilities():
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    criterion = nn.BCELoss()

    def step(x):
        criterion(model(x), torch.ones(3, 1)).backward()

    assert [f.rule for f in lint(step, torch.randn(3, 4))] == ["probabilities"]


def test_a_banned_op_is_a_finding():
    model = nn.Linear(4, 1)
    amp = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="fp16")

    def step(x):
        with amp.autocast():
            loss = F.binary_cross_entropy(torch.sigmoid(model(x)), torch.ones(3, 1))
        amp.backward(loss)
        amp.step()

    assert "banned op" in [f.rule for f in lint(step, torch.randn(3, 4))]


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("positions", torch.arange(4096).float())
        self.register_buffer("far", torch.tensor([1.0, 1e6]))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))
        self.norm = nn.BatchNorm1d(4)


def test_buffers():
    found = lint(model=Rotary(), becomes="fp16")
    assert {(f.rule, f.where) for f in found} == {("low buffer", "positions"), ("low buffer", "far")}
    assert lint(model=Rotary()) == []
    half = Rotary()
    half.norm.half()
    assert {f.where for f in lint(model=half)} == {"norm.running_mean", "norm.running_var"}


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        self.seen += 1
        return self.line(x * self.table)


@pytest.mark.parametrize("plan", [None, Plan([PlanRule("seen", dtype="bf16")])])
def test_a_low_buffer_that_the_step_changes(plan):
    model = Counting()
    amp = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2", dtype="bf16", plan=plan)

    def step(x):
        with amp.autocast():
            loss = model(x).float().mean()
        amp.backward(loss)
        amp.step()

    found = [f.where for f in lint(step, torch.ones(2, 4), session=amp) if f.rule == "low buffer"]
    assert found == (["seen"] if plan else [])
    assert not model.seen


def test_optimizer_over_half_weights():
    model = nn.Linear(64, 64).half()
    with torch.no_grad():
        model.weight.fill_(1.0)
    found = lint(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-5))
    assert {f.rule for f in found} == {"epsilon", "learning rate"}
    assert not lint(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4))


def test_fp16_without_a_scale():
    model = nn.Linear(4, 1)
    amp = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="fp16", loss_scale=NoLossScale())
    assert [f.rule for f in lint(session=amp)] == ["loss scale"]


SCRIPT = """
scaler.scale(loss).backward()
{unscale}
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
"""


def test_source():
    bad = lint_source(SCRIPT.format(unscale=""), "train.py")
    assert [(f.rule, f.where) for f in bad] == [("clipping", "train.py:4")]
    good = SCRIPT.format(unscale="scaler.unscale_(optimizer)")
    assert lint_source(good) == []
    assert [f.rule for f in lint_source("loss = nn.BCELoss()(p, y)")] == ["probabilities"]
    amp = "amp.backward(loss)\nclip_grad_norm_(ps, 1.0)\namp.step()"
    assert [f.rule for f in lint_source(amp)] == ["clipping"]
    with pytest.raises(SyntaxError):
        lint_source("def (")


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "text-gpt"])
@pytest.mark.parametrize(("level", "dtype"), [("O1", "bf16"), ("O1", "fp16"), ("O2", "fp16"), ("O0", None)])
def test_no_false_alarm_on_healthy_recipes(name, level, dtype):
    recipe = RECIPES[name]
    model, optimizer = recipe.build(0)
    amp = prepare(model, optimizer, level=level, dtype=dtype)
    batch = next(iter(recipe.task().train(0)))

    def step(x, y):
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step()

    assert lint(step, *batch) == []


def cell_called(times, frozen=False):
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    amp = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1", dtype="bf16")

    def step(x):
        with amp.autocast(), frozen_weights(model) if frozen else nullcontext():
            for _ in range(times):
                x = model(x).tanh()
            loss = x.float().pow(2).mean()
        amp.backward(loss)
        amp.step()

    return [f for f in lint(step, torch.randn(4, 32), session=amp) if f.rule == "repeated casts"]


def test_copies_of_a_reused_weight_are_found_once_they_outweigh_the_model():
    (finding,) = cell_called(24)
    assert finding.where == "weight"
    assert all(words in finding.text for words in ("24 times", "0.0507 MB", "0.0021 MB"))
    assert "frozen_weights" in finding.cure
    assert cell_called(24, frozen=True) == [] == cell_called(4)


def table_called(times, dtype="bf16", **options):
    torch.manual_seed(0)
    model = nn.Embedding(8, 4)
    optimizer = AdamW(model.parameters(), **options)
    amp = prepare(model, optimizer, level="O2", dtype=dtype)

    def step(ids):
        with amp.autocast():
            loss = torch.stack([model(i) for i in ids]).float().square().mean()
        amp.backward(loss)
        amp.step()

    rows = lint(step, torch.zeros(times, dtype=torch.long), session=amp)
    return [f for f in rows if f.rule == "long gradient sum"]


def test_a_16_bit_weight_that_is_used_too_often_before_a_backward_is_named():
    (finding,) = table_called(65)
    assert finding.where == "weight"
    assert "65 times" in finding.text
    assert "accumulate='fp32'" in finding.cure
    assert table_called(64) == table_called(65, "fp16") == table_called(65, accumulate="fp32") == []
    assert len(table_called(513, "fp16")) == 1


def test_copies_that_each_micro_batch_frees_do_not_add_up():
    model = nn.Linear(32, 32)
    amp = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1", dtype="bf16")

    def step(x):
        for _ in range(24):
            with amp.autocast():
                loss = model(x).float().pow(2).mean()
            amp.backward(loss)
        amp.step()

    assert "repeated casts" not in {f.rule for f in lint(step, torch.randn(4, 32), session=amp)}
