"""What a step sends over two ranks beside torch's own: no pickles, one exchange of norms, at fp16 a flag."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests.ranks import run

PICKLING = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def counted(step):
    """Collectives of the third step, by kind; what is sent by pickle is an error."""
    before = {name: getattr(dist, name) for name in PICKLING}
    step(), step()
    with pytest.MonkeyPatch.context() as patch, CommDebugMode() as mode:
        for name in before:
            patch.setattr(dist, name, lambda *_, name=name, **__: pytest.fail(name))
        step()
    found = Counter[str]()
    for op, number in mode.get_comm_counts().items():
        found[str(op).rpartition(".")[2].strip("_").removesuffix("_base").replace("all_", "all")] += number
    return found


def wrapped(model, way):
    return DDP(model) if way == "DDP" else model


def ours(rank, way, level, dtype, owner, clip):
    model = net()
    if way == "FSDP2":
        hs.distributed.shard(model)
    kind = hs.optim.AdamW if owner == "ours" else torch.optim.AdamW
    amp = hs.prepare(model, kind(model.parameters(), lr=0.1), level=level, dtype=dtype, kernels="native")
    outer = wrapped(model, way)

    def step():
        with amp.autocast():
            loss = outer(torch.ones(2, 8, requires_grad=True) + rank).float().square().mean()
        amp.backward(loss)
        assert amp.step(clip_norm=clip).taken

    return counted(step)


def torchs(rank, way, clip):
    model = net()
    if way == "FSDP2":
        hs.distributed.shard(model)
    optimizer, outer = torch.optim.AdamW(model.parameters(), lr=0.1), wrapped(model, way)

    def step():
        outer(torch.ones(2, 8, requires_grad=True) + rank).square().mean().backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            _ = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()

    return counted(step)


def both(rank, way):
    """Torch's step without clipping, clipped, and by all settings what ours sends more than the first."""
    plain, clipped = (torchs(rank, way, clip) for clip in (None, 1.0))
    settings = [
        (level, dtype, owner, clip)
        for level in ("O1", "O2")
        for dtype in ("bf16", "fp16")
        for owner in ("ours", "torch")
        for clip in (None, 1.0)
    ]
    more = {one: Counter(ours(rank, way, *one)) for one in settings}
    assert all(not plain - found for found in more.values())
    return plain, clipped, {one: dict(found - plain) for one, found in more.items()}


@pytest.mark.parametrize("way", [pytest.param("DDP", marks=pytest.mark.long), "FSDP2"])
def test_a_step_adds_one_exchange_of_norms_and_at_fp16_one_flag(way):
    """The exchange says whether all shards are finite; torch's own step asks only where it clips.

    DDP sends gradients of one dtype together, and normalisations stay fp32 at O2: one bucket more.
    """
    for plain, clipped, more in run(both, 2, way):
        assert plain
        assert dict(clipped - plain) == ({"allreduce": 1} if way == "FSDP2" else {})
        exchange = {"allgather": 1} if way == "FSDP2" else {}
        for (level, dtype, *rest), found in more.items():
            reduced = (dtype == "fp16") + (level == "O2" and way == "DDP")
            assert found == exchange | ({"allreduce": reduced} if reduced else {}), (level, dtype, rest)
