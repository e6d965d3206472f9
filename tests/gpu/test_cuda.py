"""On CUDA: levels train, dtypes are those of the CPU, and the steady step never waits for the device."""

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.conformance.op_samples import SAMPLES
from halfstep.conformance.probe import probe_casting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10)).cuda()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(256, 64, device="cuda"), torch.randint(0, 10, (256,), device="cuda")


def train(amp: hs.Session, net: nn.Module, steps: int) -> list[torch.Tensor]:
    x, y = batch()
    losses = []
    for _ in range(steps):
        with amp.autocast():
            loss = nn.functional.cross_entropy(net(x), y)
        amp.backward(loss)
        amp.step(clip_norm=1.0)
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("kind", [torch.optim.AdamW, hs.optim.AdamW])
@pytest.mark.parametrize("level", ["O0", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16"])
def test_every_level_trains(level, kind):
    net = model()
    level, dtype = (*level.split(), None)[:2]
    amp = hs.prepare(net, kind(net.parameters(), lr=1e-2), level=level, dtype=dtype)
    losses = train(amp, net, 50)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_steady_step_does_not_synchronise(dtype):
    net = model()
    amp = hs.prepare(net, hs.optim.AdamW(net.parameters(), lr=1e-3), level="O2", dtype=dtype)
    train(amp, net, 5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(amp, net, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert amp.steps == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ops_run_in_the_dtypes_of_the_cpu(dtype):
    policy = hs.Policy(compute_dtype=dtype)
    seen = {
        device: probe_casting(
            torch.device(device), dtype, policy.rows(device), hs.autocast(device, policy=policy)
        )
        for device in ("cpu", "cuda")
    }
    differ = {
        name: (seen["cpu"][name], seen["cuda"][name])
        for name in SAMPLES
        if name in seen["cpu"] and name in seen["cuda"] and seen["cpu"][name] != seen["cuda"][name]
    }
    assert differ == {}


def test_exact_masters_equal_fp32_masters():
    weights = []
    for master in ("exact", "fp32"):
        net = model()
        optimizer = hs.optim.AdamW(net.parameters(), lr=1e-3, master=master)
        train(hs.prepare(net, optimizer, level="O2", dtype="bf16"), net, 30)
        weights.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))
