"""Groups of ranks that train side by side: each is one run, whatever the others do (gloo processes)."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from halfstep.casting.kernel_choice import KernelTable, install_measured
from halfstep.distributed import local_of
from halfstep.errors import ConfigError
from tests.ranks import run

pytestmark = pytest.mark.long
STEPS = {0: 5, 1: 8}
"""By group."""
KINDS = {"ours": hs.optim.AdamW, "torch": torch.optim.AdamW}
WAYS = [
    ("ddp", "O1", "fp16", "torch"),
    ("ddp", "O2", "fp16", "ours"),
    ("ddp", "O2", "fp16", "torch"),
    ("given", "O1", "fp16", "torch"),
    ("shards", "O1", "fp16", "torch"),
    ("shards", "O2", "fp16", "ours"),
]


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def trained(number, place, group, mesh, way, folder, rests):
    """Train model `number` on the ranks of a group, of which this is the one at `place`."""
    how, level, dtype, kind = way
    model = net(number)
    if how == "shards":
        hs.distributed.shard(model, mesh=mesh)
    optimizer = KINDS[kind](model.parameters(), lr=0.01)
    given = {"group": group} if how == "given" else {}
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype, loss_scale=2.0**8, kernels="native", **given)
    forward = DDP(model, process_group=group) if how == "ddp" else model
    taken = []

    def step(at):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + 10 * at + place))
        with amp.autocast():
            loss = forward(x).float().square().mean()
        amp.backward(loss)
        if how == "given":  # nothing wraps it: the loop averages by itself
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
        if at == 2 and number == 1 and place == 1:
            local_of(optimizer.param_groups[0]["params"][0].grad).view(-1)[0] = float("inf")
        taken.append(amp.step(clip_norm=1.0).taken)

    for at in range(STEPS[number]):
        step(at)
        if at == 3:
            amp.save(Path(folder) / f"{how} {level} {kind} {number} {rests}", background=number == 0)
    amp.wait_until_saved()
    weights = [whole(p) for p in model.parameters()]
    amp.load(Path(folder) / f"{how} {level} {kind} {number} {rests}")
    step(7)
    return taken, weights, [whole(p) for p in model.parameters()], amp.loss_scale.read()


def side_by_side(rank, ways, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("run", "ranks"))["ranks"]
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = rank // 2
    return [trained(number, rank % 2, groups[number], mesh, way, folder, "beside") for way in ways]


def alone(rank, number, ways, folder):
    mesh = init_device_mesh("cpu", (2,))
    return [trained(number, rank, dist.group.WORLD, mesh, way, folder, "alone") for way in ways]


def test_two_groups_of_two_ranks_are_each_as_alone(tmp_path):
    """They used to hang at the first step that only one had, and to skip for each other's overflow."""
    beside = run(side_by_side, 4, WAYS, str(tmp_path))
    for number in (0, 1):
        for place, found in enumerate(run(alone, 2, number, WAYS, str(tmp_path))):
            for way, mine, theirs in zip(WAYS, beside[2 * number + place], found):
                assert mine[0] == theirs[0], way
                assert mine[0] == [number == 0 or at != 2 for at in (*range(STEPS[number]), 7)], way
                assert all(map(torch.equal, mine[1] + mine[2], theirs[1] + theirs[2])), way
                assert mine[3] == theirs[3], way
    for folder in tmp_path.iterdir():
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert files == [f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)], folder


def on_one_rank_only(rank):
    """A teacher, an evaluator, an actor: rank 1 prepares what rank 0 does not."""
    install_measured(KernelTable((), lambda cls, direction: {"native": 1.0, "rounded": 9.0}, name="measured"))
    told = []
    if rank == 1:
        teacher, actor = net(0), net(1)
        amp = hs.prepare(teacher, level="O1", dtype="bf16", kernels="measured")
        with torch.no_grad(), amp.autocast():
            told.append(teacher(torch.ones(2, 8)).dtype)
        amp = hs.prepare(actor, torch.optim.SGD(actor.parameters(), lr=0.1), level="O1", dtype="bf16")
        with amp.autocast():
            loss = actor(torch.ones(2, 8)).float().square().mean()
        amp.backward(loss)
        told.append(amp.step().taken)
    alone = dist.new_group([1])
    if rank == 1:
        scaled = net(2)
        optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
        amp = hs.prepare(scaled, optimizer, level="O1", dtype="fp16", loss_scale=8.0, group=alone)
        with amp.autocast():
            loss = scaled(torch.ones(2, 8)).float().square().mean()
        amp.backward(loss)
        told.append(amp.step().taken)
    dist.barrier()
    return told


def test_prepare_on_one_rank_only_does_not_wait_for_the_others():
    assert run(on_one_rank_only, 2, seconds=60) == [[], [torch.bfloat16, True, True]]


def odd_groups(rank):
    """Tensor parallel over two ranks under DDP over two others; a group that is none, or of other ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    hs.distributed.shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    amp = hs.prepare(model, optimizer, level="O1", dtype="fp16", loss_scale=8.0, kernels="native")
    taken = []
    for at in range(3):
        with amp.autocast():
            loss = model(torch.ones(2, 8)).float().square().mean()
        amp.backward(loss)
        if at == 1 and rank == 3:
            local_of(optimizer.param_groups[0]["params"][0].grad).view(-1)[0] = float("inf")
        taken.append(amp.step().taken)
    errors = []
    other = dist.new_group([0, 1])
    for wrong in (other, "dp") if rank > 1 else ("dp",):
        with pytest.raises(ConfigError, match="expected a process group that this rank is in") as caught:
            hs.prepare(net(0), level="O1", dtype="bf16", group=wrong)
        errors.append(str(caught.value))
    return taken, amp.group is None


def test_meshes_that_cover_all_ranks_are_all_ranks():
    assert run(odd_groups, 4) == [([True, False, True], True)] * 4


def replayed_beside(rank):
    """One group meets a bad step and replays it together; the other goes on, and ends earlier."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number, model = rank // 2, net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O1", dtype="bf16", skip_nonfinite=True, kernels="native")
    ddp = DDP(model, process_group=groups[number])

    def step(x):
        with amp.autocast():
            loss = ddp(x).float().square().mean()
        amp.backward(loss)
        return amp.step().taken

    taken = []
    for at in range(4 if number else 2):
        x = torch.ones(2, 8) / (0.0 if at == 2 and rank == 3 else 1.0)
        with pytest.warns(hs.HalfstepWarning) if at == 2 and rank == 3 else nullcontext():
            taken.append(amp.replayable(step, x))
    return taken


def test_a_group_replays_without_the_others():
    assert run(replayed_beside, 4) == [[True] * 2] * 2 + [[True, True, False, True]] * 2
