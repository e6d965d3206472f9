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
    one.wrote(session().save(one.path_of(5)))
    one.claim()
    with pytest.raises(CheckpointError, match=r"another run \(step-00000005\)"):
        other.claim()


@pytest.mark.parametrize("name", ["step-best.pt", "step-1.pt", "xstep-00000009.pt", "step-00000009.pt.bak"])
def test_files_of_other_names_are_neither_read_nor_deleted(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    folder = CheckpointFolder(tmp_path, keep=1)
    for step in (1, 2):
        session().save(folder.path_of(step), keep_last=folder.keep)
    assert [p.name for p in folder.paths()] == ["step-00000002"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "step-00000002"])


def test_only_what_dead_processes_left_is_cleared(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    living, gone = f"{checkpoint.HOST}-{os.getppid()}", f"{checkpoint.HOST}-{ended.pid}"
    names = [f".step-4.{living}.tmp", ".step-4.otherhost-1.tmp", ".step-plan.tmp", f".step-4.{gone}.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text('{"halfstep": "1"}')
    session().save(tmp_path / "step-5")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names[:3], "step-5"])


def test_what_another_host_left_is_cleared_when_it_is_ours_and_nothing_in_it_changed_for_long(tmp_path):
    """A host that died used to leave its unfinished folders for good."""
    marks = {"old": '{"halfstep": "1"}', "new": '{"halfstep": "1"}', "strange": '{"name": "a page"}'}
    for name, mark in marks.items():
        folder = tmp_path / f".step-4.{name}-1.tmp"
        folder.mkdir()
        for file in ("manifest.json", "rank-00000-of-00001.safetensors"):
            (folder / file).write_text(mark)
        for path in (*folder.iterdir(), folder):
            os.utime(path, (0, 0))
    os.utime(tmp_path / ".step-4.new-1.tmp" / "rank-00000-of-00001.safetensors")  # written this moment
    session().save(tmp_path / "step-5")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".step-4.new-1.tmp", ".step-4.strange-1.tmp", "step-5",
    ]  # fmt: skip


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
