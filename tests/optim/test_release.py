"""Gradient release: each weight is updated, and its gradient freed, during backward."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import ConfigError, HalfstepWarning
from halfstep.optim import SGD, AdamW

BF16 = torch.bfloat16


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)).to(
        BF16
    )


def batches(count: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    return [torch.randn(8, 16, generator=g).to(BF16) for _ in range(count)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def test_same_numbers_as_without_and_no_gradient_left():
    weights: list[list[torch.Tensor]] = []
    for released in (False, True):
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2, release_gradients=released)
        for x in batches(5):
            loss_of(model, x).backward()
            if released:
                assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


def test_at_most_one_gradient_is_alive():
    model = net()
    alive: list[int] = []
    optimizer = SGD(model.parameters(), lr=1e-2, release_gradients=True)
    params = list(model.parameters())
    for p in params:
        p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(q.grad is not None for q in params)))
    loss_of(model, batches(1)[0]).backward()
    assert alive
    assert max(alive) <= 1
    optimizer.step()


def test_accumulation_updates_on_the_last_micro_batch_only():
    a, b = batches(2)
    plain, model = net(), net()
    reference = SGD(plain.parameters(), lr=0.1)
    optimizer = SGD(model.parameters(), lr=0.1, release_gradients=True)
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.release is not None
    with optimizer.release.pause():
        loss_of(model, a).backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    loss_of(model, b).backward()
    loss_of(plain, a).backward()
    loss_of(plain, b).backward()
    reference.step()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


def test_a_late_inf_skips_its_own_tensor_and_is_told():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, release_gradients=True)
    assert optimizer.release is not None
    optimizer.release.configure(inv_scale=1 / 1024)
    before = [p.detach().clone() for p in model.parameters()]
    first: Any = model[0]
    first.weight.register_hook(lambda g: g * float("inf"))
    (loss_of(model, batches(1)[0]) * 1024).backward()
    stats = optimizer.measure(1 / 1024)
    assert not bool(stats.finite)
    same = [torch.equal(p, q) for p, q in zip(model.parameters(), before)]
    assert same == [True, False, False, False, False, False]
    optimizer.step(inv_scale=1 / 1024, found_inf=~stats.finite)
    assert (
        "step" not in optimizer.state.get(first.weight, {}) or int(optimizer.state[first.weight]["step"]) == 0
    )
    loss_of(model, batches(1)[0]).backward()
    assert first.weight.isfinite().all()


def test_clipping_uses_the_norm_of_the_step_before():
    model, plain = net(), net()
    optimizer = SGD(model.parameters(), lr=0.1, release_gradients=True)
    reference = SGD(plain.parameters(), lr=0.1)
    assert optimizer.release is not None
    optimizer.release.configure(clip_norm=0.01)
    last = None
    for x in batches(3):
        loss_of(model, x).backward()
        seen = optimizer.measure().norm
        with pytest.warns(HalfstepWarning, match="not clipped") if last is None else nullcontext():
            optimizer.step()
        loss_of(plain, x).backward()
        now = reference.measure().norm
        coef = None if last is None else torch.clamp(0.01 / (last + 1e-6), max=1.0)
        reference.step(clip_coef=coef)
        reference.zero_grad()
        assert seen.item() == pytest.approx(now.item(), rel=1e-5)
        last = seen
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    with pytest.raises(ConfigError, match="clip_norm=0"):
        optimizer.release.configure(clip_norm=0)


def test_hooks_do_not_keep_the_optimizer():
    model = net()
    kept = weakref.ref(SGD(model.parameters(), lr=0.1, release_gradients=True))
    gc.collect()
    assert kept() is None


def test_the_first_clipped_step_says_that_it_was_not_clipped():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, release_gradients=True)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    for index, x in enumerate(batches(2)):
        with amp.autocast():
            loss = loss_of(model, x)
        amp.backward(loss)
        with nullcontext() if index else pytest.warns(hs.HalfstepWarning, match="first step was not clipped"):
            amp.step(clip_norm=0.01)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_released_gradients_cannot_be_unscaled(dtype):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, release_gradients=True)
    amp = hs.prepare(model, optimizer, level="O2", dtype=dtype)
    with amp.autocast():
        loss = loss_of(model, batches(1)[0])
    amp.backward(loss)
    with pytest.raises(hs.UnsupportedError, match="released and applied"):
        amp.unscale()


def test_a_grad_scaler_names_released_gradients():
    model = net()
    optimizer = SGD(model.parameters(), lr=1e-3, release_gradients=True)
    scaler = hs.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    with pytest.raises(hs.ScalerStateError, match="release_gradients"):
        scaler.step(optimizer)
