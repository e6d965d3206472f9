"""A checkpoint loaded into a prepared model: its fp32 values are the masters'."""

import copy

import pytest
import torch
from torch import nn

import halfstep as hs

OPTIMIZERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "exact": lambda p: hs.optim.AdamW(p, lr=1e-2),
    "fp32": lambda p: hs.optim.AdamW(p, lr=1e-2, master="fp32"),
}
each = pytest.mark.parametrize("kind", OPTIMIZERS)
each_dtype = pytest.mark.parametrize("dtype", ["bf16", "fp16"])
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2)))


def trained(kind, dtype="bf16", steps=3):
    model = net()
    amp = hs.prepare(model, OPTIMIZERS[kind](model.parameters()), level="O2", dtype=dtype)
    train(amp, steps)
    return amp


def train(amp, steps=1):
    for _ in range(steps):
        with amp.autocast():
            loss = amp.model(X).square().mean()
        amp.backward(loss)
        amp.step()


def masters(amp):
    return hs.optim.fp32_state_dict(amp.model, amp.optimizers)


def same(found, wanted):
    return all(torch.equal(found[name], value) for name, value in wanted.items())


@each
@each_dtype
def test_an_fp32_checkpoint_is_exact_and_stays_so_until_revert(kind, dtype):
    amp, wanted = trained(kind, dtype), net(1).state_dict()
    if dtype == "fp16":  # exact from 2^-16 up
        wanted = {name: torch.where(value.abs() < 2**-14, 0, value) for name, value in wanted.items()}
    amp.model.load_state_dict(wanted)
    assert same(masters(amp), wanted)
    with amp.evaluating():
        assert same(amp.model.state_dict(), wanted)
    amp.revert()
    assert same(amp.model.state_dict(), wanted)


@each
def test_training_goes_on_from_the_loaded_values(kind):
    wanted = net(1)
    amp, other = trained(kind, steps=0), hs.prepare(wanted, OPTIMIZERS[kind](wanted.parameters()), level="O2")
    amp.model.load_state_dict(net(1).state_dict())
    train(amp, 3), train(other, 3)
    assert same(masters(amp), masters(other))


@each
def test_a_part_of_a_model_can_be_loaded_alone(kind):
    amp, wanted = trained(kind), net(1)[1].state_dict()
    before = {name: value for name, value in masters(amp).items() if name.startswith("0.")}
    amp.model[1].load_state_dict(wanted)
    assert same(masters(amp), {**before, **{f"1.{name}": value for name, value in wanted.items()}})


@each
def test_16_bit_values_keep_masters_where_they_say_nothing_new(kind):
    amp = trained(kind)
    before, state = masters(amp), amp.model.state_dict()
    state = {name: value.clone() for name, value in state.items()}
    state["0.weight"][0] = 0.5
    amp.model.load_state_dict(state)
    before["0.weight"][0] = 0.5
    assert same(masters(amp), before)


@each
def test_a_load_that_fails_leaves_the_masters_it_did_not_reach(kind):
    amp, state = trained(kind), net(1).state_dict()
    before = masters(amp)
    state["0.weight"] = torch.ones(1, 1)
    with pytest.raises(RuntimeError, match="size mismatch"):
        amp.model.load_state_dict(state)
    assert torch.equal(masters(amp)["0.weight"], before["0.weight"])


@each
def test_tied_weights_and_fp64_values(kind):
    model = net()
    model[1].append(nn.Linear(6, 8))
    model[1][2].weight = model[0].weight
    amp = hs.prepare(model, OPTIMIZERS[kind](model.parameters()), level="O2", dtype="bf16")
    wanted = {
        name: torch.randn_like(value, dtype=torch.float64) for name, value in model.state_dict().items()
    }
    wanted["1.2.weight"] = wanted["0.weight"]
    model.load_state_dict(wanted)
    assert same(masters(amp), {name: value.float() for name, value in wanted.items()})


@each
def test_copies_and_reverted_models_have_no_hooks_that_work(kind):
    amp, wanted = trained(kind), net(1).state_dict()
    before = masters(amp)
    copy.deepcopy(amp.model).load_state_dict(wanted)
    assert same(masters(amp), before)
    amp.revert()
    hooks = [*amp.model._load_state_dict_pre_hooks, *amp.model._load_state_dict_post_hooks]
    assert not hooks


@each
def test_the_three_states_of_a_session_load_as_before(kind):
    amp = trained(kind)
    states = copy.deepcopy([x.state_dict() for x in (amp.model, amp.optimizers[0], amp)])
    wanted = masters(amp)
    other = trained(kind, steps=1)
    for x, state in zip((other.model, other.optimizers[0], other), states):
        x.load_state_dict(state)
    assert same(masters(other), wanted)


@each_dtype
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("kind", ["torch", "exact", "fp32"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_checkpoint_of_plain_torch_keeps_every_bit_in_either_order(kind, dtype, before, order):
    plain = net(1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain(X).square().mean().backward()
    theirs.step()
    amp = trained(kind, dtype, before)
    weights = plain.state_dict()
    if dtype == "fp16":  # exact from 2^-16 up
        weights = {name: torch.where(value.abs() < 2**-14, 0, value) for name, value in weights.items()}
    parts = [(amp.model, weights), (amp.optimizers[0], theirs.state_dict())]
    for part, state in parts if order == "model first" else reversed(parts):
        part.load_state_dict(state)
    assert same(masters(amp), weights)


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_a_weight_set_by_hand_before_an_optimizer_is_loaded_is_what_counts(kind):
    amp, plain = trained(kind), net(1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain(X).square().mean().backward()
    theirs.step()
    with torch.no_grad():
        for p, q in zip(amp.model.parameters(), plain.parameters()):
            p.copy_(q)
    amp.optimizers[0].load_state_dict(theirs.state_dict())
    for (name, value), p in zip(masters(amp).items(), amp.model.parameters()):
        assert torch.equal(value.to(p.dtype), p), name
