"""What cannot be right over ranks is refused by name before training, or works (law 14); two gloo ranks."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests.ranks import run


def net(width=8):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 2))


def error_of(function):
    try:
        function()
    except hs.HalfstepError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def batch(rank, count=4):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, 4, generator=generator)


def in_tensor_parallel(model):
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def shard_after_prepare(rank, way):
    model = net()
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O1", dtype="bf16")
    if way == "fully_shard":
        fully_shard(model)
        with amp.autocast():
            loss = model(batch(rank)).sum()
    else:
        in_tensor_parallel(model)
        with amp.autocast():
            loss = model[0](batch(rank)).sum()
    return error_of(lambda: amp.backward(loss))


@pytest.mark.parametrize(("way", "gone"), [("fully_shard", 6), ("tensor parallel", 4)])
def test_parameters_swapped_after_prepare_are_noticed(way, gone):
    for told in run(shard_after_prepare, 2, way):
        assert "ConfigError: " in told
        assert f"{gone} of 6 parameters" in told
        assert "shard" in told


def release(rank):
    model = net()
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.1, release_gradients=True)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    ddp = DDP(model)
    with amp.autocast():
        loss = ddp(batch(rank)).sum()
    return error_of(lambda: amp.backward(loss))


def test_released_gradients_under_ddp_are_refused():
    for told in run(release, 2):
        assert told.startswith("UnsupportedError: release_gradients")
        assert "DistributedDataParallel" in told


def hook(rank, level):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level=level, dtype="bf16")
    ddp = DDP(model)
    ddp.register_comm_hook(None, hs.distributed.compress_hook("fp16"))
    with amp.autocast():
        loss = ddp(batch(rank)).sum()
    return error_of(lambda: amp.backward(loss))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_fp16_hook_at_a_bf16_level_is_refused(level):
    for told in run(hook, 2, level):
        assert told.startswith("ConfigError: ")
        assert "compress_hook('bf16')" in told


def wrapped_before(rank, level):
    model = net()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    amp = hs.prepare(ddp, optimizer, level=level, dtype=None if level == "O0" else "bf16")
    with amp.autocast():
        loss = ddp(batch(rank)).sum()
    amp.backward(loss)
    amp.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_model_in_ddp_can_be_prepared_where_nothing_is_converted(level):
    first, second = run(wrapped_before, 2, level)
    assert torch.equal(first, second)


def inner(rank):
    model = net()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    outer = error_of(lambda: hs.prepare(ddp, optimizer, level="O2", dtype="bf16"))
    return outer, error_of(lambda: hs.prepare(model, optimizer, level="O2", dtype="bf16"))


def test_a_model_already_in_ddp_is_refused_at_o2():
    for told in run(inner, 2):
        for one in told:
            assert one.startswith("ConfigError: ")
            assert "then wrap it" in one


def accumulate(rank):
    model = net()
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.1, accumulate="fp32")
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    ddp = DDP(model)

    def step():
        with amp.autocast():
            loss = ddp(batch(rank)).sum()
        amp.backward(loss)

    return error_of(step)


def test_fp32_accumulation_under_ddp_is_refused():
    for told in run(accumulate, 2):
        assert told.startswith("UnsupportedError: accumulate='fp32'")


def joined(rank, own):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O1", dtype="bf16", loss_scale=64.0)
    ddp = DDP(model)

    def train():
        for number in range(2 + rank):
            with amp.autocast():
                loss = ddp(batch(rank + number)).sum()
            amp.backward(loss)
            amp.step()

    def loop():
        with hs.distributed.join(ddp, amp) if own else ddp.join():
            train()

    told = error_of(loop)
    return told, torch.cat([p.detach().flatten() for p in model.parameters()]), amp.steps


def test_uneven_batches_need_the_session_in_the_join():
    for told, *_ in run(joined, 2, False):
        assert told.startswith("ConfigError: ")
        assert "hs.distributed.join(ddp, amp)" in told


def test_uneven_batches_under_join():
    (told, first, steps), (other, second, more) = run(joined, 2, True)
    assert (told, other) == ("no error", "no error")
    assert torch.equal(first, second)
    assert (steps, more) == (3, 3)


def shards_norm(rank, kind):
    model = net(6)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    count = sum(p.numel() for p in model.parameters())
    if kind == "scaler":
        scaler = hs.GradScaler(init_scale=2.0)
        scaler.scale(torch.ones(()))
        outcome = scaler.step(optimizer)
    else:
        if kind == "one pass":
            optimizer = hs.optim.AdamW(model.parameters(), lr=0.0)
        amp = hs.prepare(model, optimizer, level="O0", loss_scale="none")
        outcome = amp.step(clip_norm=1.0)
    return outcome.grad_norm, outcome.amax, count


@pytest.mark.parametrize("kind", ["scaler", "torch", "one pass"])
def test_the_norm_over_shards_is_the_whole_norm(kind):
    for norm, largest, count in run(shards_norm, 2, kind):
        value = 1.0 if kind == "scaler" else 2.0
        assert norm == pytest.approx(value * math.sqrt(count), rel=1e-6)
        assert largest in (None, value)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.all = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, used):
        return sum(self.all[number](x) for number in used)


def of_experts(used, parts):
    model, (rank, world) = Experts(), parts
    if world > 1:
        hs.distributed.shard(model, [])
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    for own in used[rank : rank + 1] if world > 1 else used:
        with amp.autocast():
            loss = model(batch(0), own).float().square().mean() / (1 if world > 1 else len(used))
        amp.backward(loss)
    return model, optimizer, amp


def uses_experts(rank):
    told = []
    for used in ([(0,), (1,)], [(0, 2), (0, 2)]):
        model, optimizer, amp = of_experts(used, (rank, 2))
        told.append(error_of(amp.step))
        fp32 = hs.optim.fp32_state_dict(model, optimizer)
        told.append({name: value.full_tensor() for name, value in fp32.items()})
    return told


def test_gradients_of_different_parameters_are_not_mixed_in_silence():
    initial = Experts().state_dict()
    model, optimizer, amp = of_experts([(0, 2), (0, 2)], (0, 1))
    amp.step()
    alone = hs.optim.fp32_state_dict(model, optimizer)
    for message, kept, fine, trained in run(uses_experts, 2):
        assert message.startswith("ConfigError: all.0.weight has a gradient on ranks [0] of 2")
        assert "set_reduce_scatter_unused_params(True)" in message
        assert all(torch.equal(kept[name], value) for name, value in initial.items())
        assert fine == "no error"
        assert all(torch.equal(trained[name], value) for name, value in alone.items())


def scales_experts(rank, enabled):
    told, initial = [], Experts().state_dict()
    for used in ([(0,), (1,)], [(0, 2), (0, 2)]):
        model = hs.distributed.shard(Experts(), [])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = hs.GradScaler(enabled=enabled)
        scaler.scale(model(batch(0), used[rank]).square().mean()).backward()
        told.append(error_of(partial(scaler.step, optimizer)))
        trained = {name: p.full_tensor() for name, p in model.state_dict().items()}
        told.append([name for name, value in trained.items() if not torch.equal(value, initial[name])])
    return told


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_does_not_mix_gradients_of_different_parameters_in_silence(enabled):
    for message, moved, fine, updated in run(scales_experts, 2, enabled):
        assert "parameter 0 of this SGD, of shape [4, 4], has a gradient on ranks [0] of 2" in message
        assert (moved, fine) == ([], "no error")
        assert updated == ["all.0.weight", "all.0.bias", "all.2.weight", "all.2.bias"]
