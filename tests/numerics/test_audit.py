"""`hs.audit`: one row for each mistake of precision that shows before a step, and none for healthy pairs."""

import sys
import warnings

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import ConfigError
from halfstep.recipes.registry import RECIPES
from tests.silence import silent


def net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).to(dtype)


def rules(found):
    return [row.rule for row in found]


def test_low_weights_at_a_small_rate_are_one_row_with_the_line_that_cures_it():
    model = net()
    found = hs.audit(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    assert rules(found) == ["low buffer", "low buffer", "learning rate"]
    assert found[2].cure.startswith("write hs.optim.AdamW(model.parameters(), lr=1e-06)")
    model[1].float()
    assert hs.audit(model, hs.optim.AdamW(model.parameters(), lr=1e-6)) == []


def test_low_weights_at_a_large_rate_are_named_too():
    model = net()
    model[1].float()
    found = hs.audit(model, torch.optim.RMSprop(model.parameters(), lr=0.1))
    assert rules(found) == ["low weights"]
    assert "RMSprop keeps no fp32 copy of 1,188 bf16 weights" in found[0].text
    assert found[0].cure == "write hs.MasterWeights(optimizer, model), or prepare at level O2"
    hs.MasterWeights(optimizer := torch.optim.RMSprop(model.parameters(), lr=0.1), model)
    assert hs.audit(model, optimizer) == []


def test_a_warm_up_that_begins_at_zero_is_judged_by_the_rate_it_reaches():
    model = net()
    model[1].float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0
    assert rules(hs.audit(model, optimizer)) == ["low weights"]


def test_an_optimizer_of_ours_without_masters_is_found_and_one_that_rounds_at_random_is_not():
    model = net()
    model[1].float()
    found = hs.audit(model, hs.optim.AdamW(model.parameters(), lr=1e-6, master=None))
    assert rules(found) == ["learning rate"]
    assert found[0].cure.startswith("leave master=None out")
    assert hs.audit(model, hs.optim.AdamW(model.parameters(), lr=1e-6, master="stochastic")) == []


def test_an_epsilon_counts_where_the_state_is_fp16():
    model = net(torch.float16)
    model[1].float()
    assert "epsilon" in rules(hs.audit(model, torch.optim.Adam(model.parameters(), lr=0.1)))
    assert hs.audit(model, hs.optim.Adam(model.parameters(), lr=0.1)) == []


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight


def test_tied_weights_that_a_cast_took_apart():
    model = Tied()
    assert hs.audit(model) == []
    model.head.weight = nn.Parameter(model.head.weight.detach().bfloat16())
    found = hs.audit(model)
    assert [(row.rule, row.where) for row in found] == [("tied weights", "head.weight")]
    assert "the same values as table.weight, but bf16 beside fp32" in found[0].text


def test_buffers_are_judged_by_the_dtype_that_they_will_have():
    model = nn.Linear(4, 4)
    model.register_buffer("positions", torch.arange(1000.0))
    assert hs.audit(model) == []
    assert [row.where for row in hs.audit(model, becomes="bf16")] == ["positions"]
    with pytest.raises(hs.ConfigError, match="fp17"):
        hs.audit(nn.Linear(4, 4), becomes="fp17")


def test_it_prints_as_a_table():
    model = net()
    lines = str(hs.audit(model, torch.optim.AdamW(model.parameters(), lr=1e-6))).splitlines()
    assert lines[0].startswith("low buffer     1.running_mean  running statistics in bf16")
    assert lines[5].lstrip().startswith("-> write hs.optim.AdamW")
    assert (
        str(hs.audit(nn.Linear(2, 2))) == "no mistakes of precision found in weights, buffers and optimizer"
    )


def test_what_is_no_model_is_refused():
    model = net()
    with pytest.raises(ConfigError, match=r"audit got a Adam, expected a Module: audit\(model, optimizer\)"):
        hs.audit(torch.optim.Adam(model.parameters()), model)


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "text-gpt"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_healthy_recipes_have_no_row(name, level):
    model, optimizer = RECIPES[name].build(0)
    hs.prepare(model, optimizer, level=level)
    assert hs.audit(model, optimizer) == []


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_prepare_warns_of_the_broken_recipe(level):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    with pytest.warns(hs.HalfstepWarning, match=r"write hs\.optim\.AdamW\(model\.parameters\(\), lr=1e-06\)"):
        hs.prepare(model, optimizer, level=level)


def test_prepare_is_silent_where_updates_are_kept():
    for make, level, rate in [(torch.optim.AdamW, "O2", 1e-6), (hs.optim.AdamW, "O3", 1e-6),
                              (torch.optim.AdamW, "O3", 0.01)]:  # fmt: skip
        model = net()
        with silent():
            hs.prepare(model, make(model.parameters(), lr=rate), level=level)


# --- a fused step that updates nothing -------------------------------------------------------------------


@pytest.fixture
def broken_sgd(monkeypatch):
    """Give torch a fused SGD that updates nothing, whatever the running torch's does."""
    module = sys.modules[torch.optim.SGD.__module__]
    real = module.sgd
    monkeypatch.setattr(module, "sgd", lambda *args, **how: how["fused"] or real(*args, **how))


@pytest.mark.usefixtures("broken_sgd")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}, {"lr": torch.tensor(1e-3)}])
def test_a_fused_step_that_updates_no_16_bit_weight_is_a_row(dtype, options):
    model = nn.Linear(8, 8).to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    found = hs.audit(model, torch.optim.SGD(model.parameters(), **{"lr": 0.0, **options}, fused=True))
    (row,) = [row for row in found if row.rule == "fused step"]
    assert row.where == "SGD group 0"
    assert "torch's fused SGD did not update 64 of 64" in row.text
    assert "fused=False" in row.cure
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before)), "the probe has its own weights"


@pytest.mark.usefixtures("broken_sgd")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_first_step_warns_once_of_a_fused_step_that_updates_no_16_bit_weight(level):
    model = nn.Linear(8, 8)
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), level, dtype="bf16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with amp.autocast():
                loss = model(torch.ones(2, 8)).float().square().mean()
            amp.backward(loss)
            amp.step()
    said = [str(w.message) for w in caught if "did not update 64 of 64 bf16 weights" in str(w.message)]
    assert len(said) == (level == "O3"), "other levels have fp32 weights for the optimizer"


KINDS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"amsgrad": True}, "AdamW": {"lr": 1e-3}, "Adagrad": {}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_audit_says_of_torch_s_fused_steps_what_is_true_of_them(kind, dtype):
    def run(fused):
        p = nn.Parameter(torch.ones(256, dtype=dtype))
        optimizer = getattr(torch.optim, kind)([p], **{**KINDS[kind], "lr": 0.25}, fused=fused)
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        return optimizer, p.detach() - 1

    (optimizer, moved), (_, right) = run(True), run(False)
    idle = "fused step" in rules(hs.audit(nn.Linear(1, 1), optimizer))
    assert idle == (not torch.allclose(moved.float(), right.float(), rtol=0.1))


class Normed(nn.Module):
    """Norms whose weights begin at 1, beside matrices that hold most of the weights."""

    def __init__(self):
        super().__init__()
        self.norm, self.line = nn.LayerNorm(32), nn.Linear(32, 64)

    def forward(self, x):
        return self.line(self.norm(x))


def test_a_tensor_that_stands_still_is_not_hidden_by_its_group():
    model = Normed().bfloat16()
    rows = {row.rule: row.text for row in hs.audit(model, torch.optim.AdamW(model.parameters(), lr=1e-3))}
    assert "1 of 4 bf16 tensors (shape [32]) are too coarse for a step of 0.001" in rows["learning rate"]
    assert "learning rate" not in {row.rule for row in hs.audit(model, hs.optim.AdamW(model.parameters()))}


def through_fp16(kind):
    """An AdamW that trained a little, and its state as a file in fp16 would hold it."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(3):
        (model(torch.randn(16, 8)).square().mean() * 1e-2).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    for entry in state["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = entry[key].half().float()
    return model, kind(model.parameters(), lr=1e-3), state


def test_second_moments_that_went_through_fp16_are_named():
    model, optimizer, state = through_fp16(torch.optim.AdamW)
    optimizer.load_state_dict(state)
    rows = {row.rule: row.text for row in hs.audit(model, optimizer)}
    assert "second moments are zero where first moments are not" in rows["zero moments"]
    model, optimizer, state = through_fp16(hs.optim.AdamW)
    with pytest.warns(hs.HalfstepWarning, match="went through fp16"):
        optimizer.load_state_dict(state)
    model, optimizer, state = through_fp16(torch.optim.AdamW)
    hs.prepare(model, optimizer, level="O2", dtype="bf16")
    with pytest.warns(hs.HalfstepWarning, match="went through fp16"):
        optimizer.load_state_dict(state)
    optimizer = torch.optim.AdamW(nn.Linear(8, 4).parameters())
    assert "zero moments" not in {row.rule for row in hs.audit(nn.Linear(8, 4), optimizer)}


class Adapted(nn.Module):
    """What PEFT makes of a linear layer, in its names."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.cast_input_dtype_enabled = layer.requires_grad_(False), True
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})

    def forward(self, x):
        wide = x.to(self.lora_A["default"].weight.dtype) if self.cast_input_dtype_enabled else x
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](wide))


def test_adapters_in_fp32_on_16_bit_layers_are_one_row():
    def adapted(dtype):
        return nn.Sequential(*(Adapted(nn.Linear(8, 8).to(dtype)) for _ in range(3)))

    model = adapted(torch.bfloat16)
    found = hs.audit(model)
    assert [(row.rule, row.where) for row in found] == [("adapters", "0")]
    assert "3 such layers copy each input to fp32" in found[0].text
    assert "O2" in found[0].cure
    assert "cast_input_dtype_enabled = False" in found[0].cure
    hs.prepare(model, hs.optim.AdamW([p for p in model.parameters() if p.requires_grad]), level="O2")
    assert hs.audit(model) == []
    model = adapted(torch.bfloat16)
    for layer in model:
        layer.cast_input_dtype_enabled = False
    assert hs.audit(model) == []
    assert hs.audit(adapted(torch.float32)) == []
    assert hs.audit(adapted(torch.bfloat16).bfloat16()) == []
