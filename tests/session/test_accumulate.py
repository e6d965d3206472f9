"""Micro-batches add up in fp32 at every level, from the second backward of a step on (law 18)."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from halfstep.errors import UnsupportedError
from halfstep.optim.masters import MasterWeights
from halfstep.session.ranks import refuse_in_ddp

#: A gradient of each format beside which 1 is lost.
LARGE = {"bf16": 256.0, "fp16": 2048.0}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
    "foreach": lambda p: torch.optim.SGD(p, lr=1.0, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "ours": lambda p: hs.optim.SGD(p, lr=1.0),
    "released": lambda p: hs.optim.SGD(p, lr=1.0, release_gradients=True),
}


def one_weight(make, level="O2", **options):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make(model.parameters())
    return model, optimizer, hs.prepare(model, optimizer, level=level, **options)


@pytest.mark.parametrize("dtype", LARGE)
@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("kind", ["sgd", "ours", "released"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_small_micro_batches_are_kept_beside_a_large_one(level, kind, dtype, scale):
    model, _, amp = one_weight(OPTIMIZERS[kind], level, dtype=dtype, loss_scale=scale)
    for more, gradient in zip((True, True, True, False), (LARGE[dtype], 1.0, 1.0, 1.0)):
        amp.backward(gradient * model.weight.sum(), more=more)
    exact = torch.tensor(LARGE[dtype] + 3.0)  # in 16 bits 256 + 1 + 1 + 1 is 256
    assert amp.step().grad_norm == exact.to(model.weight.dtype).item()
    if kind != "released":
        amp.backward(model.weight.sum())
        assert model.weight.grad.dtype == model.weight.dtype  # one backward takes no more memory than before


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_sparse_gradients_add_up_in_fp32_too(level, repeats):
    """Over micro-batches, and over the uses of a row that one gradient lists."""
    table = nn.Embedding(2, 1, sparse=True)
    amp = hs.prepare(table, torch.optim.SGD(table.parameters(), lr=1.0), level=level, dtype="bf16")
    if repeats:
        index = torch.zeros(259, 1, dtype=torch.long)
        amp.backward(table.weight.gather(0, index, sparse_grad=True).sum())
    for gradient in () if repeats else (256.0, 1.0, 1.0, 1.0):
        amp.backward(gradient * table(torch.tensor([0])).sum())
    assert amp.step().grad_norm == torch.tensor(259.0).bfloat16().item()


@pytest.mark.parametrize("kind", ["sgd", "foreach", "adamw"])
def test_weights_are_those_of_fp32_sums_of_the_16_bit_gradients(kind):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    batches = torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    model = build()
    amp = hs.prepare(model, OPTIMIZERS[kind](model.parameters()), level="O2", dtype="bf16")
    low, masters = build().bfloat16(), [nn.Parameter(p.detach().clone()) for p in build().parameters()]
    plain = OPTIMIZERS[kind](masters)
    for step in batches:
        total = [torch.zeros_like(m) for m in masters]
        for x in step:
            amp.backward(model(x).square().mean())
            gradients = torch.autograd.grad(low(x.bfloat16()).float().square().mean(), list(low.parameters()))
            total = [t + g.float() for t, g in zip(total, gradients)]
        amp.step()
        for master, gradient in zip(masters, total):
            master.grad = gradient.bfloat16().float()  # rounded once
        plain.step()
        with torch.no_grad():
            for p, master in zip(low.parameters(), masters):
                p.copy_(master)
    with amp.evaluating():
        for p, master in zip(model.parameters(), masters):
            assert torch.equal(p, master)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", ["sgd", "ours"])
@pytest.mark.parametrize("way", ["ddp", "ddp bucket views", "shard"])
def test_the_error_of_many_micro_batches_does_not_grow_over_ranks(group, level, kind, way):
    count, model = 256, nn.Linear(16, 4)
    nn.init.zeros_(model.weight)
    if way == "shard":
        hs.distributed.shard(model)
    amp = hs.prepare(
        model, OPTIMIZERS[kind](model.parameters()), level=level, dtype="bf16", loss_scale="none"
    )
    run = DDP(model, gradient_as_bucket_view="views" in way) if way != "shard" else model
    for number in range(count):
        last = number == count - 1
        with run.no_sync() if way != "shard" and not last else nullcontext():
            with amp.autocast():
                loss = run(torch.ones(8, 16)).float().sum() / (8 * count)
            amp.backward(loss)
    assert amp.step().grad_norm == pytest.approx((4 * 17) ** 0.5, rel=8e-3)  # a rounding or two, 30 % before


def test_masters_in_a_bare_loop_add_up_in_fp32_where_asked():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    masters = MasterWeights(optimizer, model, accumulate="fp32")
    for gradient in (256.0, 1.0, 1.0, 1.0):
        (gradient * model.weight.sum()).backward()
    assert model.weight.grad.item() == 259.0
    masters.revert()
    optimizer.zero_grad()
    model.weight.sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16


def test_ddp_refuses_gradients_that_are_fp32_from_the_first_backward_on():
    optimizer = hs.optim.SGD(nn.Linear(1, 1).bfloat16().parameters(), lr=1.0, accumulate="fp32")
    with pytest.raises(UnsupportedError, match="DistributedDataParallel's buffers"):
        refuse_in_ddp(optimizer)
    refuse_in_ddp(one_weight(OPTIMIZERS["sgd"], dtype="bf16")[1])
