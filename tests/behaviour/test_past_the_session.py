"""What users do past a session: loops of their own, copies, averages, weights set by hand, settings."""

import copy
import io
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep as hs
from halfstep.errors import CheckpointError, ConfigError, HalfstepWarning, ScalerStateError, UnsupportedError

BF16, F32 = torch.bfloat16, torch.float32
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
OPTIMIZERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "halfstep": lambda p: hs.optim.AdamW(p, lr=1e-3),
}
each_kind = pytest.mark.parametrize("kind", OPTIMIZERS)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))


def prepared(kind="torch", level="O2", dtype="bf16", **options):
    model = net()
    return model, hs.prepare(model, OPTIMIZERS[kind](model.parameters()), level=level, dtype=dtype, **options)


def train(model, amp, steps=1):
    for _ in range(steps):
        with amp.autocast():
            loss = model(X).square().mean()
        amp.backward(loss)
        amp.step()


def exact(amp):
    """The fp32 weights by name."""
    with amp.evaluating():
        return {name: p.detach().float().clone() for name, p in amp.model.named_parameters()}


# --- a loop that steps itself ------------------------------------------------------------------------------


@each_kind
def test_a_loop_that_steps_itself_is_told_once_that_nothing_is_scaled(kind):
    model, amp = prepared(kind, "O1", "fp16")
    for first in (True, False):
        with amp.autocast():
            loss = model(X).float().square().mean()
        loss.backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            amp.optimizers[0].step()
        assert [w.category for w in said] == ([HalfstepWarning] if first else [])
        if first:
            assert "amp.backward(loss); amp.step() for loss.backward(); optimizer.step()" in str(
                said[0].message
            )


def test_a_step_without_gradients_and_steps_of_the_session_say_nothing():
    model, amp = prepared("torch", "O1", "fp16")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        amp.optimizers[0].step()
        train(model, amp, 2)
    assert [str(w.message) for w in said] == []


def test_gradients_kept_with_their_scale_are_refused():
    model, amp = prepared("halfstep", "O1", "fp16")
    with amp.autocast():
        loss = model(X).float().square().mean()
    amp.backward(loss)
    amp.step(zero_grad=False)
    with pytest.raises(ScalerStateError, match="carry the session's loss scale"):
        amp.optimizers[0].step()


# --- copies and averages -----------------------------------------------------------------------------------


@each_kind
def test_a_copy_of_a_prepared_model_is_fp32_from_its_masters(kind):
    model, amp = prepared(kind)
    train(model, amp, 3)
    twin = copy.deepcopy(model)
    assert {p.dtype for p in twin.parameters()} == {F32}
    for (name, p), want in zip(twin.named_parameters(), exact(amp).values()):
        assert torch.equal(p, want), name
    assert twin(X).dtype == F32
    assert twin.float()(X).dtype == F32
    with amp.evaluating():
        torch.testing.assert_close(twin(X), model(X))
    assert model[0].weight.dtype == BF16
    part = copy.deepcopy(model[3])
    assert torch.equal(part.weight, twin[3].weight)
    train(model, amp)


@each_kind
def test_a_copy_can_be_prepared_and_pickled(kind):
    model, amp = prepared(kind)
    train(model, amp)
    twin = copy.deepcopy(model)
    again = hs.prepare(twin, OPTIMIZERS[kind](twin.parameters()), level="O2", dtype="bf16")
    train(twin, again, 2)
    again.revert()
    assert pickle.loads(pickle.dumps(model))[0].weight.dtype == BF16


@each_kind
def test_averages_made_after_prepare_move_at_decay_0_9999(kind):
    model, amp = prepared(kind)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    with pytest.raises(RuntimeError, match="dtype"):  # torch's own words; nothing is averaged in 16 bits
        averaged.update_parameters(model)
        averaged.update_parameters(model)
    by_hand = copy.deepcopy(model).eval()  # YOLOv5's ModelEMA, timm's
    start = exact(amp)
    train(model, amp, 5)
    for _ in range(5):
        with amp.evaluating():
            averaged.update_parameters(model)
        for value, new in zip(by_hand.state_dict().values(), model.state_dict().values()):
            value.mul_(0.9999).add_((1 - 0.9999) * new.detach())
    for average in (averaged.module, by_hand):
        for (name, p), before in zip(average.named_parameters(), start.values()):
            assert p.dtype == F32
            assert not torch.equal(p, before), name


@each_kind
def test_what_is_computed_in_evaluating_can_be_trained_with(kind):
    model, amp = prepared(kind)
    with amp.evaluating():
        target = model(X)
        assert not target.requires_grad
        assert not target.is_inference()
        twin = copy.deepcopy(model)
    with amp.autocast():
        loss = (model(X) - target).square().mean() + (model(X) * target).sum() * 1e-3
    amp.backward(loss)
    amp.step()
    twin(X).sum().backward()


# --- weights set by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", ["data", "no_grad", "load", "load part", "clamp"])
@each_kind
def test_weights_set_by_hand_at_o2_stay_set(kind, edit):
    model, amp = prepared(kind)
    train(model, amp, 2)
    value = torch.full_like(model[3].weight, 0.25)
    state = {**model.state_dict(), "3.weight": value}
    edits = {
        "data": lambda: model[3].weight.data.copy_(value),
        "no_grad": lambda: model[3].weight.detach().copy_(value),
        "load": lambda: model.load_state_dict(state),
        "load part": lambda: model[3].load_state_dict({"weight": value, "bias": state["3.bias"]}),
        "clamp": lambda: model[3].weight.data.fill_(9.0).clamp_(-0.25, 0.25),
    }
    edits[edit]()
    train(model, amp)
    assert (exact(amp)["3.weight"] - 0.25).abs().max() < 0.01


def test_a_loop_that_clamps_through_data_is_followed_to_the_end():
    model, amp = prepared()
    for _ in range(30):
        train(model, amp)
        for p in model.parameters():
            p.data.clamp_(-0.01, 0.01)
    assert max(float(p.abs().max()) for p in exact(amp).values()) <= 0.0101


@pytest.mark.parametrize("edit", ["copied", "halved", "moved"])
@each_kind
def test_a_weight_set_through_data_late_in_training_stays_set(kind, edit):
    model, amp = prepared(kind)
    train(model, amp, 23)
    weight = model[3].weight
    value = torch.full_like(weight, 0.25)
    if edit == "copied":
        weight.data.copy_(value)
    elif edit == "halved":
        value = weight.detach() / 2
        weight.data.mul_(0.5)
    else:
        weight.data = value.clone()
    train(model, amp)
    assert (exact(amp)["3.weight"] - value).abs().max() < 0.015


def test_single_elements_changed_through_data_late_are_followed():
    model, amp = prepared("torch")
    weight = model[3].weight
    steps = 0

    def until(last):
        nonlocal steps
        while steps < last:
            train(model, amp, 1)
            weight.data[0, 1] = 0.5
            steps += 1

    train(model, amp, 22)
    steps = 22
    until(40)
    train(model, amp, 1)
    assert abs(float(exact(amp)["3.weight"][0, 1]) - 0.5) < 0.02


# --- prepare, revert and settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_skips": 0},
        {"on_nonfinite": "perhaps"},
        {"skip_nonfinite": "false"},
        {"loss_scale": "much"},
        {"kernels": "fastest"},
        {"layout": "sideways"},
        {"plan": hs.Plan.from_toml('[[rule]]\npattern = "nowhere"\ndtype = "fp32"\nreason = "none"')},
    ],
    ids=str,
)
@each_kind
def test_prepare_changes_nothing_if_it_raises(kind, wrong):
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(hs.HalfstepError):
        hs.prepare(model, optimizer, level="O2", dtype="bf16", **wrong)
    for name, value in model.state_dict().items():
        assert value.dtype == F32
        assert torch.equal(value, before[name])
    assert all(
        a is b for now, then in zip(optimizer.param_groups, groups) for a, b in zip(now["params"], then)
    )
    hs.prepare(model, optimizer, level="O2", dtype="bf16").revert()


@pytest.mark.filterwarnings("ignore:.*too coarse for a step")
@each_kind
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_revert_finds_what_was_prepared_through_the_model(kind, level):
    model = net()

    def setup():
        hs.prepare(model, OPTIMIZERS[kind](model.parameters()), level=level, dtype="bf16")

    setup()
    if level != "O1":
        with pytest.raises(ConfigError, match=r"already converted to .*hs\.revert\(model\)"):
            setup()
        hs.revert(model)
    assert {p.dtype for p in model.parameters()} == {F32}
    setup()
    if level != "O1":
        hs.revert(model)
    with pytest.raises(ConfigError, match="not prepared"):
        hs.revert(net())


def test_a_session_shows_itself():
    model, amp = prepared("torch", "O2", "fp16")
    train(model, amp, 2)
    for part in ("O2", "AdamW: 2 steps, 0 skipped, loss scale 65536", "c=fp16"):
        assert part in str(amp)
        assert part in repr(amp)


def test_what_a_session_derives_cannot_be_set():
    _, amp = prepared()
    kinds = {name: getattr(type(amp), name) for name in dir(type(amp))}
    derived = {name for name, kind in kinds.items() if isinstance(kind, property) and kind.fset is None}
    assert {"group", "level", "loss_scales", "model", "skips", "steps"} <= derived
    for name in derived:
        with pytest.raises(AttributeError, match=f"property '{name}' of 'Session' object has no setter"):
            setattr(amp, name, None)


def test_methods_of_a_session_may_be_wrapped_and_put_back():
    model, amp = prepared()
    called = []

    def wrapped(name, own):
        return lambda *given, **named: (called.append(name), own(*given, **named))[1]

    for name in ("autocast", "backward", "step"):
        setattr(amp, name, wrapped(name, getattr(amp, name)))
    train(model, amp, 1)
    for name in ("autocast", "backward", "step"):
        delattr(amp, name)
    train(model, amp, 1)
    assert called == ["autocast", "backward", "step"]
    assert amp.steps == 2


def test_a_loss_scale_that_is_none_is_refused():
    _, amp = prepared()
    with pytest.raises(ConfigError, match="loss_scale = 3: expected a LossScale"):
        amp.loss_scale = 3


def test_a_step_without_an_optimizer_says_what_to_do():
    model = net()
    amp = hs.prepare(model, level="O1", dtype="bf16")
    amp.backward(model(X).sum())
    with pytest.raises(ConfigError, match=r"no optimizer.*prepare\(model, optimizer\)"):
        amp.step()


def test_numbers_of_numpy_are_numbers():
    model, amp = prepared("torch", "O1", "fp16", loss_scale=np.float32(256.0), max_skips=np.int64(3))
    with amp.autocast():
        loss = model(X).float().square().mean()
    amp.backward(loss)
    assert amp.step(clip_norm=np.float32(0.5)).scale == 256.0


def test_what_cannot_be_prepared_or_pickled_says_so():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(net(), X)
    with pytest.raises(ConfigError, match="ScriptModule"):
        hs.prepare(scripted, level="O2", dtype="bf16")
    _, amp = prepared()
    for copier in (pickle.dumps, copy.deepcopy, lambda s: torch.save(s, io.BytesIO())):
        with pytest.raises(UnsupportedError, match="state_dict"):
            copier(amp)


def test_a_checkpoint_loaded_before_prepare_is_told():
    model, amp = prepared()
    train(model, amp, 2)
    saved = copy.deepcopy((model.state_dict(), amp.optimizers[0].state_dict()))
    fresh = net()
    optimizer = OPTIMIZERS["torch"](fresh.parameters())
    fresh.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with pytest.warns(HalfstepWarning, match=r"loses its fp32 masters.*prepare\(\) first"):
        hs.prepare(fresh, optimizer, level="O2", dtype="bf16").revert()


def test_a_session_state_of_something_else_is_refused():
    _, amp = prepared()
    with pytest.raises(CheckpointError):
        amp.load_state_dict({"format": 2})


def test_a_layer_made_orthogonal_stays_fp32_by_a_plan():
    """torch has no products of reflections in 16 bits: docs/troubleshooting.md."""
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = hs.Plan([hs.PlanRule("0", dtype="fp32")])
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16", plan=plan)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, amp, 2)
    assert [p.dtype for p in model[0].parameters()] == [torch.float32] * 2
    assert model[1].weight.dtype == torch.bfloat16
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before))


# --- said in our own words ---------------------------------------------------------------------------------


@each_kind
def test_a_layer_added_to_the_optimizer_alone_and_one_that_was_replaced_are_refused(kind):
    model, amp = prepared(kind, "O1")
    amp.optimizers[0].add_param_group({"params": list(nn.Linear(2, 2).parameters())})
    with pytest.raises(
        ConfigError, match=r"2 of 8 parameters of this AdamW are not the model's.*add it to the model and"
    ):
        train(model, amp)
    model, amp = prepared(kind, "O1")
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(
        ConfigError, match=r"1 of 6 parameters of this AdamW are not the model's.*replace parameters"
    ):
        train(model, amp)


def test_a_scheduler_s_class_and_a_number_as_a_loss_are_named_and_a_level_may_come_third():
    _, amp = prepared(level="O1")
    with pytest.raises(
        ConfigError,
        match=r"step\(scheduler=.*StepLR.*\): expected a scheduler made of its class and the optimizer",
    ):
        amp.step(scheduler=torch.optim.lr_scheduler.StepLR)
    with pytest.raises(ConfigError, match=r"backward got 1\.0 of type float, expected the loss as a tensor"):
        amp.backward(1.0)
    fresh = net()
    assert hs.prepare(fresh, OPTIMIZERS["torch"](fresh.parameters()), "O2").level.name == "O2"


@pytest.mark.parametrize("skips", [True, False])
def test_raise_and_skip_nonfinite_contradict_each_other(skips):
    with pytest.raises(ConfigError, match=f"on_nonfinite='raise' with skip_nonfinite={skips}: drop one"):
        prepared(on_nonfinite="raise", skip_nonfinite=skips)


@each_kind
def test_preparing_twice_at_o2_is_refused_by_the_words_in_troubleshooting(kind):
    model, amp = prepared(kind)
    rows = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        hs.prepare(model, amp.optimizers[0], level="O2", dtype="bf16")
    known = ["this model was already converted", "optimizer 0 (AdamW) already has master weights"]
    assert sum(words in str(refused.value) and f"`{words}`" in rows for words in known) == 1


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_model_loaded_whole_can_be_reverted_and_prepared_again(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.GRU(4, 3))
    hs.prepare(model, hs.optim.AdamW(model.parameters()), level=level, dtype="bf16")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    with pytest.raises(ConfigError, match=r"a copy of a converted .*hs\.revert\(model\) makes it fp32"):
        hs.prepare(copied, torch.optim.SGD(copied.parameters(), lr=0.1), level="O2", dtype="bf16")
    with pytest.warns(hs.HalfstepWarning, match="masters stay with the original"):
        hs.revert(copied)
    wanted = {name: value.float() for name, value in model.state_dict().items()}
    assert all(torch.equal(value, wanted[name]) for name, value in copied.state_dict().items())
    assert copied(torch.ones(2, 5, 8))[0].dtype == torch.float32
    with pytest.raises(ConfigError, match="not prepared"):
        hs.revert(copied)
    amp = hs.prepare(copied, torch.optim.SGD(copied.parameters(), lr=0.1), level="O2", dtype="bf16")
    assert copied[0].weight.dtype == torch.bfloat16
    amp.revert()


def test_what_a_conversion_holds_is_its_own_to_revert():
    model = nn.Linear(8, 3)
    conversion = hs.convert(model, "O2", "bf16")
    with pytest.raises(ConfigError, match="not prepared"):
        hs.revert(model)
    conversion.revert()
    assert model.weight.dtype == torch.float32
