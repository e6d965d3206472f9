"""Frozen weights that an optimizer holds: their fp32 values are kept, and nothing else is made."""

import copy
import pickle

import pytest
import torch
from torch import nn

import halfstep as hs

OPTIMIZERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "exact": lambda p: hs.optim.AdamW(p, lr=1e-2),
    "fp32": lambda p: hs.optim.SGD(p, lr=1e-2, momentum=0.9, master="fp32"),
}
each = pytest.mark.parametrize("kind", OPTIMIZERS)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def net(seed=0, frozen=True):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    model[0].requires_grad_(not frozen)
    return model


def prepared(kind, frozen=True, seed=0):
    model = net(seed, frozen)
    return hs.prepare(model, OPTIMIZERS[kind](model.parameters()), level="O2", dtype="bf16")


def train(amp, steps=2):
    for _ in range(steps):
        with amp.autocast():
            loss = amp.model(X).square().mean()
        amp.backward(loss)
        assert amp.step().taken


def first(amp):
    found = hs.optim.fp32_state_dict(amp.model, amp.optimizers)
    return {name: value for name, value in found.items() if name.startswith("0.")}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


WANTED = {name: value for name, value in net().state_dict().items() if name.startswith("0.")}


@each
@pytest.mark.parametrize("steps", [0, 2])
def test_what_an_optimizer_holds_keeps_its_fp32_value(kind, steps):
    amp = prepared(kind)
    train(amp, steps)
    assert amp.model[0].weight.dtype == torch.bfloat16
    assert same(first(amp), WANTED)
    assert same(
        {f"0.{name}": value for name, value in copy.deepcopy(amp.model)[0].state_dict().items()}, WANTED
    )
    amp.revert()
    assert same({f"0.{name}": value for name, value in amp.model[0].state_dict().items()}, WANTED)


@each
def test_an_unfrozen_layer_trains_from_its_fp32_value(kind):
    amp, other = prepared(kind), prepared(kind, frozen=False)
    amp.model[0].requires_grad_(True)
    train(amp), train(other)
    assert same(first(amp), first(other))
    assert not same(first(amp), WANTED)


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_a_frozen_weight_has_no_moments_before_it_trains(kind):
    amp = prepared(kind)
    train(amp)
    states = amp.optimizers[0].state
    assert set(states[amp.model[0].weight]) == {"lacking" if kind == "exact" else "master"}
    amp.model[0].requires_grad_(True)
    train(amp)
    assert len(states[amp.model[0].weight]) > 2


def saved(amp):
    return copy.deepcopy((amp.model.state_dict(), amp.optimizers[0].state_dict()))


def load(amp, weights, state):
    amp.model.load_state_dict(weights)
    amp.optimizers[0].load_state_dict(state)


@each
def test_a_checkpoint_holds_it(kind):
    amp, other = prepared(kind), prepared(kind, seed=1)
    train(amp)
    load(other, *pickle.loads(pickle.dumps(saved(amp))))
    assert same(first(other), WANTED)
    for one in (amp, other):
        one.model[0].requires_grad_(True)
        train(one)
    assert same(first(amp), first(other))


@each
def test_a_checkpoint_without_it_leaves_it_as_it_is(kind):
    amp, other = prepared(kind), prepared(kind)
    train(amp)
    weights, state = saved(amp)
    for name in WANTED:
        state.get("masters", {}).pop(name, None)
    for number in (0, 1):
        state["state"].pop(number, None)
    load(other, weights, state)
    assert same(first(other), WANTED)
    train(other)
    assert same(first(other), WANTED)


@each
def test_checkpoints_go_between_frozen_and_trained(kind):
    amp, other = prepared(kind, frozen=False), prepared(kind, seed=1)
    train(amp)
    load(other, *saved(amp))
    assert same(first(other), first(amp))
    other.model[0].requires_grad_(True)
    train(amp), train(other)
    assert same(first(other), first(amp))


def test_a_saved_master_is_taken_by_a_frozen_weight_that_had_none():
    amp, model = prepared("torch", frozen=False), net(1).bfloat16()
    train(amp)
    low = hs.prepare(model, torch.optim.AdamW(model.parameters()), level="O2", dtype="bf16")
    load(low, *saved(amp))
    assert same(first(low), first(amp))


def test_a_frozen_weight_may_be_in_two_optimizers():
    model = net()
    both = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.1)]
    amp = hs.prepare(model, both, level="O2", dtype="bf16")
    assert same(first(amp), WANTED)


@each
def test_of_weights_that_no_optimizer_holds_nothing_is_kept(kind):
    model = net()
    amp = hs.prepare(model, OPTIMIZERS[kind](model[1].parameters()), level="O2", dtype="bf16")
    assert same(first(amp), {name: value.bfloat16().float() for name, value in WANTED.items()})


@each
def test_session_checkpoints(kind, tmp_path):
    amp, other = prepared(kind), prepared(kind, seed=1)
    train(amp)
    amp.save(tmp_path / "c")
    other.load(tmp_path / "c")
    assert same(first(other), WANTED)
