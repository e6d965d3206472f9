"""Exact masters under edits by hand: what was set is the master, the rest keeps its bits."""

import collections

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


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("state", ["fp32", "8bit"])
@each_dtype
def test_steps_of_every_kind_are_no_edits(dtype, state, backend):
    amp, _ = trained(dtype, 5, state_dtype=state, backend=backend)
    edits = amp.optimizers[0]._edits
    assert not edits._left
    assert all(p._version - bits._version == edits._ahead[p] for p, bits in edits._bits.items())


@pytest.mark.parametrize("release", [False, True])
@each_dtype
def test_a_filled_weight_is_its_value_at_once_and_in_the_next_step(dtype, release):
    amp, weight = trained(dtype, release_gradients=release)
    with torch.no_grad():
        fill(weight)
    value = float(weight.detach()[0, 0])
    train(amp, lr=0.0)
    assert torch.equal(master(amp, weight), torch.full((8, 6), value))
    with amp.evaluating():
        assert amp.model[0].weight.unique().tolist() == [value]
    amp.revert()
    assert weight.dtype == torch.float32
    assert weight.unique().tolist() == [value]


@each_dtype
def test_pruned_elements_are_zero_and_the_others_keep_their_bits(dtype):
    amp, weight = trained(dtype)
    before = master(amp, weight)
    with torch.no_grad():
        prune(weight)
    wanted = before * (torch.arange(48).view(8, 6) % 2)
    assert torch.equal(master(amp, weight), wanted)
    assert torch.equal(hs.optim.fp32_state_dict(amp.model, amp.optimizers)["0.weight"], wanted)


def test_small_updates_survive_a_clamp_in_every_step():
    amp, weight = trained()
    twin, other = trained()
    for _ in range(20):
        train(amp, lr=1e-6), train(twin, lr=1e-6)
        with torch.no_grad():
            weight.clamp_(-2.0, 2.0)
    assert torch.equal(master(amp, weight), master(twin, other))


def test_a_clamp_in_every_step_sets_what_it_changes_from_the_second_on():
    amp, weight = trained()
    for step in range(4):
        train(amp, lr=0.05)
        before, exact = weight.detach().clone(), master(amp, weight)
        with torch.no_grad():
            weight.clamp_(-0.101, 0.101)
        moved = before != weight
        if step:
            assert moved.sum() > 4
            assert torch.equal(master(amp, weight), torch.where(moved, weight.detach().float(), exact))


def test_later_edits_are_exact_element_by_element():
    amp, weight = trained()
    with torch.no_grad():
        weight.add_(0)
    train(amp)
    wanted = master(amp, weight)
    with torch.no_grad():
        weight[0, 1] = 0.5
    wanted[0, 1] = 0.5
    assert torch.equal(master(amp, weight), wanted)


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


@pytest.mark.parametrize("clear", ["clear", "replace", "one"])
@pytest.mark.parametrize("kept", ["exact", "fp32"])
def test_a_cleared_state_starts_moments_anew_and_keeps_masters(kept, clear):
    amp, weight = trained(master=kept)
    own, wanted = amp.optimizers[0], master(amp, weight)
    if clear == "replace":
        own.state = collections.defaultdict(dict)
    elif clear == "one":
        del own.state[weight]
    else:
        own.state.clear()
    assert torch.equal(master(amp, weight), wanted)
    train(amp, lr=0.0)
    assert torch.equal(master(amp, weight), wanted)
    assert float(own.state[weight]["step"]) == 1


def test_a_dtype_changed_by_hand_takes_no_bits_of_the_other():
    amp, weight = trained()
    amp.revert()
    assert torch.equal(amp.optimizers[0].master_of(weight), weight)
