"""Checkpoints: atomic, checked, fully qualified names, the last k."""

import random

import numpy
import pytest
import torch

from halfstep import checkpoint, rng
from halfstep.checkpoint import CheckpointFolder
from halfstep.errors import CheckpointError, HalfstepWarning


def test_what_was_saved_is_what_is_loaded(tmp_path):
    state = {"a": torch.arange(5.0), "b": [1, 2.5, "x", None, True], "c": {"d": torch.ones(2).bfloat16()}}
    path = checkpoint.save(tmp_path / "deep" / "a.pt", state)
    found = checkpoint.load(path)
    assert torch.equal(found["a"], state["a"])
    assert found["b"] == state["b"]
    assert torch.equal(found["c"]["d"], state["c"]["d"])
    assert [p.name for p in path.parent.iterdir()] == ["a.pt"]


def test_plain_torch_reads_it(tmp_path):
    path = checkpoint.save(tmp_path / "a.pt", {"a": torch.ones(3)})
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(3))


def test_no_altered_byte_goes_unseen(tmp_path):
    """Every byte of the tensor is flipped in turn, and many elsewhere: an error, or the same values."""
    wanted = torch.arange(40, dtype=torch.int16)
    path = checkpoint.save(tmp_path / "a.pt", {"a": wanted})
    whole = path.read_bytes()
    start = whole.index(wanted.numpy().tobytes())
    refused = 0
    for at in [*range(start, start + 80), *range(0, len(whole), 29)]:
        altered = bytearray(whole)
        altered[at] ^= 0x41
        path.write_bytes(altered)
        try:
            assert torch.equal(checkpoint.load(path)["a"], wanted), f"byte {at} changed the values unseen"
        except CheckpointError as error:
            refused += "\n" not in str(error)
    assert refused >= 80


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "corrupt or not a checkpoint"),
        (b"hello", "corrupt or not a checkpoint"),
        (None, "no checkpoint at"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "a.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"a": Evil()}, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointError, match="it holds print, objects that only running its code would make"
    ):
        checkpoint.load(tmp_path / "a.pt")


def test_a_checkpoint_that_is_no_mapping_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds a list, expected a mapping"):
        checkpoint.load(tmp_path / "a.pt")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    path = checkpoint.save(tmp_path / "a.pt", {"a": 1})
    with pytest.raises((CheckpointError, AttributeError, TypeError)):
        checkpoint.save(path, {"a": lambda: None})
    assert checkpoint.load(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        checkpoint.save(tmp_path / "file" / "a.pt", {"a": 1})


def test_every_generator_comes_back(tmp_path):
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    path = checkpoint.save(tmp_path / "a.pt", rng.random_state())
    wanted = (random.random(), numpy.random.rand(), torch.rand(1).item(), random.gauss(0, 1))
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    rng.load_random_state(checkpoint.load(path))
    assert (random.random(), numpy.random.rand(), torch.rand(1).item(), random.gauss(0, 1)) == wanted


def files(folder, *steps):
    """A folder of checkpoints, whose names alone it goes by: here a file each."""
    return [checkpoint.save(folder / f"step-{step:08d}", {"step": step}) for step in steps]


def read(folder):
    """What the folder goes on from."""
    found = []
    folder.read_latest(lambda path: found.append(checkpoint.load(path)))
    return found


def test_a_folder_goes_on_from_its_newest(tmp_path):
    assert read(CheckpointFolder(tmp_path)) == []
    files(tmp_path, 5, 100, 15)
    assert [p.name for p in CheckpointFolder(tmp_path).paths()][-1] == "step-00000100"
    assert read(CheckpointFolder(tmp_path)) == [{"step": 100}]


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_taken(tmp_path):
    _, second, third = files(tmp_path, 1, 2, 3)
    third.write_bytes(b"rubbish")
    second.write_bytes(b"")
    folder = CheckpointFolder(tmp_path, keep=1)
    with pytest.warns(HalfstepWarning, match=r"step-0000000[23] is corrupt.*going on from step-00000001"):
        assert read(folder) == [{"step": 1}]
    assert (folder.has(1), folder.has(2)) == (True, False)
    names = ["step-00000001", "step-00000002.damaged", "step-00000003.damaged"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_where_all_are_damaged_the_folder_is_left_as_it_is(tmp_path):
    (path,) = files(tmp_path, 2)
    path.write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"step-00000002 is corrupt.*no earlier checkpoint.*afresh"):
        read(CheckpointFolder(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_a_folder_that_keeps_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep=0"):
        CheckpointFolder(tmp_path, keep=0)
