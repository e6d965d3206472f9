"""Checkpoints that were altered, with right checksums, and other things in the place of their files.

Each is one CheckpointError, and model, optimizers and session stay as they were.
"""

import json
import os
import random
import shutil
import time

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.checkpoint import checksum_of
from halfstep.errors import CheckpointError
from halfstep.session import loading
from halfstep.shardfiles import StoredPiece

VALUES = (None, True, -1, 1 << 40, 0.5, "x", [], [1], {}, {"x": 1}, {"tensor": "0.weight"}, float("nan"))


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizers = [
        hs.optim.AdamW(model[0].parameters(), lr=0.01),
        torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], lr=0.01),
    ]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizers[1], [2, 2])
    return (
        model,
        optimizers,
        scheduler,
        hs.prepare(model, optimizers, level="O2", dtype="bf16", kernels="native"),
    )


def train(run):
    model, optimizers, scheduler, amp = run
    with amp.autocast():
        loss = model(torch.ones(4, 3) * torch.arange(4)[:, None]).float().square().mean()
    amp.backward(loss)
    for optimizer in optimizers:
        amp.step(optimizer)
    scheduler.step()


def bits(run):
    """All that a load may change, as text."""
    model, optimizers, scheduler, amp = run
    masters = [hs.optim.fp32_state_dict(model, optimizer) for optimizer in optimizers]
    states = [optimizer.state_dict() for optimizer in optimizers]
    return repr((model.state_dict(), masters, states, scheduler.state_dict(), amp.state_dict()))


def alter(manifest, choose):
    """Change, delete or double one value somewhere in a manifest."""
    at, key = manifest, choose.choice([*manifest])
    while isinstance(at[key], dict | list) and at[key] and choose.random() < 0.85:
        at = at[key]
        key = choose.choice([*at]) if isinstance(at, dict) else choose.randrange(len(at))
    deed = choose.random()
    if deed < 0.2:
        del at[key]
    elif deed < 0.3 and isinstance(at, list):
        at.append(at[key])
    else:
        at[key] = choose.choice(VALUES)
    return f"{key!r} of {at!s:.80}"


def write(path, manifest):
    manifest.pop("sha256", None)
    path.write_text(json.dumps({**manifest, "sha256": checksum_of(manifest)}))


def check_altered(tmp_path, seeds):
    torch.set_printoptions(precision=10)
    source = build()
    train(source)
    source[3].save(tmp_path / "a", schedulers=[source[2]])
    path = tmp_path / "a" / "manifest.json"
    whole = path.read_text()
    run, refused = build(1), 0
    train(run)
    for seed in seeds:
        manifest = json.loads(whole)
        what = alter(manifest, random.Random(seed))
        write(path, manifest)
        before, began = bits(run), time.process_time()
        try:
            run[3].load(tmp_path / "a", schedulers=[run[2]])
        except CheckpointError:
            assert time.process_time() - began < 1.0, (seed, what)
            assert bits(run) == before, (seed, what)
            assert [path.name for path in tmp_path.iterdir()] == ["a"]
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {what}") from error
        else:  # another learning rate, say: a run can go on by it
            path.write_text(whole)
            try:
                train(run)
            except Exception as error:
                raise AssertionError(f"seed {seed}, a step after it: {what}") from error
            run[3].load(tmp_path / "a", schedulers=[run[2]])
    assert refused > len(seeds) / 2
    torch.set_printoptions(profile="default")


@pytest.mark.filterwarnings("ignore")
def test_altered_manifests_are_refused_before_anything_changes(tmp_path):
    check_altered(tmp_path, range(60))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_three_hundred_altered_manifests_are_refused_before_anything_changes(tmp_path):
    check_altered(tmp_path, range(300))


def huge(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


THINGS = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "truncated": lambda path: path.write_bytes(b'{"halfstep": "0.1.0"'),
    "empty": lambda path: path.touch(),
    "huge": huge,
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00000-of-00001.safetensors"])
def test_another_thing_in_the_place_of_a_file_is_refused(tmp_path, file, thing):
    run = build()
    run[3].save(tmp_path / "a")
    (tmp_path / "a" / file).unlink()
    THINGS[thing](tmp_path / "a" / file)
    before, began = bits(run), time.process_time()
    with pytest.raises(CheckpointError):
        run[3].load(tmp_path / "a")
    assert time.process_time() - began < 1.0
    assert bits(run) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    shutil.rmtree(tmp_path / "a")


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000-of-00001.safetensors"])
def test_a_link_to_a_regular_file_is_read_wherever_it_leads_and_checked(tmp_path, file):
    """As in caches of model hubs, whose folders are links to files by content; a save removes the link."""
    run, other = build(), build(1)
    train(run), train(other)
    run[3].save(tmp_path / "a")
    other[3].save(tmp_path / "b")
    run[3].load(tmp_path / "a")
    before = bits(run)
    (tmp_path / "a" / file).rename(tmp_path / "blob")
    (tmp_path / "a" / file).symlink_to("../blob")
    run[3].load(tmp_path / "a")
    assert bits(run) == before
    (tmp_path / "a" / file).unlink()
    (tmp_path / "a" / file).symlink_to(tmp_path / "b" / file)
    with pytest.raises(CheckpointError):
        run[3].load(tmp_path / "a")
    assert bits(run) == before
    run[3].save(tmp_path / "a")
    assert not (tmp_path / "a" / file).is_symlink()
    other[3].load(tmp_path / "b")


DCP_FILES = (".metadata", "__0_0.distcp", "halfstep.json")


@pytest.mark.parametrize("thing", ["pipe", "link to nothing", "link to itself", "link to a device"])
@pytest.mark.parametrize("file", DCP_FILES)
def test_another_thing_in_the_place_of_a_file_of_dcp_is_refused(tmp_path, file, thing):
    run = build()
    run[3].save(tmp_path / "a", storage="dcp")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {*DCP_FILES}
    (tmp_path / "a" / file).unlink()
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        THINGS[thing](tmp_path / folder / file)
    before = bits(run)
    with pytest.raises(CheckpointError):
        run[3].load(tmp_path / "a", storage="dcp")
    with pytest.raises(CheckpointError):
        run[3].save(tmp_path / "b", storage="dcp")
    assert bits(run) == before
    assert [path.name for path in (tmp_path / "b").iterdir()] == [file]


def test_a_save_does_not_wait_for_a_pipe_in_its_place(tmp_path):
    run = build()
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "manifest.json")
    with pytest.raises(CheckpointError, match="no checkpoint of halfstep"):
        run[3].save(tmp_path / "a")


def test_an_optimizer_that_refuses_its_state_leaves_nothing_changed(tmp_path):
    source = build()
    train(source)
    source[3].save(tmp_path / "a", schedulers=[source[2]])
    run = build(1)

    def refuse(state):
        raise RuntimeError("not mine")

    run[1][1].load_state_dict = refuse
    before = bits(run)
    with pytest.raises(CheckpointError, match="nothing was changed: not mine"):
        run[3].load(tmp_path / "a", schedulers=[run[2]])
    assert bits(run) == before


@pytest.mark.parametrize("reads", [0, 5])
def test_a_file_that_fails_the_second_time_leaves_a_run_half_loaded(tmp_path, monkeypatch, reads):
    """What the first pass has seen may be gone in the second: it is said, and another load mends it."""
    run = build()
    train(run)
    path = run[3].save(tmp_path / "a", schedulers=[run[2]])
    saved = [p.detach().clone() for p in run[0].parameters()]
    train(run)
    read, first_pass, left = StoredPiece.fill, loading._read, [1 << 30]

    def failing(*given):
        left[0] -= 1
        if left[0] < 0:
            raise CheckpointError("cut short")
        return read(*given)

    def passed(*given):
        found = first_pass(*given)
        left[0] = reads
        return found

    with monkeypatch.context() as patch:
        patch.setattr(StoredPiece, "fill", failing)
        patch.setattr(loading, "_read", passed)
        with pytest.raises(CheckpointError, match=r"half loaded: load again.*cut short"):
            run[3].load(path, schedulers=[run[2]])
    run[3].load(path, schedulers=[run[2]])
    assert all(torch.equal(a, b) for a, b in zip(saved, run[0].parameters()))
