"""Law 14 where ranks begin apart: DDP gives all of them rank 0's weights, and at O2 its fp32 masters."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests.ranks import run


def net(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[3].bias.copy_(1 + torch.arange(4) * 1e-5)  # one 16-bit value, which looks filled in by hand
    return model


def prepared(seed, kind, dtype, master="exact"):
    model = net(seed)
    own = {"lr": 0.01} if kind == "torch" else {"lr": 0.01, "master": master}
    optimizer = (torch.optim.AdamW if kind == "torch" else hs.optim.AdamW)(model.parameters(), **own)
    options = {"level": "O2", "dtype": dtype, "kernels": "native"}
    scale = 64.0 if dtype == "fp16" else None
    return model, optimizer, hs.prepare(model, optimizer, loss_scale=scale, **options)


def masters_of(model, optimizer):
    return {name: t.clone() for name, t in hs.optim.fp32_state_dict(model, optimizer).items()}


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def train(amp, forward, ranks, steps=3):
    for step in range(steps):
        for rank in ranks:
            with amp.autocast():
                loss = forward(batch(step, rank)).float().square().mean() / len(ranks)
            amp.backward(loss)
        amp.step(clip_norm=0.5)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


SETTINGS = [
    ("ours", "bf16", "exact"),
    ("ours", "fp16", "exact"),
    ("ours", "bf16", "fp32"),
    ("torch", "bf16", None),
    ("torch", "fp16", None),
]


def wraps(rank, ways):
    found = []
    for setting, loads in ways:
        model, optimizer, amp = prepared(1 + rank, *setting)
        if loads and rank == 0:
            model.load_state_dict(net(50).state_dict())
        ddp = DDP(model)
        first = masters_of(model, optimizer)
        train(amp, ddp, [rank])
        found.append((first, masters_of(model, optimizer), model.state_dict()))
    return found


def test_ranks_that_begin_apart_train_rank_0s_masters():
    ways = list(itertools.product(SETTINGS, [False, True]))
    everyone = run(wraps, 2, ways)
    for index, (setting, loads) in enumerate(ways):
        model, optimizer, amp = prepared(1, *setting)
        if loads:
            model.load_state_dict(net(50).state_dict())
        first = masters_of(model, optimizer)
        train(amp, model, [0, 1])
        for found in everyone:
            assert same(found[index][0], first), (setting, loads)
            assert same(found[index][1], masters_of(model, optimizer)), (setting, loads)
            assert same(found[index][2], model.state_dict()), (setting, loads)


def odd_wraps(rank):
    """A second DDP around trained weights, one that ignores a parameter, one that sends nothing, several."""
    told = {}
    model, optimizer, amp = prepared(1, "ours", "bf16")
    train(amp, DDP(model), [rank])
    with torch.no_grad():
        model[0].weight.add_(0.25 * rank)
    again = DDP(model)
    told["again"] = masters_of(model, optimizer)
    train(amp, again, [rank])
    told["after"] = masters_of(model, optimizer)

    model, optimizer, amp = prepared(1 + rank, "torch", "bf16")
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    DDP(model)
    told["ignoring"] = masters_of(model, optimizer)

    model, optimizer, amp = prepared(1 + rank, "ours", "fp16")
    ddp = DDP(model, init_sync=False)
    told["init_sync=False"] = masters_of(model, optimizer)
    with torch.no_grad():
        model[0].weight.add_(0.25 * rank)
    ddp.module = model
    told["put back"] = masters_of(model, optimizer)

    model, optimizer, amp = prepared(1 + rank, "torch", "bf16")
    amp.masters[0].revert()
    DDP(model)
    told["reverted"] = model.state_dict()

    first, second = net(1 + rank), net(11 + rank)
    optimizers = [hs.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)]
    amp = hs.prepare([first, second], optimizers, level="O2", dtype="bf16", kernels="native")
    DDP(nn.ModuleList([second]))
    told["second"], told["unwrapped"] = masters_of(second, optimizers[1]), masters_of(first, optimizers[0])
    return told


def test_every_wrap_sends_masters():
    first, second = run(odd_wraps, 2)
    assert same(first["again"], second["again"])
    assert same(first["after"], second["after"])
    assert same(first["reverted"], second["reverted"])
    assert same(first["second"], second["second"])
    assert not torch.equal(first["ignoring"].pop("0.weight"), second["ignoring"].pop("0.weight"))
    assert same(first["ignoring"], second["ignoring"])
    assert same(first["init_sync=False"], second["init_sync=False"])
    for apart in ("put back", "unwrapped"):
        assert not torch.equal(first[apart]["0.weight"], second[apart]["0.weight"])


def uneven(rank, settings):
    found = []
    for setting in settings:
        model, optimizer, amp = prepared(1, *setting)
        ddp = DDP(model)
        with hs.distributed.join(ddp, amp):
            train(amp, ddp, [rank], steps=4 - 2 * rank)
        found.append(masters_of(model, optimizer))
    return found


def test_ranks_leave_a_join_with_the_same_masters():
    first, second = run(uneven, 2, SETTINGS)
    for setting, mine, theirs in zip(SETTINGS, first, second, strict=True):
        model, optimizer, amp = prepared(1, *setting)
        for step in range(4):
            for rank in [0, 1] if step < 2 else [0]:
                with amp.autocast():
                    loss = model(batch(step, rank)).float().square().mean() / 2
                amp.backward(loss)
            amp.step(clip_norm=0.5)
        assert same(mine, theirs), setting
        assert same(mine, masters_of(model, optimizer)), setting


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_values_that_are_loaded_after_a_wrap_are_the_masters_where_they_differ(dtype):
    model, optimizer, _ = prepared(1, "ours", dtype)
    before, values = masters_of(model, optimizer), {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(values)
    assert same(masters_of(model, optimizer), before)
    values["0.weight"] += 0.5
    model.load_state_dict(values)
    assert torch.equal(masters_of(model, optimizer)["0.weight"], values["0.weight"].float())
