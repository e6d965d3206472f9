"""What one rank cannot save or load ends on all alike, with an error that says it, and nothing changed."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from halfstep import shardfiles
from halfstep.checkpoint import checksum_of
from halfstep.errors import CheckpointError
from tests.ranks import run


def build(seed=0, kind="AdamW", width=4):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    optimizer = getattr(hs.optim, kind)(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer, scheduler, hs.prepare(model, optimizer, "O2", dtype="bf16", kernels="native")


def train(made, ddp, rank):
    amp = made[3]
    with amp.autocast():
        loss = ddp(torch.ones(2, 3) * (rank + 1)).float().square().mean()
    amp.backward(loss)
    return amp


def told(deed):
    with pytest.raises(CheckpointError) as raised:
        deed()
    return str(raised.value)


def unsaveable(rank, folder):
    made = build()
    ddp, found = DDP(made[0]), dict[str, str]()
    train(made, ddp, rank).step()
    found["position"] = told(lambda: made[3].save(f"{folder}/a", position={1: object} if rank == 1 else {}))
    found["background"] = told(
        lambda: made[3].save(f"{folder}/a", position=object if rank == 1 else None, background=True)
    )
    found["dcp"] = told(
        lambda: made[3].save(f"{folder}/b", position=object if rank == 1 else None, storage="dcp")
    )
    train(made, ddp, rank)
    if rank == 0:
        made[0].zero_grad()
    found["gradients"] = told(lambda: made[3].save(f"{folder}/a"))
    made[0].zero_grad()
    made[3].save(f"{folder}/c", position=rank)
    assert made[3].load(f"{folder}/c").position == rank
    return found


def test_what_one_rank_cannot_save_is_said_on_all(tmp_path):
    first, second = run(unsaveable, 2, str(tmp_path))
    assert first["gradients"].startswith("rank 1 cannot save: save() between backward() and step()")
    assert all(first[way].startswith("rank 1 cannot save: ") for way in first)
    assert all(first[way] == f"rank 1 cannot save: {second[way]}" for way in first)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def bits(made):
    model, optimizer, scheduler, amp = made
    return repr((model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), amp.state_dict()))


def altered(rank, folder):
    """Rank 1's own part says something else of its random generators, with right checksums."""
    if rank == 0:
        path, file = Path(folder, "a", "manifest.json"), Path(folder, "a", "rank-00001-of-00002.safetensors")
        manifest = json.loads(path.read_text())
        manifest.pop("sha256")
        file.write_bytes(file.read_bytes().replace(b"random", b"rendom"))
        manifest["files"][file.name]["sha256"] = shardfiles.checksum(file)
        path.write_text(json.dumps({**manifest, "sha256": checksum_of(manifest)}))
    torch.distributed.barrier()


def unloadable(rank, folder):
    made = build()
    train(made, DDP(made[0]), rank).step()
    made[3].save(f"{folder}/a", schedulers=[made[2]], position=rank)
    found = dict[str, str]()
    others = {
        "schedulers": build(1),
        "algorithm": build(1, "Lion" if rank == 1 else "AdamW"),
        "shape": build(1, width=5 if rank == 1 else 4),
    }
    for name, other in others.items():
        before = bits(other)
        schedulers = [] if name == "schedulers" and rank == 1 else [other[2]]
        found[name] = told(lambda a=other[3], s=schedulers: a.load(f"{folder}/a", schedulers=s))
        assert bits(other) == before, name
    altered(rank, folder)
    before = bits(made)
    found["altered"] = told(lambda: made[3].load(f"{folder}/a", schedulers=[made[2]]))
    assert bits(made) == before
    return found


def test_what_one_rank_cannot_load_is_said_on_all_and_changes_nothing(tmp_path):
    first, second = run(unloadable, 2, str(tmp_path))
    assert first == second
    assert "schedulers" in first["schedulers"]
    assert "size mismatch" in first["shape"]
