"""`model.float()` after `prepare`: masters of torch optimizers stay, those of `hs.optim` end."""

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
apart = pytest.mark.parametrize("kind", ["torch"])
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def trained(kind, dtype="bf16", steps=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    amp = hs.prepare(model, OPTIMIZERS[kind](model.parameters()), level="O2", dtype=dtype, loss_scale=8.0)
    train(amp, steps)
    return amp


def train(amp, steps=1, lr=1e-2):
    amp.optimizers[0].param_groups[0].update(lr=lr)
    for _ in range(steps):
        with amp.autocast():
            loss = amp.model(X).float().square().mean()
        amp.backward(loss)
        assert amp.step().taken


def masters(amp):
    return hs.optim.fp32_state_dict(amp.model, amp.optimizers)


def same(found, wanted):
    return all(torch.equal(found[name], value) for name, value in wanted.items())


@apart
@pytest.mark.parametrize(
    ("dtype", "steps"), [("bf16", 0), ("fp16", 0), ("bf16", 30)]
)  # of later steps only a sample of the weights is looked at
def test_a_wider_weight_is_its_master_at_once_and_in_the_next_step(kind, dtype, steps):
    amp = trained(kind, dtype, steps)
    wanted = masters(amp)
    amp.model.float()
    assert same(masters(amp), wanted)
    for _ in range(2):
        train(amp, lr=0.0)
        assert same(masters(amp), wanted)
        assert same(amp.model.state_dict(), wanted)
    amp.revert()
    assert same(amp.model.state_dict(), wanted)


@apart
def test_elements_that_were_set_by_hand_are_what_they_were_set_to(kind):
    amp = trained(kind)
    wanted = masters(amp)
    amp.model.float()
    with torch.no_grad():
        amp.model[0].weight.fill_(0.3)
    train(amp, lr=0.0)
    wanted["0.weight"].fill_(0.3)
    assert same(masters(amp), wanted)
    with torch.no_grad():
        amp.model[0].weight[0] = 0.5
    train(amp, lr=0.0)
    wanted["0.weight"][0] = 0.5
    assert same(masters(amp), wanted)


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_of_one_pass_optimizers_a_wider_weight_is_its_16_bit_value(kind):
    amp = trained(kind)
    low = {name: p.float() for name, p in amp.model.state_dict().items()}
    amp.model.float()
    assert same(masters(amp), low)
    other = trained(kind, steps=0)
    other.model.load_state_dict(amp.model.state_dict())
    other.optimizers[0].load_state_dict(amp.optimizers[0].state_dict())
    for one in (amp, other):
        assert same(masters(one), low)
        train(one, lr=0.0)
        assert same(masters(one), low)
    assert not any(
        key in entry for entry in amp.optimizers[0].state.values() for key in ("lacking", "master")
    )


@each
def test_wide_and_back_before_a_step_changes_nothing(kind):
    amp = trained(kind)
    wanted = masters(amp)
    amp.model.float()
    amp.model.bfloat16()
    train(amp, lr=0.0)
    assert same(masters(amp), wanted)


def test_wide_narrow_and_wide_again_with_steps_between():
    amp = trained("torch")
    for _ in range(2):
        wanted = masters(amp)
        amp.model.float()
        train(amp, lr=0.0)
        assert same(masters(amp), wanted)
        amp.model.bfloat16()
        train(amp)


@apart
def test_a_checkpoint_of_wider_weights_is_exact(kind):
    amp, other = trained(kind), trained(kind, steps=0)
    wanted = masters(amp)
    amp.model.float()
    weights, state = copy.deepcopy((amp.model.state_dict(), amp.optimizers[0].state_dict()))
    other.model.load_state_dict(weights)
    other.optimizers[0].load_state_dict(state)
    assert other.model[0].weight.dtype == torch.bfloat16
    assert same(masters(other), wanted)
    assert same(masters(amp), wanted)
