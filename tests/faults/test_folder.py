"""A folder of checkpoints loses nothing: not to another run, a full disk, a stranger's file, a bad value."""

import errno
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.checkpoint import CheckpointFolder
from halfstep.errors import CheckpointError


def test_a_folder_of_another_run_keeps_its_checkpoints(tmp_path):
    old = CheckpointFolder(tmp_path, keep=2)
    for step in (100, 200):
        old.save(step, {"run": "old"})
    new = CheckpointFolder(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match=r"another run \(step-00000100.pt, .*resume=True"):
        new.save(1, {"run": "new"})
    assert [p.name for p in old.paths()] == ["step-00000100.pt", "step-00000200.pt"]


def test_the_checkpoint_just_written_is_never_the_one_to_go(tmp_path):
    """After going back behind newer checkpoints each new one used to be deleted at once."""
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(100, {"step": 100})
    assert folder.save(1, {"step": 1}).exists()


def test_two_living_runs_in_one_folder_are_told_and_nothing_is_lost(tmp_path):
    one, other = CheckpointFolder(tmp_path, keep=1), CheckpointFolder(tmp_path, keep=1)
    assert one.load_latest() is None
    assert other.load_latest() is None
    one.save(5, {"run": "one"})
    with pytest.raises(CheckpointError, match=r"another run \(step-00000005.pt\)"):
        other.save(6, {"run": "other"})
    assert one.load_latest() == {"run": "one"}


@pytest.mark.parametrize("name", ["step-best.pt", "step-1.pt", "xstep-00000009.pt", "step-00000009.pt.bak"])
def test_files_of_other_names_are_neither_read_nor_deleted(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    folder = CheckpointFolder(tmp_path, keep=1)
    assert folder.load_latest() is None
    folder.save(1, {"step": 1})
    folder.save(2, {"step": 2})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "step-00000002.pt"])


def test_only_what_dead_processes_left_is_cleared(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    host = checkpoint.HOST
    living = tmp_path / f".step-00000004.pt.{host}-{os.getppid()}.tmp"
    elsewhere = tmp_path / ".step-00000004.pt.otherhost-1.tmp"
    gone = tmp_path / f".step-00000004.pt.{host}-{int(dead.stdout)}.tmp"
    strangers = [tmp_path / ".step-plan.tmp", tmp_path / f".step-4.pt.{host}-{int(dead.stdout)}.tmp"]
    for path in (living, elsewhere, gone, *strangers):
        path.write_bytes(b"half")
    CheckpointFolder(tmp_path).save(5, {"step": 5})
    assert [living.exists(), elsewhere.exists(), gone.exists()] == [True, True, False]
    assert all(path.exists() for path in strangers)


def test_a_full_disk_is_named_with_the_bytes_needed_and_free(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step-00000002.pt: no room.*400,000 bytes are needed, [\d,]+ are"
        ):
            folder.save(2, {"weights": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.pt"]
    assert folder.load_latest() == {"step": 1}


def test_a_disk_that_turns_out_full_at_the_sync(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"a.pt: no room for it: about 4 bytes"):
        checkpoint.save(tmp_path / "a.pt", {"a": torch.zeros(1)})
    assert not list(tmp_path.iterdir())


def test_numpy_numbers_are_saved_as_pythons(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(0.1), betas=(np.float64(0.5), 0.9))
    state = {"optimizer": optimizer.state_dict(), "loader": {"at": np.int64(3), "seen": [np.bool_(True)]}}
    loaded = checkpoint.load(checkpoint.save(tmp_path / "a.pt", state))
    group = loaded["optimizer"]["param_groups"][0]
    assert (type(group["lr"]), group["lr"], group["betas"]) == (float, 0.1, (0.5, 0.9))
    assert loaded["loader"] == {"at": 3, "seen": [True]}


@pytest.mark.parametrize(
    ("bad", "kind"), [(np.zeros(2), "ndarray"), (lambda: 0, "function"), (object(), "object")]
)
def test_what_could_never_be_loaded_is_refused_at_the_save_by_its_place(tmp_path, bad, kind):
    with pytest.raises(CheckpointError, match=rf"state\['loader'\]\['order'\]\[1\] is a {kind}"):
        checkpoint.save(tmp_path / "a.pt", {"loader": {"order": [1, bad]}})
    assert not list(tmp_path.iterdir())


def stepped(kind):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("saved", "present"), [("AdamW", "Lion"), ("Adam", "AdamW"), ("AdamW", "Adam")])
def test_the_state_of_another_algorithm_is_refused(saved, present):
    model, one = stepped(getattr(hs.optim, saved))
    _, other = stepped(getattr(hs.optim, present))
    names = checkpoint.parameter_names(model, one)
    with pytest.raises(CheckpointError, match=f"{saved} saved it, here is {present}"):
        checkpoint.load_optimizer_state(other, names, checkpoint.optimizer_state(one, names))
