"""`storage="dcp"`: torch.distributed.checkpoint behind the same save and load: any store, all bits."""

from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import halfstep as hs
from halfstep.errors import CheckpointError
from tests.ranks import run


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def build(seed=3, way="plain", state="fp32", master="exact", level="O2"):
    """Rows cut by both: "2.weight" over tensor parallel and fully_shard; "4" in columns, unless 8-bit."""
    model = net(seed)
    if way == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"2": ColwiseParallel()} | ({} if state == "8bit" else {"4": RowwiseParallel()})
        if state == "8bit":
            plan = {"2": ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())}
        parallelize_module(model, mesh["tp"], plan)
        hs.distributed.shard(model, mesh=mesh["dp"])
    elif way == "shards":
        hs.distributed.shard(model)
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01, state_dtype=state, master=master)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    amp = hs.prepare(model, optimizer, level=level, dtype="bf16", kernels="native")
    return model, optimizer, scheduler, amp


def train(run, steps):
    model, _, scheduler, amp = run
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) + 0.01 * torch.randn(4, 8)
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step(clip_norm=1.0, scheduler=scheduler)


def whole(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def values(run):
    model, optimizer, scheduler, _ = run
    found = {name: whole(optimizer.master_of(p)) for name, p in model.named_parameters()}
    for number, entry in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{k}": whole(v) for k, v in entry.items() if isinstance(v, torch.Tensor)}
    return found | {"epoch": torch.tensor(scheduler.last_epoch)}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def in_two_dimensions(rank, folder, state, storage):
    run = build(3, "2d", state)
    placed = {str(p.placements) for p in run[0].parameters()}
    train(run, range(3))
    run[3].save(f"{folder}/a", schedulers=[run[2]], position=rank, extra={"x": 1}, storage=storage)
    train(run, range(3, 6))
    again = build(4, "2d", state)
    loaded = again[3].load(f"{folder}/a", schedulers=[again[2]], storage=storage)
    assert (loaded.position, loaded.extra) == (rank, {"x": 1})
    train(again, range(3, 6))
    assert_same(values(run), values(again))
    third = build(5, "2d", state)
    third[3].load(f"{folder}/a", schedulers=[third[2]], storage=storage)
    return values(third), placed


@pytest.mark.parametrize("storage", ["dcp", None])
@pytest.mark.parametrize("state", ["fp32", "8bit"])
@pytest.mark.filterwarnings("ignore:the checkpoint was written by")
def test_shards_over_tensor_parallelism(tmp_path, state, storage):
    everyone = run(in_two_dimensions, 4, str(tmp_path), state, storage)
    assert all("_StridedShard" in "".join(placed) for _, placed in everyone)
    alone = build(6, state=state)
    alone[3].load(tmp_path / "a", schedulers=[alone[2]], storage=storage)
    for found, _ in everyone:
        assert_same(values(alone), found)


def between_layouts(rank, folder, state):
    for way, seed in (("shards", 4), ("plain", 5)):
        run = build(seed, way, state)
        run[3].load(f"file://{folder}/a", schedulers=[run[2]], storage="dcp")
        assert values(run)["epoch"] == 3
        run[3].save(f"file://{folder}/{way}", schedulers=[run[2]], storage="dcp")
    return values(run)


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.filterwarnings("ignore:the checkpoint was written by")
def test_no_bit_is_lost_between_numbers_of_ranks(tmp_path, state):
    first = build(state=state)
    train(first, range(3))
    first[3].save(tmp_path / "a", schedulers=[first[2]], storage="dcp")
    for found in run(between_layouts, 2, str(tmp_path), state):
        assert_same(found, values(first))
    last = build(7, state=state)
    last[3].load(tmp_path / "shards", schedulers=[last[2]], storage="dcp")
    assert_same(values(last), values(first))


def test_a_store_by_its_url_holds_all_that_a_folder_does():
    """Only the last two are kept; a run that loads goes on bit for bit."""
    first = build(state="8bit")
    for step in range(4):
        train(first, [step])
        place = {"next": step, "generator": torch.get_rng_state()}
        first[3].save(
            f"memory://store/run/step-{step}",
            schedulers=[first[2]], position=place, extra=[step], keep_last=2, storage="dcp", background=True,
        )  # fmt: skip
    train(first, [4, 5])
    first[3].wait_until_saved()
    files = fsspec.filesystem("memory")
    assert sorted(p.rpartition("/")[2] for p in files.ls("/store/run", detail=False)) == ["step-2", "step-3"]
    again = build(9, state="8bit")
    loaded = again[3].load("memory://store/run/step-3", schedulers=[again[2]], storage="dcp")
    assert (loaded.position["next"], loaded.extra) == (3, [3])
    train(again, [4, 5])
    assert_same(values(first), values(again))


def test_a_writer_and_a_reader_of_ones_own(tmp_path):
    first, second = build(), build(5)
    train(first, range(2))
    writer = FileSystemWriter(tmp_path / "elsewhere", single_file_per_rank=False, thread_count=2)
    first[3].save(tmp_path / "a", schedulers=[first[2]], storage=writer)
    second[3].load(tmp_path / "a", schedulers=[second[2]], storage=FileSystemReader(tmp_path / "elsewhere"))
    assert_same(values(first), values(second))
    with pytest.raises(CheckpointError, match="keep_last=1 with a StorageWriter, whose checkpoints only you"):
        first[3].save(tmp_path / "b-1", keep_last=1, storage=writer)


def test_any_flipped_bit_is_found_before_anything_changes(tmp_path):
    first, other = build(), build(5)
    train(first, range(2))
    first[3].save(tmp_path / "a", storage="dcp")
    before = values(other)
    (file,) = (tmp_path / "a").glob("*.distcp")
    data = file.read_bytes()
    master = whole(first[1].master_of(first[0][0].weight)).numpy().tobytes()
    moment = first[1].state_dict()["state"][0]["exp_avg"].numpy().tobytes()
    for at in (data.index(master) + 7, data.index(moment) + len(moment) - 1, data.index(b'"optimizers"') + 3):
        changed = bytearray(data)
        changed[at] ^= 1
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match="is damaged: the checksum of"):
            other[3].load(tmp_path / "a", storage="dcp")
    assert_same(before, values(other))
    file.write_bytes(data)
    other[3].load(tmp_path / "a", schedulers=[], storage="dcp")
    assert torch.equal(other[1].master_of(other[0][0].weight), first[1].master_of(first[0][0].weight))


def half_flipped(rank, folder):
    model, optimizer, _, amp = build(3, "shards")
    amp.save(f"{folder}/a", storage="dcp")
    if rank == 1:
        file = Path(folder) / "a" / "__1_0.distcp"
        data = bytearray(file.read_bytes())
        data[data.index(optimizer.master_of(model[0].weight).to_local().numpy().tobytes()) + 1] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        build(4, "shards")[3].load(f"{folder}/a", storage="dcp")
    return str(caught.value)


def test_all_ranks_hear_of_a_part_that_one_of_them_cannot_read(tmp_path):
    for told in run(half_flipped, 2, str(tmp_path)):
        assert "/a is damaged: the checksum of '0.weight' is not the manifest's" in told


def test_a_name_is_used_once_and_what_cannot_be_is_named(tmp_path):
    amp = build()[3]
    amp.save(tmp_path / "a", storage="dcp")
    amp.save(tmp_path / "plain")
    for call, message in [
        (lambda: amp.save(tmp_path / "a", storage="dcp"), "holds a checkpoint already"),
        (lambda: amp.save(tmp_path / "plain", storage="dcp"), "holds a checkpoint already"),
        (lambda: amp.load(tmp_path / "plain", storage="dcp"), "load without storage= reads what is there"),
        (lambda: amp.save("memory://x/b"), "is a URL: give storage='dcp'"),
        (lambda: amp.load("memory://x/b"), "is a URL: give storage='dcp'"),
        (lambda: amp.load(tmp_path / "b", storage="dcp"), "no checkpoint at .*b: it has no .metadata"),
        (lambda: amp.load(tmp_path / "a"), "no manifest.json; storage='dcp' reads what was saved with it"),
        (lambda: amp.save("nowhere://b", storage="dcp"), "cannot write nowhere://b: Protocol not known"),
        (lambda: amp.load("nowhere://b", storage="dcp"), "cannot read nowhere://b: Protocol not known"),
        (
            lambda: amp.save(tmp_path / "c", storage="s3"),
            "storage='s3': expected 'dcp' or a StorageWriter",
        ),
        (lambda: amp.load(tmp_path / "a", storage=3), "storage=3: expected 'dcp' or a StorageReader of"),
        (lambda: amp.save(tmp_path / "c", keep_last=1, storage="dcp"), "a name ending in a number"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            call()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "plain"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_strangers_beside_and_inside_a_checkpoint_stay(tmp_path):
    amp = build()[3]
    for name in ("step-0", "step-1", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    torch.distributed.checkpoint.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "step-00", no_dist=True)
    for step in (1, 2, 3):
        amp.save(tmp_path / f"step-{step}", keep_last=1, storage="dcp")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-0", "step-00", "step-1", "step-3"]
    assert [p.name for p in (tmp_path / "step-1").iterdir()] == ["notes.txt"]
    with pytest.raises(CheckpointError, match="halfstep did not write it"):
        amp.load(tmp_path / "step-00", storage="dcp")
