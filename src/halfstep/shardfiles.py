"""Tensors of many ranks in safetensors files: each rank's pieces in one file, read back in any other cut.

The layout is that of torch.distributed.checkpoint's Hugging Face storage, so that torch reads these files
too: `__metadata__` says where in its whole tensor each piece begins. Nothing is pickled; a header that lies
about sizes or places is refused before a byte of data is believed.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import stat
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Piece:
    """A contiguous box of a tensor: its values, where it begins and the shape of the whole.

    What `widen` gives for an index (some rows, or all by an ellipsis) are its fp32 values there, made when
    they are read; `value` then only has its shape.
    """

    value: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    widen: Callable[[Any], Tensor] | None = None

    @classmethod
    def of(cls, value: Tensor) -> Piece:
        """Return a tensor as one piece."""
        shape = tuple(value.shape)
        return cls(value.detach(), (0,) * len(shape), shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.value.dtype if self.widen is None else torch.float32

    @property
    def bytes(self) -> int:
        """How many bytes the values take."""
        return self.value.numel() * self.dtype.itemsize

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the values, rows of a bounded size at a time, with the number of the first row."""
        shape, read = self.value.shape, self.value.detach().__getitem__ if self.widen is None else self.widen
        if not shape:
            yield 0, read(...)
            return
        rows = max(1, AT_ONCE * shape[0] // max(1, self.bytes))
        for start in range(0, shape[0], rows):
            yield start, read(slice(start, start + rows))

    def on_host(self) -> Tensor:
        """Return a copy of the values on the host."""
        if self.widen is None:
            return self.value.to("cpu", copy=True)
        out = torch.empty(self.value.shape, dtype=self.dtype, device="cpu")
        for start, part in self.parts():
            (out[start : start + len(part)] if part.dim() else out).copy_(part)
        return out


AT_ONCE = 1 << 22
"""Bytes that are brought to the host, hashed and written at once: few enough to stay in a cache."""


@dataclass(frozen=True)
class StoredPiece:
    """Where a piece lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int

    def fill(self, file: BinaryIO, low: Sequence[int], high: Sequence[int], target: Tensor) -> None:
        """Write the values from `low` to `high` of the whole tensor to `target`; only these rows are read.

        Memory that is laid out like the file is read into. CheckpointError where the file ends early.
        """
        begin = [a - o for a, o in zip(low, self.offsets)] or [0]
        end = [b - o for b, o in zip(high, self.offsets)] or [1]
        columns = self.shape[1:]
        row = math.prod(columns) * self.dtype.itemsize
        size = (end[0] - begin[0]) * row
        if not size:
            return
        whole_rows = (*begin[1:], *end[1:]) == (0,) * len(columns) + columns
        direct = whole_rows and target.is_cpu and target.dtype == self.dtype and target.is_contiguous()
        room = target.detach() if direct else torch.empty(size, dtype=torch.uint8, device="cpu")
        data = room.as_strided((room.numel(),), (1,)).view(torch.uint8)
        try:
            file.seek(self.start + begin[0] * row)
            got = cast(Any, file).readinto(memoryview(cast(Any, data.numpy())))
        except OSError as error:
            raise CheckpointError(f"cannot read {file.name}: {error}") from error
        if got != size:
            raise CheckpointError(f"{file.name} is cut short: a tensor of it is missing bytes")
        if direct:
            increment_version(target)  # numpy wrote, which autograd and caches of casts do not see
        else:
            rows = data.view(self.dtype).reshape(-1, *columns)
            values = rows[(slice(None), *map(slice, begin[1:], end[1:]))]
            target.copy_(values if self.shape else values[0])


def write(path: Path, pieces: Mapping[str, Piece], about: Mapping[str, Any]) -> tuple[str, int]:
    """Write pieces by name and force them to the disk; returns SHA-256 (hex) and the number of bytes.

    `about` (what JSON can hold) goes into the header. Raises OSError as the disk does.
    """
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps({n: {"saved_offsets": p.offsets} for n, p in pieces.items()}),
            "halfstep": json.dumps({**about, "whole": {n: p.whole for n, p in pieces.items()}}),
        }
    }
    at = 0
    for name, piece in pieces.items():
        size = piece.bytes
        kind = _NAMES.get(piece.dtype)
        if name == "__metadata__":
            raise CheckpointError(
                "a tensor named '__metadata__' would hide what a safetensors file says of itself"
            )
        if kind is None:
            raise CheckpointError(f"{name!r} is {piece.dtype}, which safetensors files cannot hold")
        shape = list(piece.value.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, count = hashlib.sha256(), 0
    values = (_bytes(part) for piece in pieces.values() for _, part in piece.parts())
    with open(path, "wb") as file:
        for chunk in itertools.chain((struct.pack("<Q", len(text)), text), values):
            digest.update(chunk)
            count += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), count


def _bytes(value: Tensor) -> Any:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy())) if flat.numel() else b""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def position_sum(piece: Piece) -> int:
    """A checksum of a piece, modulo 2^64: those of all pieces add up to the same, however a tensor is cut.

    It is the sum of all bit patterns, each times an odd number that says where in the whole the element is.
    """
    total = 0
    for start, part in piece.parts():
        bits = part.contiguous().view(_INTEGERS[part.dtype.itemsize]).long()
        place, stride = torch.zeros((), dtype=torch.int64, device=part.device), 1
        for dim in reversed(range(part.dim())):
            begin = piece.offsets[dim] + (start if dim == 0 else 0)
            along = torch.arange(begin, begin + part.shape[dim], device=part.device) * stride
            place = place + along.view(-1, *[1] * (part.dim() - dim - 1))
            stride *= piece.whole[dim]
        total += int((bits * (2 * place + 1)).sum())
    return total % (1 << 64)


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read; OSError for anything else, such as a pipe, on which it does not wait."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "expected a regular file", str(path))
    return open(handle, "rb")


def checksum(path: Path, size: int | None = None) -> str:
    """SHA-256 of a file, in hex; CheckpointError where it cannot be read or has another `size` in bytes."""
    try:
        with open_file(path) as file:
            file_size = os.fstat(file.fileno()).st_size
            if size is not None and file_size != size:
                message = f"{path} is corrupt: it has {file_size:,} bytes, and the manifest says {size:,}"
                raise CheckpointError(message, damaged=True)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}", damaged=True) from error


def read_header(path: Path) -> tuple[dict[str, StoredPiece], dict[str, Any]]:
    """Return every piece of a file by name, and its metadata; CheckpointError for a false header."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        notes = header.pop("__metadata__")
        begins = json.loads(notes["DCP_SHARDING_INFO"])
        about = json.loads(notes["halfstep"])
        room = size - 8 - length
        stored = {n: _read_entry(e, begins[n]["saved_offsets"], 8 + length, room) for n, e in header.items()}
        _check_boxes(stored, about["whole"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        what = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} is damaged or not a checkpoint's file: {what[0]}") from error
    return stored, about


def _read_entry(entry: Any, offsets: Any, base: int, room: int) -> StoredPiece:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    dtype = DTYPES[entry["dtype"]]
    whole_numbers = [begin, end, *shape, *offsets]
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in whole_numbers):
        raise ValueError("sizes and places must be whole numbers")
    if end - begin != math.prod(shape) * dtype.itemsize or end > room or len(offsets) != len(shape):
        raise ValueError("a tensor whose size does not fit its place")
    return StoredPiece(dtype, shape, tuple(offsets), base + begin)


def _check_boxes(stored: Mapping[str, StoredPiece], wholes: Mapping[str, Sequence[int]]) -> None:
    for name, piece in stored.items():
        ends = [a + n for a, n in zip(piece.offsets, piece.shape)]
        if len(wholes[name]) != len(ends) or any(e > w for e, w in zip(ends, wholes[name])):
            raise ValueError(f"a piece of {name!r} outside of its tensor")


#: What begins so belongs to one file, which is asked for it: the index leaves it out.
PRIVATE = ".rank."

#: A part of an index: dtype, shape of the whole, names of the tensors that are alike in these and in where
#: their pieces lie, and the pieces: number of the file, offsets, shape.
Alike = tuple[str, Sequence[int], Sequence[str], Sequence[tuple[int, Sequence[int], Sequence[int]]]]


def summary(pieces: Mapping[str, Piece]) -> list[Any]:
    """Return what `join_index` needs of a file's pieces, as JSON can hold it."""
    return _summary((n, p.dtype, p.whole, p.offsets, p.value.shape) for n, p in pieces.items())


def _summary(pieces: Iterable[tuple[str, torch.dtype, Any, Any, Any]]) -> list[Any]:
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, dtype, *box in pieces:
        if not name.startswith(PRIVATE):
            alike.setdefault((_NAMES[dtype], *map(tuple, box)), []).append(name)
    return [[*box, names] for box, names in alike.items()]


def join_index(summaries: Iterable[list[Any]]) -> list[Alike]:
    """The index of all files (in the order of their names) as JSON can hold it: tensors cut alike once."""
    index: dict[tuple[Any, ...], list[tuple[int, list[int], list[int]]]] = {}
    for number, entries in enumerate(summaries):
        for dtype, whole, offsets, shape, names in entries:
            index.setdefault((dtype, (*whole,), (*names,)), []).append((number, offsets, shape))
    return [(*alike, boxes) for alike, boxes in index.items()]


class Index:
    """All pieces of a checkpoint by name, whoever wrote them; files are opened when they are read.

    `entries` is what `join_index` gave. Earlier versions kept none: it is then made of every file's header.
    """

    def __init__(self, folder: Path, files: Iterable[str], entries: Sequence[Alike] | None) -> None:
        self._paths = [folder / name for name in sorted(files)]
        self._files: dict[int, tuple[BinaryIO, dict[str, StoredPiece], dict[str, Any]]] = {}
        self._open_files = ExitStack()
        self._found: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        self._entries = join_index(map(_summary_of, self._paths)) if entries is None else entries
        self._of: dict[str, list[int]] = {}
        self.wholes: dict[str, tuple[int, ...]] = {}
        for number, (dtype, whole, names, _) in enumerate(self._entries):
            for name in names:
                same = self._of.setdefault(name, [number])
                first_entry = self._entries[same[0]]
                if (first_entry[0], *first_entry[1]) != (dtype, *whole):
                    raise CheckpointError(f"the files of the checkpoint disagree about {name!r}")
                self.wholes[name] = tuple(whole)
                if number not in same:
                    same.append(number)

    def close(self) -> None:
        """Close what was opened."""
        self._open_files.close()
        self._files.clear()

    def _file(self, number: int) -> tuple[BinaryIO, dict[str, StoredPiece], dict[str, Any]]:
        if number not in self._files:
            if len(self._files) == _OPEN:
                self.close()
            header = read_header(self._paths[number])
            self._files[number] = (self._open_files.enter_context(open_file(self._paths[number])), *header)
        return self._files[number]

    def about(self, number: int) -> dict[str, Any]:
        """Return what the writer of a file wrote about it."""
        return self._file(number)[2]

    def private(self, number: int, name: str) -> Tensor:
        """Return a tensor that belongs to one file."""
        file, stored, _ = self._file(number)
        piece = stored[name]
        out = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
        piece.fill(file, piece.offsets, [o + n for o, n in zip(piece.offsets, piece.shape)], out)
        return out

    def read(
        self, name: str, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return a box of a tensor (all of it by default), put together from the pieces that touch it.

        CheckpointError where the pieces do not cover it.
        """
        box = self._box(name, offsets, shape)
        out = torch.empty(box[1], dtype=self.dtype(name), device="cpu")
        self.fill(name, *box, out)
        return out

    def fill(self, name: str, offsets: Sequence[int], shape: Sequence[int], target: Tensor) -> None:
        """Write a box into a tensor of its shape, rows of a bounded size at a time; raises as `read`."""
        if not shape:
            self._fill(name, (), (), target)
            return
        row = max(1, math.prod(shape[1:]) * self.dtype(name).itemsize)
        rows = max(1, AT_ONCE // row)
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            begin, size = (offsets[0] + start, *offsets[1:]), (count, *shape[1:])
            self._fill(name, begin, size, target[start : start + count])

    def _fill(self, name: str, begin: tuple[int, ...], size: tuple[int, ...], target: Tensor) -> None:
        for number, _, low, high in self._pieces(name, begin, size):
            file, stored, _ = self._file(number)
            target_slices = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin))
            stored[name].fill(file, low, high, target[target_slices] if target_slices else target)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        return DTYPES[self._entries[self._of[name][0]][0]]

    def check(
        self, name: str, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> None:
        """Raise what `read` would raise for this box, by what the files say of themselves."""
        self._pieces(name, *self._box(name, offsets, shape))

    def _box(
        self, name: str, offsets: Sequence[int] | None, shape: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        whole = self.wholes[name]
        return (0,) * len(whole) if offsets is None else (*offsets,), whole if shape is None else (*shape,)

    def _pieces(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> list[tuple[Any, ...]]:
        """Return what of a box lies in which file; CheckpointError where that is not all of it."""
        touching = (part for n in self._of[name] for part in self._touching(n, begin, size))
        # What several ranks wrote alike is read once: shards of a part of the mesh, say.
        pieces = [*{part[1]: part for part in touching}.values()]
        dtype, covered = self.dtype(name), 0
        for number, box, low, high in pieces:
            piece = self._file(number)[1].get(name)
            if piece is None or (piece.dtype, piece.offsets, piece.shape) != (dtype, *box):
                raise CheckpointError(f"the files of the checkpoint disagree about {name!r}")
            covered += math.prod(b - a for a, b in zip(low, high))
        if covered != math.prod(size):
            raise CheckpointError(
                f"the checkpoint holds {covered} of the {math.prod(size)} elements of {name!r}"
            )
        return pieces

    def _touching(self, entry: int, begin: Any, size: Any) -> list[tuple[Any, ...]]:
        """Files with something of a box, their piece, from where to where; once for tensors cut alike."""
        if (cached_parts := self._found.get((entry, begin, size))) is not None:
            return cached_parts
        parts = self._found[entry, begin, size] = []
        for number, offsets, shape in self._entries[entry][3]:
            low = [max(a, b) for a, b in zip(begin, offsets)]
            high = [min(a + n, b + m) for a, n, b, m in zip(begin, size, offsets, shape)]
            if all(a < b for a, b in zip(low, high)):
                parts.append((number, (tuple(offsets), tuple(shape)), low, high))
        return parts


_OPEN = 64  #: Files that an index keeps open: a process may open few.


def _summary_of(path: Path) -> list[Any]:
    stored, about = read_header(path)
    return _summary((n, p.dtype, about["whole"][n], p.offsets, p.shape) for n, p in stored.items())


#: Mappings that are more than a dict to those who use them: MultiStepLR asks a Counter for what is not in it.
_MAPPINGS: dict[str, type[Any]] = {"counter": Counter, "ordered": OrderedDict}


def check_layout(name: str, value: Tensor) -> None:
    """Raise CheckpointError for a tensor that is not an array of numbers in memory, such as a sparse one."""
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "on the meta device" if value.is_meta else "quantized" if value.is_quantized else value.layout
        raise CheckpointError(
            f"{_name_for(name)} is a tensor that a checkpoint cannot hold ({kind}): expected a dense one. "
            "Sparse gradients (nn.Embedding(sparse=True)) leave sparse momentum: use sparse=False, or "
            "momentum=0"
        )


def pack(value: Any, name: str, put: Callable[[str, Tensor], object]) -> Any:
    """Return a tree as JSON can hold it, `put` having been called for its tensors by name."""
    if isinstance(value, Tensor):
        check_layout(name, value)
        put(name, value)
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        pairs = [[_pack_key(k, name), pack(v, f"{name}.{k}", put)] for k, v in items]
        return {next((word for word, kind in _MAPPINGS.items() if type(value) is kind), "dict"): pairs}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        entries = cast("Sequence[Any]", value)
        return {kind: [pack(item, f"{name}.{i}", put) for i, item in enumerate(entries)]}
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        return value.item()
    raise CheckpointError(
        f"{_name_for(name)} is of type {type(value).__name__}, which a checkpoint cannot hold: give tensors, "
        "numbers, strings and lists, tuples and dicts of these (torch.from_numpy makes a tensor of an array)"
    )


def _pack_key(key: Any, name: str) -> Any:
    """Return a key of the mapping `name` as JSON can hold it."""
    tensors = list[Tensor]()
    value = pack(key, f"a key of {_name_for(name)}", lambda _, tensor: tensors.append(tensor))
    if tensors:
        raise CheckpointError(
            f"a key of {_name_for(name)} is a tensor: give numbers, strings or tuples of these"
        )
    return value


def _name_for(name: str) -> str:
    """Return a value's name for messages: `extra.note` of `.rest.extra.note`."""
    return re.sub(r"^\.(rest\.|rank\.\d+\.)?", "", name)


def unpack(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Return what `pack` made JSON of, with `read` for the tensors that it named."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = cast("dict[str, Any]", value).items()
    if kind == "tensor":
        return read(content)
    if kind == "dict" or kind in _MAPPINGS:
        pairs = {unpack(k, read): unpack(v, read) for k, v in content}
        return _MAPPINGS[kind](pairs) if kind in _MAPPINGS else pairs
    items = [unpack(item, read) for item in content]
    return items if kind == "list" else tuple(items)
