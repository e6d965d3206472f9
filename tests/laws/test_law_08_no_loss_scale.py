"""Law 8, scaling: disabled runs the same path. No scale equals plain PyTorch bit for bit, never skips."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from halfstep.errors import HalfstepWarning
from halfstep.gradients.stats import measure
from halfstep.scaling import NoLossScale
from halfstep.scaling.grad_scaler import GradScaler

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
SCALERS = {
    "plain": None,
    "no scale": lambda: GradScaler(loss_scale=NoLossScale()),
    "disabled": lambda: GradScaler(enabled=False),
}


def train(kind, scaler, clip):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = OPTIMIZERS[kind](net.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 5)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip and scaler is not None:
            scaler.unscale_(optimizer)
        if clip:
            clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("scaler", ["no scale", "disabled"])
def test_bit_identical_to_plain_pytorch(kind, clip, scaler):
    plain = train(kind, None, clip)
    assert all(torch.equal(a, b) for a, b in zip(plain, train(kind, SCALERS[scaler](), clip)))


def test_the_measured_norm_is_the_one_torch_clips_by():
    net = nn.Linear(9, 9)
    net(torch.randn(3, 9)).square().sum().backward()
    grads = [p.grad for p in net.parameters()]
    measured = measure(grads).norm
    assert torch.equal(measured, clip_grad_norm_(net.parameters(), 1.0))


def test_the_trees_are_handed_back_untouched():
    tree = {"loss": torch.ones(3)}
    assert NoLossScale().scale(tree) is tree
    assert NoLossScale().unscale(tree) is tree
    assert GradScaler(loss_scale=NoLossScale()).scale(tree) is tree


def test_never_skips_but_tells_and_warns_once():
    net = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), GradScaler(loss_scale=NoLossScale())
    net(torch.ones(1, 2)).sum().backward()
    net.bias.grad[0] = math.nan
    with pytest.warns(HalfstepWarning, match="inf or NaN and the step was taken"):
        outcome = scaler.step(optimizer)
    assert outcome.taken
    assert not outcome.finite
    assert net.bias.isnan().all()
    assert NoLossScale().adjust(False) == NoLossScale()
    scaler.step(optimizer)  # warned once: a second warning would be an error
