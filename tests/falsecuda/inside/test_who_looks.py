"""What a training loop does depends neither on who reads outcomes nor on when copies arrive: laws 9, 12."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from tests import falsecuda

OPTIMIZERS = {
    "hs": hs.optim.AdamW,
    "fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    "foreach": lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=True),
}


def prepared(optimizer: str, dtype: str, device: str = "cuda", **options):
    torch.manual_seed(0)
    net = nn.Linear(16, 4).to(device)
    opt = OPTIMIZERS[optimizer](net.parameters(), lr=0.5)
    amp = hs.prepare(net, opt, level="O1", dtype=dtype, **options)
    return net, amp, torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1 / (1 + i))


def batch(device: str = "cuda"):
    x = torch.linspace(-2, 2, 64 * 16).reshape(64, 16)
    return x.to(device), (torch.arange(64) % 4).to(device)


def train(net, amp, schedule, steps: int, look: str = "", bad: frozenset[int] = frozenset()):
    x, y = batch(amp.device.type)
    rates = []
    for i in range(steps):
        with amp.autocast():
            loss = F.cross_entropy(net(x), y)
        amp.backward(loss * float("inf") if i in bad else loss)
        rates.append(amp.optimizers[0].param_groups[0]["lr"])
        outcome = amp.step(scheduler=schedule)
        if look == "outcome" or (look == "some" and i % 3 == 0):
            assert outcome.grad_norm is not None
        if look == "state":
            amp.state_dict()
    rates.append(amp.optimizers[0].param_groups[0]["lr"])
    amp.sync()
    return rates, [p.detach().cpu() for p in net.parameters()], amp.skips


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.long), "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_schedule_advances_in_its_step_whoever_looks(optimizer, dtype):
    bad = frozenset({1, 4}) if dtype == "fp16" else frozenset()
    rates, _, skips = train(*prepared(optimizer, dtype, "cpu"), 7, bad=bad)
    weights = None
    ways = zip(("when waited for", "when waited for", "late", "at once"), ("", "state", "some", "outcome"))
    for speed, look in ways:
        with falsecuda.arrival(speed):
            got = train(*prepared(optimizer, dtype), 7, look, bad)
        assert got[0] == rates
        assert got[2] == skips
        weights = weights or got[1]
        assert all(map(torch.equal, got[1], weights))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["hs", "fused"])
def test_a_saved_schedule_is_at_the_saved_step(optimizer, dtype, tmp_path):
    with falsecuda.arrival("when waited for"):
        net, amp, schedule = prepared(optimizer, dtype)
        for _ in range(3):
            train(net, amp, schedule, 2)
            saved = schedule.state_dict(), amp.state_dict()  # by hand, in this order
            amp.save(tmp_path / "c", schedulers=[schedule])
            net, amp, schedule = prepared(optimizer, dtype)
            amp.load(tmp_path / "c", schedulers=[schedule])
            assert saved[0]["last_epoch"] == schedule.last_epoch == saved[1]["steps"] == amp.steps
    assert schedule.last_epoch == 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whether_a_step_that_cannot_be_skipped_was_taken_waits_for_nothing(optimizer):
    with falsecuda.arrival("when waited for"):
        net, amp, schedule = prepared(optimizer, "bf16")
        train(net, amp, schedule, 1)
        x, y = batch()
        with falsecuda.counted_waits(events=True) as waits:
            with amp.autocast():
                loss = F.cross_entropy(net(x), y)
            amp.backward(loss)
            outcome = amp.step(clip_norm=1.0, scheduler=schedule)
            assert (outcome.taken, bool(outcome), outcome.skipped, outcome.scale) == (True, True, False, 1.0)
        assert waits.names == []


def test_a_schedule_under_a_loss_scale_waits_once_a_step():
    net, amp, schedule = prepared("fused", "fp16")
    x, y = batch()
    with falsecuda.arrival("when waited for"):
        train(net, amp, schedule, 3)
        with falsecuda.counted_waits(events=True) as waits:
            with amp.autocast():
                loss = F.cross_entropy(net(x), y)
            amp.backward(loss)
            amp.step(scheduler=schedule)
    assert len(waits.names) == 1


def test_outcomes_of_before_a_load_count_nothing_after_it():
    with falsecuda.arrival("when waited for"):
        net, amp, _ = prepared("hs", "fp16")
        state = amp.state_dict()
        x, y = batch()
        for _ in range(2):
            with amp.autocast():
                loss = F.cross_entropy(net(x), y) * float("inf")
            amp.backward(loss)
            outcome = amp.step()
        amp.load_state_dict(state)
        assert outcome.skipped
        amp.sync()
        assert amp.skips.total == 0
