"""Weights set by hand are what they were set to within half a 16-bit unit."""

import copy

import pytest
import torch
from torch import nn

import halfstep as hs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))


def trained(dtype="bf16", steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    own = hs.optim.AdamW(model.parameters(), lr=1e-3, **options)
    amp = hs.prepare(model, own, level="O2", dtype=dtype, loss_scale=8.0)
    for _ in range(steps):
        train(amp)
    return amp, model[0].weight


def train(amp, lr=None):
    if lr is not None:
        amp.optimizers[0].param_groups[0]["lr"] = lr
    amp.backward(amp.model(X).square().mean())
    amp.step()


def master(amp, p):
    return amp.optimizers[0].master_of(p)


def fill(p):
    p.fill_(0.3)


def prune(p):
    p.mul_(torch.arange(p.numel()).view_as(p) % 2)


def half_a_unit(low):
    """Half the distance of each 16-bit value to its larger neighbour."""
    bits = low.detach().abs().view(torch.int16)
    return ((bits + 1).view(low.dtype).double() - bits.view(low.dtype).double()) / 2


def is_close(value, low):
    """Whether fp32 values are 16-bit ones within half a unit."""
    return bool(((value.double() - low.detach().double()).abs() <= half_a_unit(low)).all())


@pytest.mark.parametrize("release", [False, True])
@each_dtype
def test_a_filled_weight_is_its_value_at_once_and_in_the_next_step(dtype, release):
    amp, weight = trained(dtype, release_gradients=release)
    with torch.no_grad():
        fill(weight)
    filled = weight.detach().clone()
    train(amp, lr=0.0)
    assert torch.equal(weight, filled)
    assert is_close(master(amp, weight), filled)
    with amp.evaluating():
        assert is_close(amp.model[0].weight, filled)
    amp.revert()
    assert weight.dtype == torch.float32
    assert is_close(weight, filled)


@each_dtype
def test_seed_masters_sets_exactly(dtype):
    amp, weight = trained(dtype)
    wanted = torch.full((8, 6), 0.3)
    amp.optimizers[0].seed_masters({weight: wanted})
    train(amp, lr=0.0)
    assert torch.equal(master(amp, weight), wanted)


@each_dtype
def test_pruned_elements_are_zero_and_the_others_keep_their_bits(dtype):
    amp, weight = trained(dtype)
    before, kept = master(amp, weight), torch.arange(48).view(8, 6) % 2 == 1
    with torch.no_grad():
        prune(weight)
    assert not weight[~kept].any()
    found = master(amp, weight)
    assert torch.equal(found[kept], before[kept])
    assert is_close(found, weight)
    for _ in range(3):
        train(amp, lr=0.0)
    assert not weight[~kept].any()
    amp.optimizers[0].seed_masters({weight: found * kept})
    assert torch.equal(hs.optim.fp32_state_dict(amp.model, amp.optimizers)["0.weight"], before * kept)


def test_small_updates_survive_a_clamp_in_every_step():
    amp, weight = trained()
    twin, other = trained()
    for _ in range(20):
        train(amp, lr=1e-6), train(twin, lr=1e-6)
        with torch.no_grad():
            weight.clamp_(-2.0, 2.0)
    assert torch.equal(master(amp, weight), master(twin, other))


@pytest.mark.parametrize("seen", [True, False])
@each_dtype
def test_elements_that_were_set_are_that_within_half_a_unit(dtype, seen):
    """Also where bits are of a value of another size, and through `.data`, which no version counts."""
    amp, weight = trained(dtype)
    train(amp, lr=1e-9)
    wanted = torch.logspace(-7, 2, 48).view(8, 6) * (1 - 2 * (torch.arange(48).view(8, 6) % 3 % 2))
    with torch.no_grad():
        (weight if seen else weight.data).copy_(wanted)
    before = weight.detach().clone()
    for _ in range(2):
        assert is_close(master(amp, weight), before)
        train(amp, lr=0.0)


@pytest.mark.parametrize("size", [2**-14, 2**-15, 2**-17, 2**-20])
def test_an_fp16_element_that_was_tiny_is_what_it_was_set_to_within_half_a_unit(size):
    amp, weight = trained("fp16")
    amp.optimizers[0].seed_masters({weight: torch.linspace(-size, size, 48).view(8, 6)})
    with torch.no_grad():
        weight.copy_(torch.linspace(0.1, 1.0, 48).view(8, 6))
    assert is_close(master(amp, weight), weight)


def test_a_scalar_and_a_uniform_weight_that_nobody_changed_keep_their_bits():
    p, q = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.full((4,), 0.1))
    model = nn.Module()
    model.p, model.q = p, q
    amp = hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), level="O2", dtype="bf16")
    with torch.no_grad():
        p.copy_(p.clone()), q.copy_(q.clone())
    assert float(master(amp, p)) == float(torch.tensor(0.1))
    assert torch.equal(master(amp, q), torch.full((4,), 0.1))


def test_weights_and_bits_restored_together_are_taken_as_they_are():
    amp, weight = trained()
    bits = amp.optimizers[0].state[weight]["lacking"]
    kept, wanted = (weight.detach().clone(), bits.clone()), master(amp, weight)
    train(amp)
    with torch.no_grad():
        weight.copy_(kept[0]), bits.copy_(kept[1])
    assert torch.equal(master(amp, weight), wanted)


@pytest.mark.parametrize("kept", ["exact", "fp32"])
def test_a_cleared_state_starts_anew_from_the_16_bit_weights(kept):
    amp, weight = trained(master=kept)
    own = amp.optimizers[0]
    own.state.clear()
    assert torch.equal(master(amp, weight), weight.float())
    train(amp, lr=0.0)
    assert torch.equal(master(amp, weight), weight.float())
    assert float(own.state[weight]["step"]) == 1


def test_a_dtype_changed_by_hand_takes_no_bits_of_the_other():
    amp, weight = trained()
    amp.revert()
    assert torch.equal(amp.optimizers[0].master_of(weight), weight)


@each_dtype
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_weight_zeroed_right_after_a_load_stays_zero(dtype, order):
    source, _ = trained(dtype)
    saved = copy.deepcopy([source.model.state_dict(), source.optimizers[0].state_dict()])
    amp, weight = trained(dtype, 1)
    loads = [lambda: amp.model.load_state_dict(saved[0]), lambda: amp.optimizers[0].load_state_dict(saved[1])]
    for load in loads if order == "model first" else loads[::-1]:
        load()
    assert torch.equal(master(amp, weight), master(source, source.model[0].weight))
    with torch.no_grad():
        weight.zero_()
    train(amp, lr=0.0)
    assert is_close(master(amp, weight), torch.zeros_like(weight))


def test_an_edit_of_a_weight_with_an_fp32_master_is_in_its_state_dict():
    amp, weight = trained(master="fp32")
    own = amp.optimizers[0]
    with torch.no_grad():
        weight[0] = 0.5
    weight.data[1] = 0.25
    wanted = master(amp, weight)
    assert wanted[:2].unique().tolist() == [0.25, 0.5]
    own.load_state_dict(own.state_dict())
    assert torch.equal(master(amp, weight), wanted)
    saved = copy.deepcopy([amp.model.state_dict(), own.state_dict()])
    other, theirs = trained(steps=1, master="fp32")
    other.model.load_state_dict(saved[0])
    other.optimizers[0].load_state_dict(saved[1])
    assert torch.equal(master(other, theirs), wanted)


@each_dtype
def test_copies_of_an_optimizer_know_what_was_set_before_and_after(dtype):
    amp, weight = trained(dtype)
    with torch.no_grad():
        fill(weight)
    p, own = copy.deepcopy((weight, amp.optimizers[0]))
    assert torch.equal(own.master_of(p), master(amp, weight))
    with torch.no_grad():
        p.fill_(0.7)
    assert is_close(own.master_of(p), p)
