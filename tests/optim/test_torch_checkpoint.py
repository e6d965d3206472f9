"""torch.distributed.checkpoint's own functions save and load what is trained with masters, by name."""

import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import halfstep as hs


def build(kind, shift=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20), nn.LayerNorm(20), nn.Linear(20, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(shift)
    if kind == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = hs.optim.AdamW(model.parameters(), lr=0.01, state_dtype=kind)
    return model, optimizer, hs.prepare(model, optimizer, level="O2", dtype="bf16")


def step(model, amp):
    with amp.autocast():
        loss = model(torch.ones(2, 4)).square().mean()
    amp.backward(loss)
    amp.step()


def opened(kind, amp):
    return amp.masters[0].checkpointing() if kind == "torch" else nullcontext()


def masters_of(kind, optimizer, amp):
    return [m for _, m in amp.masters[0].named()] if kind == "torch" else list(optimizer.masters().values())


def travel(kind, flat, steps):
    """A run, saved and loaded into another model, and both trained on."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer, amp = build(kind)
    for _ in range(steps):
        step(model, amp)
    with opened(kind, amp):
        saved = get_state_dict(model, optimizer, options=options)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    weights, states = torch.load(file, weights_only=True)
    other, theirs, beside = build(kind, shift=1.0)
    with opened(kind, beside):
        set_state_dict(other, theirs, model_state_dict=weights, optim_state_dict=states, options=options)
    for _ in range(2):
        step(model, amp)
        step(other, beside)
    return masters_of(kind, optimizer, amp), masters_of(kind, theirs, beside), states


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["torch", "fp32", "bf16", "8bit"])
def test_a_run_goes_on_bit_for_bit(kind, flat, steps):
    here, there, states = travel(kind, flat, steps)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    names = states if flat else states["state"]
    assert all(isinstance(name, str) for name in names)


def test_within_the_model_holds_fp32_and_afterwards_16_bits():
    model, _, amp = build("torch")
    before = [p.detach().clone() for p in model.parameters()]
    with amp.masters[0].checkpointing():
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, model.parameters()))


def test_without_a_model_it_says_so():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = hs.MasterWeights(torch.optim.SGD([p], lr=0.1))
    with pytest.raises(hs.ConfigError, match="model="), masters.checkpointing():
        pass
