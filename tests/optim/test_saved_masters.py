"""The three states of a run, loaded by another optimizer, level or dtype: every master exact, or refused."""

import copy

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.optim import checkpoints

KINDS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "exact": lambda p: hs.optim.AdamW(p, lr=1e-3),
    "fp32": lambda p: hs.optim.AdamW(p, lr=1e-3, master="fp32"),
    "8bit": lambda p: hs.optim.AdamW(p, lr=1e-3, state_dtype="8bit"),
}
SOURCES = [(kind, dtype) for kind in KINDS for dtype in ("bf16", "fp16")]
TARGETS = [(k, "O2", d) for k in ("torch", "exact", "fp32") for d in ("bf16", "fp16")]
TARGETS += [(kind, "O1", "bf16") for kind in ("torch", "exact")]
QUICK = (
    (("torch", "bf16"), ("exact", "O2", "bf16")),
    (("torch", "bf16"), ("torch", "O1", "bf16")),
    (("torch", "bf16"), ("torch", "O2", "fp16")),
    (("exact", "bf16"), ("torch", "O2", "bf16")),
    (("exact", "bf16"), ("torch", "O1", "bf16")),
    (("exact", "fp16"), ("exact", "O2", "bf16")),
    (("fp32", "bf16"), ("fp32", "O2", "fp16")),
)
each_pair = pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(s, t, id="-".join(s + t), marks=() if (s, t) in QUICK else pytest.mark.exhaustive)
        for s in SOURCES
        for t in TARGETS
    ],
)
X = torch.randn(4, 40, generator=torch.Generator().manual_seed(3))


def run(kind, level="O2", dtype="bf16", seed=0, steps=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    amp = hs.prepare(model, KINDS[kind](model.parameters()), level=level, dtype=dtype)
    train(amp, steps)
    return amp


def train(amp, steps):
    for _ in range(steps):
        with amp.autocast():
            loss = amp.model(X).float().square().mean()
        amp.backward(loss)
        amp.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["torch", "exact"])
def test_steps_that_were_counted_in_16_bits_are_counted_on(kind, dtype):
    amp = run(kind)
    state = copy.deepcopy(amp.optimizers[0].state_dict())
    for entry in state["state"].values():
        entry["step"] = torch.tensor(2048.0, dtype=dtype)
    amp.optimizers[0].load_state_dict(state)
    train(amp, 3)
    assert {float(entry["step"]) for entry in amp.optimizers[0].state_dict()["state"].values()} == {2051.0}


def masters(amp):
    return hs.optim.fp32_state_dict(amp.model, amp.optimizers)


def states(amp):
    return copy.deepcopy([amp.model.state_dict(), amp.optimizers[0].state_dict(), amp.state_dict()])


def equal(found, wanted):
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


@pytest.fixture(scope="module")
def saved():
    found = {}

    def states_of(*source):
        if source not in found:
            amp = run(source[0], dtype=source[1])
            found[source] = masters(amp), states(amp)
        return found[source]

    return states_of


@each_pair
def test_weights_then_optimizer_is_exact(saved, source, target):
    wanted, (weights, state, _) = saved(*source)
    amp = run(*target, seed=1, steps=2)
    amp.model.load_state_dict(weights)
    amp.optimizers[0].load_state_dict(copy.deepcopy(state))
    assert equal(masters(amp), wanted)
    if target[0] == "torch":
        kept = {key for entry in amp.optimizers[0].state.values() for key in entry}
        assert kept == {"step", "exp_avg", "exp_avg_sq"}
    train(amp, 1)


def needs_weights(source, target):
    """Whether nothing but the weights tells what a saved optimizer's masters are, or would undo them."""
    (kind, dtype), (into, level, low) = source, target
    if kind in ("torch", "fp32"):
        return into == "exact" or level == "O1" or (into, kind) == ("torch", "fp32")
    return into != "exact" or level == "O1" or dtype != low


@each_pair
def test_optimizer_then_weights_is_exact_or_refused_with_nothing_changed(saved, source, target):
    wanted, (weights, state, _) = saved(*source)
    amp = run(*target, seed=1, steps=1)
    if not needs_weights(source, target):
        amp.optimizers[0].load_state_dict(copy.deepcopy(state))
        amp.model.load_state_dict(weights)
        assert equal(masters(amp), wanted)
        return
    before, own = masters(amp), states(amp)[1]
    with pytest.raises(hs.CheckpointError, match="load the model's weights before the optimizer's"):
        amp.optimizers[0].load_state_dict(copy.deepcopy(state))
    assert equal(masters(amp), before)
    assert str(amp.optimizers[0].state_dict()) == str(own)


def test_8_bit_states_reach_torch_s_optimizers_as_numbers(saved):
    _, (weights, state, _) = saved("8bit", "bf16")
    ours, theirs = run("exact", seed=1, steps=0), run("torch", seed=1, steps=0)
    for amp in (ours, theirs):
        amp.model.load_state_dict(weights)
        amp.optimizers[0].load_state_dict(copy.deepcopy(state))
    rows = [amp.optimizers[0].state_dict()["state"] for amp in (ours, theirs)]
    assert rows[0].keys() == rows[1].keys()
    rows = [(rows[0][number], rows[1][number]) for number in rows[0]]
    for own, other in rows:
        assert torch.equal(own["exp_avg"], other["exp_avg"])
        assert other["exp_avg"].dtype == torch.float32
        assert torch.equal(own["exp_avg_sq"], other["exp_avg_sq"])
        assert other.keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_masters_are_known_by_place_and_a_file_that_does_not_say_whose_they_are_is_refused(saved):
    _, (weights, state, _) = saved("torch", "bf16")
    assert state[checkpoints.PLACES] == [0, 1, 4, 5]  # the norm has fp32 weights and no masters
    amp = run("exact", seed=1, steps=0)
    amp.model.load_state_dict(weights)
    before = masters(amp)
    older = {key: value for key, value in state.items() if key != checkpoints.PLACES}
    with pytest.raises(hs.CheckpointError, match="6 parameters and 4 fp32 masters, and does not say whose"):
        amp.optimizers[0].load_state_dict(copy.deepcopy(older))
    assert equal(masters(amp), before)


def test_a_master_at_a_tie_of_bf16_keeps_its_bits_both_ways():
    amp = run("torch", steps=1)
    tie = torch.full((2, 8), 1 + 2**-8)
    amp.masters[0].refresh({"2.weight": tie})
    for kind in ("exact", "torch"):
        weights, state, _ = states(amp)
        amp = run(kind, seed=1, steps=1)
        amp.model.load_state_dict(weights)
        amp.optimizers[0].load_state_dict(state)
        assert torch.equal(masters(amp)["2.weight"], tie)


def test_other_16_bits_without_a_master_to_hold_them_are_refused_by_their_cause(saved):
    _, (weights, state, _) = saved("exact", "fp16")
    model = nn.Sequential(nn.Linear(40, 8), nn.LayerNorm(8), nn.Linear(8, 2)).bfloat16()
    optimizer = hs.optim.AdamW(model.parameters())
    model.load_state_dict(weights)
    with pytest.raises(hs.CheckpointError, match=r"both after prepare\(\) where"):
        optimizer.load_state_dict(copy.deepcopy(state))
    assert not optimizer.state


def test_revert_leaves_no_load_hooks():
    amp = run("torch", level="O1", steps=0)
    optimizer = amp.optimizers[0]
    assert optimizer._optimizer_load_state_dict_pre_hooks
    amp.revert()
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
