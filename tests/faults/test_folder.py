"""A folder of checkpoints loses nothing: not to another run, a full disk, a stranger's file, a bad value."""

import errno
import os
import resource

import numpy as np
import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.checkpoint import CheckpointFolder
from halfstep.errors import CheckpointError


def session():
    model = nn.Linear(2, 2)
    return hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), level="O2", dtype="bf16")


def test_the_checkpoint_just_written_is_never_the_one_to_go(tmp_path):
    """After going back behind newer checkpoints each new one used to be deleted at once."""
    amp = session()
    for step in (100, 1):
        amp.save(tmp_path / f"step-{step}", keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-100"]


def test_two_living_runs_in_one_folder_are_told_and_nothing_is_lost(tmp_path):
    one, other = CheckpointFolder(tmp_path, keep=1), CheckpointFolder(tmp_path, keep=1)
    for folder in (one, other):
        folder.read_latest(lambda path: pytest.fail(f"{path} was never written"))
    session().save(one.path_for(5))
    one.claim()
    with pytest.raises(CheckpointError, match=r"another run \(step-00000005\)"):
        other.claim()


@pytest.mark.parametrize("name", ["step-best.pt", "step-1.pt", "xstep-00000009.pt", "step-00000009.pt.bak"])
def test_files_of_other_names_are_neither_read_nor_deleted(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    folder = CheckpointFolder(tmp_path, keep=1)
    for step in (1, 2):
        session().save(folder.path_for(step), keep_last=folder.keep)
    assert [p.name for p in folder.paths()] == ["step-00000002"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "step-00000002"])


@pytest.mark.parametrize(("keep", "gone"), [(None, {"step-5"}), (2, {"step-5", "step-4"})])
def test_what_killed_saves_left_is_cleared_by_name_and_with_keep_last_by_series(tmp_path, keep, gone):
    """Earlier versions put host and process into the names."""
    ours = [*(f".step-{n}.0123abcd.tmp" for n in (4, 5, 6)), ".step-4.host-17.tmp", ".trial-4.0123abcd.tmp"]
    strange = [".step-plan.tmp", ".step-4.strange.tmp", ".step-5.strange.tmp"]
    for name in (*ours, *strange):
        (tmp_path / name).mkdir()
        mark = '{"halfstep": "1"}' if name in ours else '{"name": "a page"}'
        (tmp_path / name / "manifest.json").write_text(mark)
    session().save(tmp_path / "step-5", keep_last=keep)
    left = [name for name in ours if name.split(".")[1] not in gone]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*left, *strange, "step-5"])


def test_a_full_disk_is_named_with_the_bytes_needed_and_free(tmp_path):
    checkpoint.save(tmp_path / "a.pt", {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"b.pt: no room.*400,000 bytes are needed, [\d,]+ are"):
            checkpoint.save(tmp_path / "b.pt", {"weights": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]
    assert checkpoint.load(tmp_path / "a.pt") == {"step": 1}


def test_a_disk_that_turns_out_full_at_the_sync(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"a.pt: no room for it: about 4 bytes"):
        checkpoint.save(tmp_path / "a.pt", {"a": torch.zeros(1)})
    assert not list(tmp_path.iterdir())


def test_what_torch_would_only_read_by_running_code_is_named_at_the_load(tmp_path):
    path = checkpoint.save(tmp_path / "a.pt", {"at": np.int64(3)})
    with pytest.raises(CheckpointError, match=r"it holds numpy.*, objects that only running its code"):
        checkpoint.load(path)
