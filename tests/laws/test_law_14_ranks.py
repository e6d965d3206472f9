"""Law 14: ranks are one run. Weights after a step are those of one process with the same micro-batches."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests.ranks import run

WIDTHS = (12, 30, 7)  # on four ranks: uneven shards, and one of nothing


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
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype)
    for step in range(steps):
        for rank in range(world):
            amp.backward(loss_of(amp, model, micro_batch(step, rank), world))
        amp.step(clip_norm=clip)
    return values_of(model, optimizer), [p.detach().float() for p in model.parameters()]


def on_ranks(rank, settings, world, steps):
    return [one_of_ranks(rank, way, setting, world, steps) for way, setting in settings]


def one_of_ranks(rank, way, setting, world, steps):
    level, dtype, kind, state, clip = setting
    model = net()
    if way == "fully_shard":
        hs.distributed.shard(model)
    optimizer = optimizer_of(kind, model, state)
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype)
    wrapped = model
    if way == "ddp":
        wrapped = DDP(model)
        if world > 2:
            wrapped.register_comm_hook(None, hs.distributed.ordered_hook())
    for step in range(steps):
        amp.backward(loss_of(amp, wrapped, micro_batch(step, rank), 1))
        amp.step(clip_norm=clip)
    return values_of(model, optimizer), [whole(p.detach()).float() for p in model.parameters()]


LEVELS = [("O0", None), *itertools.product(("O1", "O2"), ("bf16", "fp16"))]
KINDS = [("ours", "fp32"), ("ours", "bf16"), ("torch", "fp32")]
SETTINGS = [(*level, *kind, clip) for level in LEVELS for kind in KINDS for clip in (None, 0.5)]
QUICK = [s for i, s in enumerate(SETTINGS) if i % 4 == 1 or s[:3] == ("O2", "bf16", "ours")]


def compare(ways, settings, world, steps):
    given = list(itertools.product(ways, settings))
    everyone = run(on_ranks, world, given, world, steps, seconds=500.0)
    told = []
    for setting in settings:
        values, weights = one_process(setting, world, steps)
        for index, (way, own) in enumerate(given):
            if own != setting:
                continue
            for found in everyone:
                same = all(map(torch.equal, values, found[index][0]))
                same_weights = all(map(torch.equal, weights, found[index][1]))
                if not (same and same_weights):
                    worst = max(float((a - b).abs().max()) for a, b in zip(values, found[index][0]))
                    told.append((way, setting, worst))
                    break
    return told


def test_two_ranks_are_one_process():
    assert compare(["ddp", "fully_shard"], QUICK, 2, 8) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 4])
def test_every_setting_for_fifty_steps(world):
    assert compare(["ddp", "fully_shard"], SETTINGS, world, 50) == []
