"""Law 14: ranks are one run. Weights after a step are those of one process with the same micro-batches."""

import itertools
import os
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests.ranks import run

WIDTHS = (20, 530, 7)  # rows of two 8-bit blocks; on four ranks: uneven shards, and one of nothing


def net():
    torch.manual_seed(3)
    first, middle, last = WIDTHS
    return nn.Sequential(
        nn.Linear(first, middle), nn.LayerNorm(middle), nn.GELU(), nn.Linear(middle, last), nn.Linear(last, 2)
    )


def micro_batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, WIDTHS[0], generator=generator), torch.randn(8, 2, generator=generator)


def optimizer_of(kind, model, state):
    if kind == "torch":
        return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    return hs.optim.AdamW(model.parameters(), lr=0.01, state_dtype=state)


def warm_up(optimizer, step):
    optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, (step + 2) / 4)


def scale_of(dtype, parts=1):
    """Ranks divide by their number after backward, one process before it: its scale makes up for that.

    So backward computes the same numbers, and few gradients become subnormal in fp16 where they are divided.
    """
    return hs.DynamicLossScale(2.0**12 * parts) if dtype == "fp16" else None


def loss_of(amp, model, batch, parts):
    with amp.autocast():
        return nn.functional.mse_loss(model(batch[0]), batch[1]) / parts


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def values_of(model, optimizer):
    """The fp32 value of each parameter, whole, wherever it is kept."""
    if isinstance(optimizer, hs.optim.AdamW):
        return [whole(v).clone() for v in optimizer.masters().values()]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [whole(p.detach()).float().clone() for p in params]


def one_process(setting, world, steps):
    level, dtype, kind, state, clip = setting
    model = net()
    optimizer = optimizer_of(kind, model, state)
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype, loss_scale=scale_of(dtype, world))
    for step in range(steps):
        for rank in range(world):
            amp.backward(loss_of(amp, model, micro_batch(step, rank), world))
        warm_up(optimizer, step)
        amp.step(clip_norm=clip)
    return values_of(model, optimizer), [p.detach().float() for p in model.parameters()]


def on_ranks(rank, settings, world, steps):
    return [one_of_ranks(rank, way, setting, world, steps) for way, setting in settings]


def one_of_ranks(rank, way, setting, world, steps):
    level, dtype, kind, state, clip = setting
    model = net()
    if way == "fully_shard":
        hs.distributed.shard(model, ordered=world > 2 or bool(kind == "torch" and clip))
    optimizer = optimizer_of(kind, model, state)
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype, loss_scale=scale_of(dtype))
    wrapped = model
    if way == "ddp":
        wrapped = DDP(model)
        if world > 2:
            wrapped.register_comm_hook(None, hs.distributed.ordered_hook())
    for step in range(steps):
        amp.backward(loss_of(amp, wrapped, micro_batch(step, rank), 1))
        warm_up(optimizer, step)
        amp.step(clip_norm=clip)
    values = values_of(model, optimizer)
    if (way, kind) == ("fully_shard", "torch"):  # fp32 shards are the masters, 16-bit weights come and go
        return values, []
    return values, [whole(p.detach()).float() for p in model.parameters()]


PARTS = 3


def accumulating(rank, whole_process):
    return [accumulated(rank, dtype, whole_process) for dtype in ("bf16", "fp16")]


def accumulated(rank, dtype, whole_process):
    """Each rank adds its own micro-batches before any is sent; one process does the same with both sums.

    What is not sent yet adds up in fp32; it is rounded for the pass that DDP sends, and with it.
    """
    model = net()
    optimizer = optimizer_of("ours", model, "fp32")
    ranks = [0, 1] if whole_process else [rank]
    scale = scale_of(dtype, len(ranks))
    amp = hs.prepare(model, optimizer, level="O2", dtype=dtype, loss_scale=scale)
    wrapped = model if whole_process else DDP(model)
    for step in range(4):
        sums = []
        for one in ranks:
            parts = []
            for part in range(PARTS):
                if whole_process:
                    model.zero_grad()
                with nullcontext() if whole_process or part == PARTS - 1 else wrapped.no_sync():
                    batch = micro_batch(PARTS * step + part, one)
                    amp.backward(loss_of(amp, wrapped, batch, PARTS * len(ranks)))
                parts.append([p.grad.clone() for p in model.parameters()])
            sums.append(
                [sum(g.float() for g in before).to(last.dtype) + last for *before, last in zip(*parts)]
            )
        for p, *both in zip(model.parameters(), *sums) if whole_process else ():
            p.grad = both[0] + both[1]
        amp.step(clip_norm=0.5)
    return values_of(model, optimizer)


def test_ranks_that_accumulate_add_sums_of_their_own():
    whole_process = accumulating(0, True)
    for found in run(accumulating, 2, False):
        for mine, theirs in zip(found, whole_process, strict=True):
            assert all(map(torch.equal, mine, theirs))


LEVELS = [("O0", None), *itertools.product(("O1", "O2"), ("bf16", "fp16"))]
KINDS = [("ours", "fp32"), ("ours", "bf16"), ("ours", "8bit"), ("torch", "fp32")]
SETTINGS = [(*level, *kind, clip) for level in LEVELS for kind in KINDS for clip in (None, 0.5)]
QUICK = [
    ("O0", None, "ours", "fp32", 0.5),
    ("O1", "bf16", "torch", "fp32", None),
    ("O1", "fp16", "ours", "bf16", 0.5),
    ("O2", "bf16", "ours", "bf16", None),
    ("O2", "fp16", "ours", "fp32", 0.5),
    ("O2", "bf16", "torch", "fp32", 0.5),
    ("O2", "bf16", "ours", "8bit", 0.5),
]


def compare(ways, settings, world, steps):
    given = list(itertools.product(ways, settings))
    everyone = run(on_ranks, world, given, world, steps, seconds=120.0 * max(steps, 10))
    told = []
    for setting in settings:
        values, weights = one_process(setting, world, steps)
        for index, (way, own) in enumerate(given):
            if own != setting:
                continue
            for found in everyone:
                pairs = [*zip(values, found[index][0]), *zip(weights, found[index][1])]
                worst = max(float((a - b).abs().max()) for a, b in pairs)
                if worst != 0.0:
                    told.append((way, setting, worst))
    return told


def test_two_ranks_are_one_process():
    assert compare(["ddp", "fully_shard"], QUICK, 2, 6) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 4])
def test_every_setting(world):
    """HALFSTEP_STEPS=50 makes it fifty steps."""
    steps = int(os.environ.get("HALFSTEP_STEPS", "5"))
    assert compare(["ddp", "fully_shard"], SETTINGS, world, steps) == []
