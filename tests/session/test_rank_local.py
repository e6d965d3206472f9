"""Wraps after which ranks have other gradients: norm and skip are those of one process, or refused."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.errors import CheckpointError, HalfstepError, UnsupportedError
from tests.ranks import run

FSDP = {
    "flat": {},
    "original": {"use_orig_params": True},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
}
SESSION = "norm that a step is clipped by"
BARE = "clip_norm= and skip_nonfinite= of SGD"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))


def loss_of(model, rank, sign=1.0):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    return sign * model(x).float().square().mean()


def outcome_of(call):
    """What it returned, or the text of the refusal."""
    try:
        return call()
    except UnsupportedError as error:
        return str(error)


def step_of_session(model, wrap=lambda model: model, **options):
    amp = hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), "O0", **options)
    wrapped = wrap(model)

    def step():
        amp.backward(loss_of(wrapped, dist.get_rank()))
        return float(amp.step(clip_norm=0.1).grad_norm)

    return outcome_of(step)


def step_of_optimizer(model, optimizer):
    """The refusal, and whether every weight is what it was; else None."""
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, dist.get_rank()).backward()
    said = outcome_of(optimizer.step)
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    return said, same


def with_own(model):
    """In DDP, with the last layer each rank's own."""
    ignored = [name for name, _ in model.named_parameters() if name.startswith("2.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model)


def sharded(kind):
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), **FSDP[kind])


def saved_and_loaded(zero):
    """What save() says of an optimizer that keeps each state on one rank, and whether its advice works."""
    ends, saved, told = [], (), ""
    for begins in (0, 2):
        torch.manual_seed(begins)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 4)))
        optimizer = zero(model.parameters(), optimizer_class=hs.optim.AdamW, lr=0.1)
        amp = hs.prepare(model.module, optimizer, "O1", dtype="fp16", kernels="native")
        if begins:
            for one, state in zip((model, optimizer, amp), saved):
                one.load_state_dict(state)
        for step in range(begins, 4):
            with amp.autocast():
                loss = loss_of(model, dist.get_rank() + 2 * step)
            amp.backward(loss)
            amp.step()
            if step == 1:
                with pytest.raises(CheckpointError) as raised:
                    amp.save("nowhere")
                told = str(raised.value)
                optimizer.consolidate_state_dict(to=0)
                state = [None]
                if dist.get_rank() == 0:
                    state = [tuple(one.state_dict() for one in (model, optimizer, amp))]
                dist.broadcast_object_list(state)
                saved = copy.deepcopy(state[0])
        ends.append([p.detach().clone() for p in model.parameters()])
    return told, all(map(torch.allclose, *ends))  # DDP's first bucket adds up three ranks in another order


def masters_of_shards(fsdp):
    """What is said where masters are asked for, with the model wrapped before and after."""
    said = []
    for before in (True, False):
        model = net()
        wrapped = fsdp(model, device_id=torch.device("cpu"), use_orig_params=True) if before else model
        optimizer = hs.optim.SGD(wrapped.parameters(), lr=0.1)
        try:
            amp = hs.prepare(wrapped, optimizer, "O2", dtype="bf16", norm_group=dist.group.WORLD)
            wrapped = fsdp(model, device_id=torch.device("cpu"), use_orig_params=True)
            amp.backward(loss_of(wrapped, 0))
        except HalfstepError as error:
            said.append(str(error))
    return said


def wraps(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it compiles by torch.jit.script when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    whole = step_of_session(net(), DistributedDataParallel)
    found = {"right": whole, "session": {}, "grouped": {}, "bare": {}}
    for kind in FSDP:
        found["session"][kind] = step_of_session(sharded(kind))
        found["grouped"][kind] = step_of_session(model := sharded(kind), norm_group=model.process_group)
        for option in ({"clip_norm": 0.1}, {"skip_nonfinite": True}, {}):
            model = sharded(kind)
            optimizer = hs.optim.SGD(model.parameters(), lr=0.1, **option)
            found["bare"][kind, *option] = step_of_optimizer(model, optimizer)
    for option in ({"clip_norm": 0.1}, {"skip_nonfinite": True}, {}):
        model = DistributedDataParallel(net())
        zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=hs.optim.SGD, lr=0.1, **option)
        found["bare"]["zero", *option] = step_of_optimizer(model, zero)
        model = with_own(net())
        optimizer = hs.optim.SGD(model.parameters(), lr=0.1, **option)
        found["bare"]["own", *option] = step_of_optimizer(model, optimizer)
    found["saved"] = saved_and_loaded(ZeroRedundancyOptimizer)
    found["masters"] = masters_of_shards(FullyShardedDataParallel)
    found["session"]["own"] = step_of_session(net(), with_own)
    model = net()
    optimizers = [hs.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    amp = hs.prepare(model, optimizers, "O0")
    wrapped = with_own(model)
    amp.backward(loss_of(wrapped, rank))
    found["apart"] = [float(amp.step(one, clip_norm=0.1).grad_norm) for one in optimizers]
    return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_norms_and_skips_over_wraps_are_those_of_one_process_or_refused_by_name(world):
    results = run(wraps, world)
    model = net()
    torch.stack([loss_of(model, rank) for rank in range(world)]).mean().backward()
    right = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for found in results:
        assert found["right"] == pytest.approx(right, rel=1e-5)
        assert "call optimizer.consolidate_state_dict(to=0) on every rank" in found["saved"][0]
        assert found["saved"][1], "the advice in the message"
        assert ["hs.distributed.shard(model)" in said for said in found["masters"]] == [True, True]
        assert not any("then wrap it" in said for said in found["masters"]), "neither sends to the other"
        for kind in ("flat", "original"):
            assert SESSION in found["session"][kind]
            assert "torch's FullyShardedDataParallel" in found["session"][kind]
            assert found["grouped"][kind] == pytest.approx(right, rel=1e-5), "the cure in the message"
        assert found["session"]["whole"] == pytest.approx(right, rel=1e-5)
        assert "parameter '2.weight' is each rank's own" in found["session"]["own"].replace("bias", "weight")
        for (kind, *option), (said, same) in found["bare"].items():
            if option and kind != "whole":
                assert said.startswith("a parameter of shape"), (kind, option)
                assert BARE in said
                assert same, "nothing was updated"
            else:
                assert said is None, (kind, option)
                assert not same or kind == "zero"
        assert found["apart"][0] == results[0]["apart"][0]
    assert len({found["apart"][1] for found in results}) == world, (
        "each rank's own, clipped by their own norm"
    )


def headroom(rank, first):
    """A scale chosen from magnitudes, while one of two optimizers has parameters of each rank's own."""
    model = net()
    optimizers = [hs.optim.SGD(model[part].parameters(), lr=0.01) for part in (0, 2)]
    limit = hs.DynamicLossScale(init=64.0, interval=1)
    scale = hs.HeadroomLossScale(limit=limit)
    amp = hs.prepare(model, optimizers, "O1", dtype="fp16", loss_scale=scale, kernels="native")
    wrapped, scales = with_own(model), []
    for _ in range(12):
        with amp.autocast():
            loss = loss_of(wrapped, rank, 1.0 if rank else 1e-3)
        amp.backward(loss)
        for optimizer in (optimizers[first], optimizers[1 - first]):
            amp.step(optimizer)
        scales.append(amp.loss_scale.read())
    return scales, model[0].weight.detach()


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_with_parameters_of_their_own_have_one_scale(first):
    (scales, weight), (others, other) = run(headroom, 2, first)
    assert scales == others
    assert len({*scales}) > 3
    assert torch.equal(weight, other)
