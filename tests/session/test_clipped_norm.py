"""Gradients are clipped by the norm that the outcome tells: law 16."""

import math

import pytest
import torch
from torch import nn

import halfstep as hs

SGD = {"torch": torch.optim.SGD, "hs": hs.optim.SGD}


def stepped(value: float, optimizer: str, level: str, dtype: str, shape: int = 4, **options):
    """The norm of what one step by clipped gradients of `value` moved, and the outcome."""
    net = nn.Linear(shape, 1, bias=False)
    nn.init.zeros_(net.weight)
    opt = SGD[optimizer](net.parameters(), lr=1.0)
    amp = hs.prepare(net, opt, level=level, dtype=dtype, loss_scale="none")
    net.weight.grad = torch.full_like(net.weight, value)
    outcome = amp.step(clip_norm=1.0, **options)
    return net.weight.detach().double().norm().item(), outcome


@pytest.mark.parametrize(
    ("level", "dtype", "value"),
    [
        ("O1", "bf16", 1e25),
        ("O2", "bf16", 1e20),
        ("O2", "fp16", 6e4),
        ("O3", "bf16", 1e20),
        ("O3", "fp16", 300.0),
        ("O3", "fp16", 6e4),
    ],
)
@pytest.mark.parametrize("optimizer", SGD)
def test_a_norm_beyond_the_gradients_dtype_clips_to_the_limit(optimizer, level, dtype, value):
    moved, outcome = stepped(value, optimizer, level, dtype)
    assert outcome.grad_norm == pytest.approx(2 * value, rel=0.01)
    assert (outcome.taken, outcome.reason) == (True, "")
    assert moved == pytest.approx(1.0, rel=0.01)


def test_o0_clips_as_torch_and_says_that_gradients_became_zero():
    moved, outcome = stepped(1e20, "torch", "O0", "fp32")
    assert moved == 0.0  # as torch's clip_grad_norm_ leaves it
    assert outcome.grad_norm == math.inf
    assert "clipped to 0" in outcome.reason
    assert "clipped to 0" in repr(outcome)
    assert stepped(3.0, "torch", "O0", "fp32")[1].reason == ""


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_ordinary_gradients_are_clipped_bit_for_bit_as_by_torch(level):
    torch.manual_seed(0)
    ours, plain = nn.Linear(33, 17), nn.Linear(33, 17)
    plain.load_state_dict(ours.state_dict())

    def make(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1)

    amp, opt = (
        hs.prepare(ours, make(ours), level=level, dtype="fp32" if level == "O0" else "bf16"),
        make(plain),
    )
    for _ in range(5):
        for p, q in zip(ours.parameters(), plain.parameters()):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        outcome = amp.step(clip_norm=1.0)
        assert outcome.grad_norm == nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
        opt.step()
    for p, q in zip(ours.parameters(), plain.parameters()):
        assert torch.equal(p, q)
