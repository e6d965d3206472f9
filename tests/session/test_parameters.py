"""Parameters that several optimizers of a session share, or that one is given later: right, or refused."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import ConfigError, ScalerStateError

LIBRARIES = {"torch": torch.optim, "ours": hs.optim}
X = torch.ones(2, 4)
RATE = 2.0**-9


def zeros():
    model = nn.Linear(4, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


# --- given later -----------------------------------------------------------------------------------------


def moved_by_the_last_of_three_steps(library, when, keeps, prepare=None):
    """How far an added bias moves, in units of one step on one loss; its gradients of all steps add up."""
    model = zeros()
    optimizer = LIBRARIES[library].SGD([model.weight], lr=RATE)
    amp = prepare(model, optimizer) if prepare else None

    def add():
        optimizer.add_param_group({"params": [model.bias]})

    for step in range(3):
        if step == 2 and when == "before backward":
            add()
        with amp.autocast() if amp else nullcontext():
            loss = model(X).float().mean()
        (amp.backward if amp else torch.Tensor.backward)(loss)
        if step == 2 and when == "after unscale" and amp:
            amp.unscale()
        if step == 2 and when != "before backward":
            add()
        if amp:
            assert amp.step(zero_grad=step != 1 or not keeps).taken
        else:
            optimizer.step()
            if step != 1 or not keeps:
                optimizer.zero_grad()
    if amp:
        amp.revert()
    return -float(model.bias.detach()) / RATE


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("keeps", [False, True], ids=["cleared", "kept"])
@pytest.mark.parametrize("when", ["before backward", "after backward", "after unscale"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_gradients_of_a_parameter_that_is_added_are_those_of_plain_torch(library, when, keeps, level):
    def prepare(model, optimizer):
        dtype = None if level == "O0" else "fp16"
        return hs.prepare(model, optimizer, level, dtype=dtype, loss_scale=1024.0, kernels="native")

    assert moved_by_the_last_of_three_steps(library, when, keeps) == 3.0
    assert moved_by_the_last_of_three_steps(library, when, keeps, prepare) == 3.0


@pytest.mark.parametrize("change", ["scale", "losses"])
def test_gradients_that_several_scales_have_added_up_are_refused_by_name_until_they_are_cleared(change):
    model = zeros()
    optimizer = torch.optim.SGD([model.weight], lr=RATE)
    scale = [1024.0, 2048.0] if change == "losses" else 1024.0
    amp = hs.prepare(model, optimizer, "O0", loss_scale=scale)
    for number in range(2):
        amp.backward(model(X).mean(), loss_id=number if change == "losses" else 0)
        amp.step()
        if change == "scale":
            amp.loss_scale = hs.StaticLossScale(2048.0)
    optimizer.add_param_group({"params": [model.bias]})
    refused = r"'bias' was added to optimizer 0 \(SGD\) with a gradient .* several loss scales.*grad to None"
    for _ in range(2):
        with pytest.raises(ScalerStateError, match=refused):
            amp.backward(model(X).mean())
    model.bias.grad = None
    amp.backward(model(X).mean())
    amp.step()
    assert float(model.bias.detach()) == -RATE


def test_a_parameter_added_with_an_overflow_in_its_gradient_costs_a_skipped_step_that_is_said():
    model = zeros()
    optimizer = torch.optim.SGD([model.weight], lr=RATE)
    amp = hs.prepare(model, optimizer, "O0", loss_scale="dynamic")
    amp.backward(model(X * torch.tensor([[1.0], [float("inf")]])).mean())
    amp.step()
    model.bias.grad = torch.full_like(model.bias, float("inf"))
    optimizer.add_param_group({"params": [model.bias]})
    for taken in (False, True):
        amp.backward(model(X).mean())
        assert amp.step().taken is taken
    assert float(model.bias.detach()) == -RATE


# --- shared ----------------------------------------------------------------------------------------------

KINDS = {
    "exact": lambda p: hs.optim.SGD(p, lr=1e-3),
    "fp32": lambda p: hs.optim.AdamW(p, lr=1e-3, master="fp32"),
    "none": lambda p: hs.optim.SGD(p, lr=1e-3, master=None),
    "torch": lambda p: torch.optim.SGD(p, lr=1e-3),
}
WITH_MASTERS = {"O1": set(), "O2": {"exact", "fp32", "torch"}, "O3": {"exact", "fp32"}}
"""The kinds of optimizers that keep masters at each level."""


@pytest.mark.parametrize("later", [False, True], ids=["at prepare", "added"])
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_one_16_bit_weight_has_one_master_or_is_refused_by_name(first, second, level, later):
    model = nn.ModuleDict({"shared": zeros(), "other": zeros()})
    shared = list(model["shared"].parameters())
    optimizers = [
        KINDS[first](shared),
        KINDS[second]([*model["other"].parameters(), *([] if later else shared)]),
    ]

    def run():
        amp = hs.prepare(model, optimizers, level, dtype="bf16", kernels="native")
        if later:
            optimizers[1].add_param_group({"params": shared})
        with amp.autocast():
            loss = sum(part(X).float().mean() for part in model.values())
        amp.backward(loss)
        assert amp.step(optimizers[0], zero_grad=False).taken
        assert amp.step(optimizers[1]).taken
        if level == "O1":  # fp32 weights: both move it
            assert model["shared"].bias.item() == pytest.approx(-2e-3, rel=1e-4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of 16-bit weights without masters
        if {first, second} <= WITH_MASTERS[level]:
            with pytest.raises(ConfigError, match=r"'shared.weight' is in optimizer 0 \(.*1 \(.*fp32 master"):
                run()
            assert later or {p.dtype for p in model.parameters()} == {torch.float32}, "nothing is changed"
        else:
            run()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("way", ["step", "unscale", "cleared"])
def test_the_loss_scale_is_divided_out_of_a_shared_gradient_once_or_it_is_refused(way, library):
    model = zeros()
    optimizers = [LIBRARIES[library].SGD(model.parameters(), lr=RATE) for _ in range(2)]
    amp = hs.prepare(model, optimizers, "O0", loss_scale=1024.0)

    def run():
        for optimizer in optimizers:
            if way == "cleared" or optimizer is optimizers[0]:
                amp.backward(model(X).mean(), optimizer if way == "cleared" else None)
            if way == "unscale":
                amp.unscale(optimizer)
            assert amp.step(optimizer, zero_grad=way == "cleared").taken

    if way == "unscale" or (way, library) == ("step", "torch"):
        with pytest.raises(ScalerStateError, match=r"'weight' is in optimizers 0 and 1.*in one of them"):
            run()
        assert float(model.bias.detach()) == 0
    else:
        run()
        assert float(model.bias.detach()) == -2 * RATE


def with_expanded(**way):
    model = nn.Linear(3, 2)
    model.scale = nn.Parameter(torch.randn(2, 1).expand(2, 5))
    return model, torch.optim.AdamW([model.weight, model.bias], lr=0.1, **way)


EXPANDED = r"parameter 'scale' of shape \[2, 5\] is an expanded tensor"


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("way", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_an_expanded_weight_is_refused_by_name_before_a_step(level, way):
    """torch's fused steps write past its end; the others raise, after they have changed other weights."""
    model, optimizer = with_expanded(**way)
    optimizer.add_param_group({"params": [model.scale]})
    before = model.weight.clone()
    with pytest.raises(hs.UnsupportedError, match=EXPANDED):
        hs.prepare(model, optimizer, level, kernels="native")
    assert torch.equal(model.weight, before)


def test_an_expanded_weight_that_is_added_later_is_refused():
    model, optimizer = with_expanded()
    amp = hs.prepare(model, optimizer, "O1", dtype="bf16", kernels="native")
    optimizer.add_param_group({"params": [model.scale]})
    with pytest.raises(hs.UnsupportedError, match=EXPANDED):
        amp.backward((model(torch.ones(1, 3)) @ model.scale).sum())
