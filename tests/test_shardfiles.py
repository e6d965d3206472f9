"""Pieces of tensors in files: any box is read from any cut, and no file without a part of it is opened."""

import random
import sys
from contextlib import closing

import pytest
import torch

from halfstep import shardfiles
from halfstep.errors import CheckpointError
from halfstep.shardfiles import Index, Piece

OPENED = []
sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)


def written(folder, files):
    """Files of pieces, and their index."""
    for number, pieces in enumerate(files):
        shardfiles.write(folder / f"rank-{number:05d}.safetensors", pieces, {"own": number})
    return shardfiles.join_index([shardfiles.summary(pieces) for pieces in files])


def names(count):
    return [f"rank-{number:05d}.safetensors" for number in range(count)]


def cut(whole, chosen, count):
    """A tensor in boxes, each in a file chosen at random: cut in two, the halves again, and so on."""
    boxes = [([0] * whole.dim(), list(whole.shape))]
    while len(boxes) < count and whole.dim():
        begin, size = boxes.pop(chosen.randrange(len(boxes)))
        dim = chosen.randrange(whole.dim())
        if size[dim] < 2:
            boxes.append((begin, size))
            break
        at = chosen.randrange(1, size[dim])
        first, second = list(size), list(size)
        first[dim], second[dim] = at, size[dim] - at
        later = list(begin)
        later[dim] += at
        boxes += [(begin, first), (later, second)]
    for begin, size in boxes:
        values = whole[tuple(slice(b, b + n) for b, n in zip(begin, size))]
        yield Piece(values, tuple(begin), tuple(whole.shape))


@pytest.mark.parametrize("seed", range(8))
def test_any_box_of_any_cut_is_read_with_and_without_an_index(tmp_path, seed):
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    files = [{} for _ in range(5)]
    tensors = {
        f"t{n}": torch.randn([chosen.randint(1, 7) for _ in range(n % 4)], generator=generator)
        for n in range(12)
    }
    for name, whole in tensors.items():
        places = chosen.sample(range(5), 5)
        for place, piece in zip(places, cut(whole, chosen, chosen.randint(1, 5))):
            files[place][name] = piece
    index = written(tmp_path, files)
    for entries in (index, None):
        with closing(Index(tmp_path, names(5), entries)) as found:
            assert found.wholes == {name: tuple(t.shape) for name, t in tensors.items()}
            for name, whole in tensors.items():
                assert torch.equal(found.read(name), whole)
                begin = [chosen.randrange(n) for n in whole.shape]
                size = [chosen.randint(1, n - b) for b, n in zip(begin, whole.shape)]
                wanted = whole[tuple(slice(b, b + n) for b, n in zip(begin, size))]
                assert torch.equal(found.read(name, begin, size), wanted)
                for target in targets_like(wanted):
                    version = target._version
                    found.fill(name, begin, size, target)
                    assert torch.equal(target, wanted.to(target.dtype))
                    assert target._version > version  # what was made of the old values is not used again


def targets_like(value):
    """Empty tensors of a value's shape: laid out alike, in columns, with gaps, of another dtype."""
    yield torch.empty_like(value)
    yield torch.empty_like(value, dtype=torch.float64)
    if value.dim():
        yield torch.empty(value.shape[::-1]).permute(*range(value.dim() - 1, -1, -1))
        yield torch.empty(*value.shape[:-1], 2 * value.shape[-1])[..., ::2]


def test_a_rank_of_many_opens_the_file_that_holds_its_rows_and_no_other(tmp_path):
    """Every rank used to open all of them: a million times over a thousand ranks."""
    ranks, whole = 40, torch.arange(80.0).reshape(40, 2)
    files = [
        {
            "weight": Piece(whole[rank : rank + 1], (rank, 0), (40, 2)),
            "other": Piece(whole[rank : rank + 1], (rank, 0), (40, 2)),
            f".rank.{rank}.own": Piece(torch.tensor([rank]), (0,), (1,)),
        }
        for rank in range(ranks)
    ]
    index = written(tmp_path, files)
    assert [(one[0], one[2], len(one[3])) for one in index] == [("F32", ("weight", "other"), ranks)]
    OPENED.clear()
    with closing(Index(tmp_path, names(ranks), index)) as found:
        assert torch.equal(found.read("weight", (7, 0), (1, 2)), whole[7:8])
        assert torch.equal(found.read("other", (7, 0), (1, 2)), whole[7:8])
        assert found.private(7, ".rank.7.own").tolist() == [7]
        assert {path for path in OPENED if "rank-" in path} == {str(tmp_path / names(8)[7])}
        assert torch.equal(found.read("weight"), whole)


def test_an_index_of_other_files_is_refused(tmp_path):
    piece = Piece(torch.ones(2, 2), (0, 0), (2, 2))
    ((dtype, whole, same, boxes),) = written(tmp_path, [{"a": piece}])
    for entry in (
        ("F64", whole, same, boxes),
        (dtype, (2, 3), same, [(0, (0, 0), (2, 3))]),
        (dtype, whole, ("b",), boxes),
    ):
        found = Index(tmp_path, names(1), [entry])
        with closing(found), pytest.raises(CheckpointError, match="the files of the checkpoint disagree"):
            found.read(entry[2][0])
    with pytest.raises(CheckpointError, match="disagree about 'a'"):
        Index(tmp_path, names(1), [(dtype, whole, same, boxes), ("F64", whole, same, boxes)])
    found = Index(tmp_path, names(1), [(dtype, (4, 2), same, boxes)])
    with closing(found), pytest.raises(CheckpointError, match="4 of the 8 elements of 'a'"):
        found.read("a")
