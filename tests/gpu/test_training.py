"""Training on a GPU: every level, without waiting, compiled, under DDP, and by torch's GradScaler loop."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from halfstep.conformance.probe import probe_casting
from tests.gpu.machine import DEVICE, Machine
from tests.gpu.test_step import assert_no_more_flags, flags_alive

Batch = tuple[torch.Tensor, torch.Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 10)).to(DEVICE)


def ours(net: nn.Module, **options: object) -> torch.optim.Optimizer:
    return hs.optim.AdamW(net.parameters(), lr=1e-2, backend="triton", **options)


def torchs(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def batch() -> Batch:
    torch.manual_seed(1)
    return torch.randn(64, 16).to(DEVICE), torch.randint(0, 10, (64,)).to(DEVICE)


def train(amp: hs.Session, net: nn.Module, steps: int, data: Batch | None = None) -> list[torch.Tensor]:
    x, y = batch() if data is None else data
    losses = []
    for _ in range(steps):
        with amp.autocast():
            loss = nn.functional.cross_entropy(net(x), y)
        amp.backward(loss)
        amp.step(clip_norm=1.0)
        losses.append(loss.detach())
    return losses


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", [torchs, ours])
@pytest.mark.parametrize("level", ["O0", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16"])
def test_every_level_trains(gpu: Machine, level, kind):
    net = model()
    level, dtype = (*level.split(), None)[:2]
    amp = hs.prepare(net, kind(net), level=level, dtype=dtype)
    losses = train(amp, net, gpu.steps)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_steady_step_does_not_synchronise(gpu: Machine, level, dtype):
    net, data = model(), batch()
    amp = hs.prepare(net, ours(net), level=level, dtype=dtype)
    train(amp, net, 4, data)
    with gpu.no_waiting():
        train(amp, net, 2, data)
    assert amp.steps == 6


def test_flags_of_outcomes_that_were_read_do_not_pile_up(gpu: Machine):
    net, data = model(), batch()
    amp = hs.prepare(net, torchs(net), level="O1", dtype="fp16")
    train(amp, net, 4, data)
    before = flags_alive()
    train(amp, net, gpu.steps, data)
    assert_no_more_flags(before)
    assert len(amp.history) == 4 + gpu.steps


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("dtype", "most"), [("bf16", 6), ("fp16", 8)])
def test_a_step_takes_few_launches(gpu: Machine, level, dtype, most, clip):
    net = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 10)).to(DEVICE)
    amp = hs.prepare(net, ours(net), level=level, dtype=dtype)
    x, y = batch()
    kept = None
    for step in range(5):
        with amp.autocast():
            loss = nn.functional.cross_entropy(net(x), y)
        amp.backward(loss * (float("inf") if step == 2 and dtype == "fp16" else 1.0))
        kept = kept or [p.grad for p in net.parameters()]
        for p, grad in zip(net.parameters(), kept):
            grad.copy_(p.grad)
            p.grad = grad  # where it lay before, so that no table is sent again
        launched = gpu.launches(lambda: amp.step(clip_norm=clip))
    assert 4 <= len(launched) <= most, launched
    amp.sync()
    assert [o.taken for o in amp.history] == [step != 2 or dtype == "bf16" for step in range(5)]
    assert amp.loss_scale.read() == (2.0**15 if dtype == "fp16" else 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ops_run_in_the_dtypes_of_the_cpu(gpu: Machine, dtype):
    """What an op is given and gives back; what it computes in may be fp32 with rounding on either."""
    policy = hs.Policy(compute_dtype=dtype)

    def dtypes(device: str) -> dict[str, tuple[object, ...]]:
        rows = policy.rows(device)
        seen = probe_casting(device, dtype, rows, lambda: hs.autocast(device, policy=policy))
        return {name: (o.given, o.output) for name, o in seen.items() if o.verdict == "agrees"}

    here, there = dtypes("cpu"), dtypes(DEVICE.type)
    assert {name for name in here.keys() - there.keys() if not name.startswith("mkldnn")} <= gpu.lacks
    assert {name: (here[name], there[name]) for name in here.keys() & there.keys()} == {
        name: (here[name], here[name]) for name in here.keys() & there.keys()
    }
    assert len(here.keys() & there.keys()) > 200


def test_exact_masters_equal_fp32_masters():
    finals = []
    for master in ("exact", "fp32"):
        net = model()
        train(hs.prepare(net, ours(net, master=master), level="O2", dtype="bf16"), net, 4)
        finals.append(weights(net))
    assert all(torch.equal(a, b) for a, b in zip(*finals))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.long), "O2"])
def test_a_compiled_model_trains_as_an_eager_one(gpu: Machine, level):
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        net = model()
        amp = hs.prepare(net, ours(net), level=level, dtype="bf16")
        run = torch.compile(net, backend=gpu.compiler) if compiled else net
        losses.append(torch.stack(train(amp, run, 3)))
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.05)


def test_gradients_that_lie_in_buckets_of_ddp(gpu: Machine, tmp_path: Path):
    finals = []
    dist.init_process_group(gpu.group, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for wrapped in (False, True):
            net = model()
            amp = hs.prepare(net, ours(net), level="O2", dtype="bf16")
            run = DDP(net, gradient_as_bucket_view=True) if wrapped else net
            train(amp, run, 3)
            finals.append(weights(net))
            del run, amp
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(*finals))


@pytest.mark.parametrize("kind", [torchs, ours])
def test_the_loop_of_torchs_grad_scaler(kind):
    net, (x, y) = model(), batch()
    optimizer = kind(net)
    scaler = hs.GradScaler(DEVICE.type, init_scale=2.0**10)
    losses = []
    for step in range(6):
        with torch.autocast(DEVICE.type, torch.float16):
            loss = nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.get_scale() == 2.0**9
    assert losses[2] == losses[3]
    assert losses[5] < losses[0]
