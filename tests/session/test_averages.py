"""`Session.averaged`: an fp32 average of the masters, over the steps that were taken."""

import gc

import pytest
import torch
from torch import nn

import halfstep as hs

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def prepared(level: str, kind: type[torch.optim.Optimizer], dtype: str = "bf16"):
    model = network()
    optimizer = kind(model.parameters(), lr=1e-4)
    return hs.prepare(model, optimizer, level=level, dtype=dtype, on_nonfinite="skip")


def train(amp: hs.Session, scale: float = 1.0) -> hs.Outcome:
    with amp.autocast():
        loss = amp.model(X).float().square().mean()
    amp.backward(loss * scale)
    return amp.step()


def exact(amp: hs.Session) -> list[torch.Tensor]:
    with amp.evaluating():
        return [p.detach().double() for p in amp.model.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, hs.optim.AdamW])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_it_is_the_average_of_the_fp32_weights(level, kind):
    amp = prepared(level, kind, "fp32" if level == "O0" else "bf16")
    average, right = amp.averaged(0.9), exact(amp)
    for _ in range(5):
        train(amp)
        right = [0.9 * old + 0.1 * new for old, new in zip(right, exact(amp), strict=True)]
    found = [*average.module.parameters()]
    assert all(p.dtype is torch.float32 and not p.requires_grad for p in found)
    assert all(torch.allclose(p.double(), r, rtol=1e-6, atol=1e-7) for p, r in zip(found, right, strict=True))
    assert not any(torch.equal(p.double(), w) for p, w in zip(found, exact(amp), strict=True))
    assert average.module[1].running_mean.dtype is torch.float32
    assert not torch.equal(average.module[1].running_mean, amp.model[1].running_mean)
    assert average(X).dtype is torch.float32


def test_a_skipped_step_does_not_move_it():
    amp = prepared("O2", torch.optim.SGD)
    average = amp.averaged(0.5)
    train(amp)
    before = [p.clone() for p in average.module.parameters()]
    assert not train(amp, float("inf")).taken
    assert all(map(torch.equal, before, average.module.parameters()))
    train(amp)
    assert not all(map(torch.equal, before, average.module.parameters()))


def test_training_goes_on_as_without_it_and_it_ends_with_its_last_reference():
    alone, beside = prepared("O2", hs.optim.AdamW), prepared("O2", hs.optim.AdamW)
    average = beside.averaged()
    for _ in range(3):
        train(alone)
        train(beside)
    assert all(map(torch.equal, exact(alone), exact(beside)))
    del average
    gc.collect()
    train(beside)
    assert beside.listeners == []


def test_a_level_without_fp32_weights_is_refused():
    with pytest.raises(hs.UnsupportedError, match=r"O3 has no fp32 weights.*prepare at O2"):
        prepared("O3", torch.optim.SGD).averaged()


@pytest.mark.parametrize("decay", [1.0, -0.1, "0.9", True, float("nan")])
def test_a_decay_that_is_none_is_refused(decay: object):
    with pytest.raises(hs.ConfigError, match=r"averaged\(decay=.*from 0 up to below 1"):
        prepared("O1", torch.optim.SGD).averaged(decay)


def test_a_session_that_was_reverted_starts_no_average():
    amp = prepared("O1", torch.optim.SGD)
    amp.revert()
    with pytest.raises(hs.ConfigError, match="reverted"):
        amp.averaged()
