"""Counting and watching on a GPU: right, and without waiting for it."""

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.numerics import histogram as hg
from halfstep.numerics.trace import trace_step
from halfstep.numerics.watch import watch
from tests.gpu.machine import DEVICE, Machine

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_equal_those_of_the_cpu_and_nothing_waits(gpu: Machine, dtype):
    x = (torch.randn(100_000) * torch.exp2(torch.randint(-30, 12, (100_000,)).float())).to(dtype)
    on_gpu = x.to(DEVICE)
    hg.count(on_gpu)
    with gpu.no_waiting():
        counts = hg.count(on_gpu)
        top = hg.amax(on_gpu)
    assert counts.read() == hg.count(x).read()
    torch.testing.assert_close(top.cpu(), hg.amax(x), rtol=0, atol=0, equal_nan=True)


def trained(every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)).to(DEVICE)
    amp = hs.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), dtype="bf16")
    seen = None if every is None else watch(model, amp, every=every)
    losses = []
    x = torch.randn(512, 64, device=DEVICE)
    for _ in range(6):
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step()
        losses.append(loss.detach())
    return torch.stack(losses), seen, model


def test_a_watched_run_is_the_same_run():
    plain, _, _ = trained(None)
    watched, seen, _ = trained(2)
    assert torch.equal(plain, watched)
    seen.collect()
    assert len(seen.notes) == 6
    assert ("activation", "0") in seen.series


def test_a_bad_op_in_backward_is_found_on_autograds_own_thread():
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, g):
            return g / (g - g)

    class Bad(nn.Module):
        def forward(self, x):
            return Explodes.apply(x)

    model = nn.Sequential(nn.Linear(8, 8), Bad(), nn.Linear(8, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    bad = trace_step(step, torch.randn(4, 8, device=DEVICE)).bad
    assert (bad.phase, bad.module, bad.op) == ("backward", "1", "div")
