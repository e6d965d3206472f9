"""A step at O2 that widens a torch optimizer's gradients a part at a time is one that widens them all."""

from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.optim import master_link

OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": torch.optim.Adagrad,
}


def trained(kind: str, dtype: str, at_once: int, monkeypatch: pytest.MonkeyPatch, **step: Any):
    """Weights and states after some steps, and the largest number of fp32 elements widened by one call."""
    monkeypatch.setattr(master_link, "_AT_ONCE", at_once)
    widened, wide = list[int](), master_link._wide
    monkeypatch.setattr(
        master_link, "_wide", lambda grads: widened.append(sum(g.numel() for g in grads)) or wide(grads)
    )
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 8)]
    model = nn.Sequential(*layers)
    model[0].bias.requires_grad_(False)
    groups = [{"params": [*model[:2].parameters()], "lr": 0.02}, {"params": [*model[2:].parameters()]}]
    optimizer = OPTIMIZERS[kind](groups)
    amp = hs.prepare(model, optimizer, level="O2", dtype=dtype, on_nonfinite="skip")
    outcomes = list[Any]()
    for number in range(4):
        with amp.autocast():
            loss = model(torch.randn(8, 16)).float().square().mean()
        amp.backward(loss * float("inf") if number == 2 else loss)
        outcomes.append(amp.step(**step))
    assert len(optimizer.param_groups) == 2
    monkeypatch.undo()
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    values = [*model.parameters(), *amp.masters[0].masters().values(), *state]
    return values, max(widened), [(bool(o.taken), float(o.grad_norm)) for o in outcomes]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parts_are_the_whole(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    whole, most, told = trained(kind, dtype, 1 << 24, monkeypatch, clip_norm=0.5)
    parts, some, told_of_parts = trained(kind, dtype, 300, monkeypatch, clip_norm=0.5)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert some == 40 * 16 < most
    assert str(told) == str(told_of_parts)
    assert [taken for taken, _ in told] == [True, True, False, True]


def test_gradients_that_stay_lie_unscaled_and_clipped(monkeypatch: pytest.MonkeyPatch):
    whole, _, _ = trained("SGD", "fp16", 1 << 24, monkeypatch, clip_norm=0.5, zero_grad=False)
    parts, _, _ = trained("SGD", "fp16", 300, monkeypatch, clip_norm=0.5, zero_grad=False)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_a_hook_of_ones_own_sees_the_groups_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(master_link, "_AT_ONCE", 1)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = list[int]()
    optimizer.register_step_post_hook(lambda o, *_: seen.append(len(o.param_groups)))
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    with amp.autocast():
        loss = model(torch.randn(8, 16)).float().square().mean()
    amp.backward(loss)
    amp.step()
    assert seen == [1]


def test_groups_are_back_after_a_step_that_broke_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(master_link, "_AT_ONCE", 1)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = optimizer.param_groups
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    with amp.autocast():
        loss = model(torch.randn(8, 16)).float().square().mean()
    amp.backward(loss)
    groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        amp.step(clip_norm=1.0)
    assert optimizer.param_groups is groups
    assert len(groups) == 1
