"""Checkpoints over ranks: no bit lost on any number of them; a rank killed at any moment costs nothing."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from halfstep.checkpoint import checksum_of
from halfstep.distributed import world_size
from tests.ranks import run, start


def net(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 19), nn.LayerNorm(19), nn.GELU(), nn.Linear(19, 3))


def build(way, state="fp32", seed=3, level="O2"):
    model = net(seed)
    if way == "shards":
        hs.distributed.shard(model)
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01, state_dtype=state)
    amp = hs.prepare(model, optimizer, level=level, dtype="bf16")
    return model, optimizer, amp


def whole(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def values(model, optimizer):
    masters = {name: whole(optimizer.master_of(p)) for name, p in model.named_parameters()}
    states = optimizer.state_dict()["state"]
    return masters | {
        f"{n}.{k}": whole(v)
        for n, entry in states.items()
        for k, v in entry.items()
        if k == "step" or k.startswith("exp_avg")
    }


def leg(rank, folder, source, target, state, steps, storage=None):
    """Load, look, train a little, look, save."""
    model, optimizer, amp = build("shards" if world_size() > 1 else "plain", state, seed=target)
    if source is not None:
        amp.load(Path(folder) / str(source), storage=storage)
    before = values(model, optimizer)
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * target + step))
        with amp.autocast():
            loss = model(x).square().mean()
        amp.backward(loss)
        amp.step()
    amp.save(Path(folder) / str(target), storage=storage)
    return before, values(model, optimizer)


def travel(folder, worlds, state, steps, storage):
    after = None
    for number, world in enumerate(worlds):
        source = number - 1 if number else None
        everyone = run(leg, world, str(folder), source, number, state, steps, storage, seconds=400.0)
        for before, _ in everyone:
            assert after is None or all(torch.equal(before[name], after[name]) for name in after)
        after = everyone[0][1]


@pytest.mark.parametrize("storage", [None, "dcp"])
@pytest.mark.filterwarnings("ignore:the checkpoint was written by")
def test_no_bit_is_lost_from_one_to_four_ranks_and_back(tmp_path, storage):
    """Three rows lie on four ranks, of which one has none."""
    travel(tmp_path, [1, 2, 4, 1], "8bit", 2, storage)


def legs(rank, folder, worlds, state):
    """`travel` in four processes that live on: the first of them are the ranks of each leg."""
    trips = 0
    torch.distributed.destroy_process_group()
    for number, world in enumerate(worlds):
        if rank < world:
            meet = f"file://{folder}/meet{number}"
            torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
            before, after = leg(rank, folder, number - 1 if number else None, number, state, 1)
            if number:
                left = torch.load(f"{folder}/left{number - 1}", weights_only=True)
                assert before.keys() == left.keys()
                assert all(torch.equal(before[name], left[name]) for name in left), number
                trips += 1
            if rank == 0:
                torch.save(after, f"{folder}/left{number}")
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/end", rank=rank, world_size=4)
    return trips


@pytest.mark.exhaustive
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_many_random_trips(tmp_path, state):
    """HALFSTEP_TRIPS=100 makes a hundred of each."""
    chosen, count = random.Random(state), int(os.environ.get("HALFSTEP_TRIPS", "6"))
    worlds = [chosen.choice([1, 2, 4]) for _ in range(count + 1)]
    assert run(legs, 4, str(tmp_path), worlds, state, seconds=60.0 * count)[0] == count


STEPS = 40


def newest(folder):
    done = (*Path(folder).glob("step-*/manifest.json"), *Path(folder).glob("step-*/.metadata"))
    return max((p.parent for p in done), key=lambda p: int(p.name[5:]), default=None)


def unfinished(folder):
    begun = [p for p in folder.glob("step-*") if not any((p / name).exists() for name in DONE)]
    return begun + list(folder.glob(".step-*.tmp"))


DONE = ("manifest.json", ".metadata")


def resume(rank, folder, way, steps, every):
    way, *options = way.split()
    storage = "dcp" if "dcp" in options else None
    model, optimizer, amp = build(way)
    latest = newest(folder)
    begin = 0 if latest is None else amp.load(latest, storage=storage).position["next"]
    wrapped = DDP(model) if way == "ddp" else model
    for step in range(begin, steps):
        x = torch.randn(4, 6) + torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        with amp.autocast():
            loss = wrapped(x).square().mean()
        amp.backward(loss)
        amp.step(clip_norm=1.0)
        if every:
            path = Path(folder) / f"step-{step + 1}"
            background = "background" in options
            amp.save(path, position={"next": step + 1}, keep_last=2, background=background, storage=storage)
    amp.wait_until_saved()
    return values(model, optimizer)


def killed(folder, way, chosen, inside, patience):
    """Train on two ranks, kill one at a random moment (within a save: while its folder is being written)."""
    with_step = newest(folder / "run")
    done = int(with_step.name[5:]) if with_step is not None else 0
    meet = folder / f"meet{chosen.random()}"
    meet.mkdir()
    processes = start(resume, 2, (str(folder / "run"), way, STEPS * 100, True), meet)
    until = time.monotonic() + patience
    wanted = done + 1 + chosen.randrange(4)
    while (now := newest(folder / "run")) is None or int(now.name[5:]) < wanted:
        assert time.monotonic() < until, [p.exitcode for p in processes]
        time.sleep(0.002)
    if inside:
        while not unfinished(folder / "run"):
            assert time.monotonic() < until
            time.sleep(0.001)
    else:
        time.sleep(chosen.random() * 0.02)
    os.kill(processes[chosen.randrange(2)].pid, signal.SIGKILL)
    left = bool(unfinished(folder / "run"))
    for process in processes:
        process.join(timeout=patience)  # the other rank ends by itself
        assert process.exitcode not in (None, 0)
    return left


def kills(folder, way, count):
    chosen = random.Random(way)
    (folder / "run").mkdir()
    patience = 300 if count == 1 else 3000  # seconds: a long run may be given little of a machine
    falls_inside = [bool((turn + (way != "shards")) % 2) for turn in range(count)]
    inside = sum(killed(folder, way, chosen, within, patience) for within in falls_inside)
    latest = newest(folder / "run")
    steps = int(latest.name[5:]) + 3
    resumed = run(resume, 2, str(folder / "run"), way, steps, False, seconds=3.0 * patience)
    undisturbed = run(resume, 2, str(folder / "none"), way, steps, False, seconds=3.0 * patience)
    for one, other in zip(resumed, undisturbed):
        assert all(torch.equal(one[name], other[name]) for name in one)
    return inside


LONG = [pytest.param(way, marks=pytest.mark.long) for way in ("ddp background", "shards dcp")]


@pytest.mark.parametrize("way", ["shards", *LONG])
def test_a_rank_killed_anywhere_costs_nothing(tmp_path, way):
    kills(tmp_path, way, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["ddp", "shards", "shards background", "shards dcp"])
def test_many_kills(tmp_path, way):
    """HALFSTEP_KILLS=25 makes a hundred of the four; one of four at least falls inside a save."""
    count = int(os.environ.get("HALFSTEP_KILLS", "6"))
    inside = kills(tmp_path, way, count)
    print(f"{way}: {count} kills, {inside} inside a save, the resumed run bit-identical")
    assert inside >= 0.25 * count


def statistics(rank, folder):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    amp = hs.prepare(model, hs.optim.AdamW(model.parameters()), level="O2", dtype="bf16")
    for buffer in model.buffers():
        buffer.fill_(rank + 1)
    amp.save(Path(folder) / "a")
    for buffer in model.buffers():
        buffer.fill_(9)
    amp.load(Path(folder) / "a")
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_that_differ_over_ranks_are_all_rank_0s(tmp_path):
    for found in run(statistics, 2, str(tmp_path)):
        assert {name: value.unique().tolist() for name, value in found.items()} == {key: [1] for key in found}


def opened(rank, folder):
    files = set()
    sys.addaudithook(lambda event, args: files.add(Path(str(args[0])).name) if event == "open" else None)
    _, _, amp = build("shards")
    amp.save(Path(folder) / "a")
    files.clear()
    amp.load(Path(folder) / "a")
    return sorted(name for name in files if name.endswith(".safetensors"))


def test_a_rank_opens_the_files_that_hold_its_part(tmp_path):
    """Rank 0 has its rows and what is not cut; rank 1 its rows, and what is not cut from rank 0's file."""
    first, second = (f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1))
    assert run(opened, 2, str(tmp_path)) == [[first], [first, second]]


def opened_in_ddp(rank, folder):
    files = set()
    sys.addaudithook(lambda event, args: files.add(Path(str(args[0])).name) if event == "open" else None)
    model, _, amp = build("ddp")
    ddp = DDP(model)
    amp.save(Path(folder) / "a")
    files.clear()
    amp.load(Path(folder) / "a")
    assert ddp.module is model
    return len([name for name in files if name.endswith(".safetensors")])


def test_under_ddp_few_ranks_write_so_that_loading_opens_few_files(tmp_path):
    """Two of four write what all hold; a rank opens these, its own, and one whose checksum it looks at."""
    assert max(run(opened_in_ddp, 4, str(tmp_path))) <= 3


def with_old(rank, folder):
    model, optimizer, amp = build("shards")
    amp.save(Path(folder) / "a")
    before = values(model, optimizer)
    if rank == 0:
        manifest = json.loads((Path(folder) / "a" / "manifest.json").read_text())
        del manifest["sha256"], manifest["index"]
        text = json.dumps({**manifest, "sha256": checksum_of(manifest)})
        (Path(folder) / "a" / "manifest.json").write_text(text)
    torch.distributed.barrier()
    model, optimizer, amp = build("shards", seed=8)
    amp.load(Path(folder) / "a")
    after = values(model, optimizer)
    return all(torch.equal(before[name], after[name]) for name in before)


def test_a_folder_without_an_index_is_read(tmp_path):
    assert run(with_old, 2, str(tmp_path)) == [True, True]
