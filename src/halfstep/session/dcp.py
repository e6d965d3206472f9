"""torch.distributed.checkpoint (DCP) as the storage of `Session.save` and `Session.load`.

What `checkpoint` writes into files of its own goes through torch's writers and readers here, to any store
that they know. The manifest and what a rank says of itself travel as JSON in tensors of bytes, so that no
value is unpickled; DCP's own `.metadata`, written last, is a pickle. A name is used once, since DCP replaces
files in place.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import fsspec
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from halfstep import checkpoint, shardfiles
from halfstep.distributed import gather, gather_on_first, rank
from halfstep.distributed.reduce import Group
from halfstep.errors import CheckpointError, show
from halfstep.shardfiles import Piece

Box = tuple[Sequence[int], Sequence[int]]  #: Where a part of a tensor begins, and its shape.
Part = tuple[str, tuple[int, ...]]  #: A tensor's name and where a piece of it begins.
Choice = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, Box]]
"""Given the shapes of all tensors by name, the boxes that this rank reads."""

WORD = "dcp"  #: `storage=` where torch chooses the writer and the reader by the path or URL.
_MANIFEST = ".manifest"
_DONE, _MARK = ".metadata", "halfstep.json"


class _Writing(DefaultSavePlanner):
    """Hands this rank's pieces to a StorageWriter."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(name, piece) for name, piece in self._pieces.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        piece = self._pieces[write_item.index.fqn]
        return piece.value if piece.widen is None else piece.on_host()


def _item(name: str, piece: Piece) -> WriteItem:
    offsets, whole = torch.Size(piece.offsets), torch.Size(piece.whole)
    chunk = ChunkStorageMetadata(offsets, piece.value.shape)
    data = TensorWriteData(chunk, TensorProperties(piece.dtype), whole)
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


class _Reading(LoadPlanner):
    """Reads the boxes that were chosen from a StorageReader into new tensors."""

    def __init__(self, choose: Choice) -> None:
        self._choose = choose
        self.wholes: dict[str, tuple[int, ...]] = {}
        self.boxes: Mapping[str, Box] = {}
        self.values: dict[str, Tensor] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        stored: Any = metadata.state_dict_metadata if metadata is not None else {}
        self._stored = {n: entry for n, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}

    def create_local_plan(self) -> LoadPlan:
        self.wholes = {name: tuple(entry.size) for name, entry in self._stored.items()}
        self.boxes = self._choose(self.wholes)
        items: list[ReadItem] = []
        for name, (offsets, shape) in self.boxes.items():
            stored = self._stored[name]
            self.values[name] = torch.empty(shape, dtype=stored.properties.dtype, device="cpu")
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
            items += create_read_items_for_chunk_list(name, stored, [chunk])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError("a checkpoint of halfstep holds tensors alone")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        ends = [o + n for o, n in zip(read_item.dest_offsets, read_item.lengths)]
        return self.values[read_item.dest_index.fqn][tuple(map(slice, read_item.dest_offsets, ends))]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


@dataclass(frozen=True)
class ReadContent:
    """The content of a checkpoint that a rank read, with the interface of `shardfiles.Index`."""

    wholes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Tensor]
    manifest: dict[str, Any]

    def read(self, name: str, *box: Sequence[int]) -> Tensor:
        """Return the box of a tensor that was chosen."""
        return self.values[name]

    def fill(self, name: str, offsets: Sequence[int], shape: Sequence[int], target: Tensor) -> None:
        """Write the box of a tensor into a tensor."""
        target.copy_(self.values[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor that was read."""
        return self.values[name].dtype

    def check(self, name: str, *box: Sequence[int]) -> None:
        """Raise KeyError where the tensor was not read."""
        self.values[name]

    def about(self, number: int) -> dict[str, Any]:
        """Return what a rank wrote about itself."""
        return _parse(self.values[_about(number)])

    def private(self, number: int, name: str) -> Tensor:
        """Return a tensor that belongs to one rank."""
        return self.values[name]


def _about(number: int) -> str:
    return f"{shardfiles.PRIVATE}{number}.about"


def _pack(value: Any) -> Piece:
    return Piece.of(torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8))


def _parse(value: Tensor) -> Any:
    return json.loads(bytes(value.tolist()))


# ---- save and load ----------------------------------------------------------------------------------------


def write(
    path: str, contents: checkpoint.Contents, keep_last: int | None, group: Group | None, storage: Any
) -> None:
    """Write this rank's pieces through DCP; all ranks of the group call.

    Raises CheckpointError on every rank where one of them could not, or the name is taken.
    """
    manifest, first = contents.manifest, rank(group) == 0
    begun = gather((_begin(path, storage, manifest) if first else None, manifest["model"]), group)
    checkpoint.check_same_model(path, [model for _, model in begun])
    if begun[0][0]:
        raise CheckpointError(begun[0][0])
    pieces = {**contents.pieces, _about(rank(group)): _pack(contents.about)}
    mine = {(name, piece.offsets): shardfiles.position_sum(piece) for name, piece in pieces.items()}
    sums = gather_on_first(mine, group)
    if first:
        whole = {**manifest, "sums": _sums(sums)}
        pieces[_MANIFEST] = _pack({**whole, "sha256": checkpoint.checksum_of(whole)})
    writer = None if storage == WORD else storage
    with _errors_of_dcp(f"cannot write {path}", "earlier checkpoints stand"):
        state_dict_saver.save(
            {}, checkpoint_id=path, storage_writer=writer, planner=_Writing(pieces), process_group=group
        )
    if keep_last is not None and first:
        _prune(path, keep_last)


def read(path: str, choose: Choice, group: Group | None, storage: Any) -> ReadContent:
    """Read the boxes that `choose` names, this rank's own part and the manifest; all ranks of the group call.

    Raises CheckpointError on every rank where one finds something missing or altered.
    """
    rank_prefix = f"{shardfiles.PRIVATE}{rank(group)}."

    def choose_boxes(wholes: Mapping[str, tuple[int, ...]]) -> dict[str, Box]:
        if _MANIFEST not in wholes:
            raise CheckpointError("halfstep did not write it")
        shared = {n: w for n, w in wholes.items() if not n.startswith((shardfiles.PRIVATE, _MANIFEST))}
        more = {n: ([0] * len(w), w) for n, w in wholes.items() if n.startswith((rank_prefix, _MANIFEST))}
        return {**choose(shared), **more}

    if problem := gather(_missing(path) if storage == WORD and rank(group) == 0 else None, group)[0]:
        raise CheckpointError(problem, damaged=True)
    planner = _Reading(choose_boxes)
    reader = None if storage == WORD else storage
    with _errors_of_dcp(f"cannot read a checkpoint of halfstep at {path}", "nothing was changed"):
        state_dict_loader.load(
            {}, checkpoint_id=path, storage_reader=reader, planner=planner, process_group=group
        )
    manifest = _read_checked_manifest(path, planner, group)
    wholes = {n: w for n, w in planner.wholes.items() if n != _MANIFEST}
    return ReadContent(wholes, planner.values, manifest)


def _read_checked_manifest(path: str, planner: _Reading, group: Group | None) -> dict[str, Any]:
    """Return the manifest, once all ranks have verified its checksum and those of what they read.

    Where ranks read parts of a tensor, the first adds up their sums. Raises CheckpointError on all of them.
    """
    manifest, problem, parts = dict[str, Any](), None, dict[Part, int]()
    try:
        manifest = _parse(planner.values[_MANIFEST])
        if manifest.pop("sha256") != checkpoint.checksum_of(manifest):
            raise ValueError("the checksum of the manifest is not the one it states")
        for name, (offsets, shape) in planner.boxes.items():
            number = shardfiles.position_sum(Piece(planner.values[name], (*offsets,), planner.wholes[name]))
            if tuple(shape) != planner.wholes[name]:
                parts[name, (*offsets,)] = number
            elif name != _MANIFEST and number != manifest["sums"][name]:
                raise ValueError(f"the checksum of {name!r} is not the manifest's")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = str(error)
    everyone = gather_on_first((problem, parts), group)
    problem = next((text for text, _ in everyone if text), None)
    if everyone and not problem:
        sums = _sums([rank_parts for _, rank_parts in everyone])
        other = [name for name, number in sums.items() if number != manifest["sums"][name]]
        problem = f"the checksum of {other[0]!r} is not the manifest's" if other else None
    problem = gather(problem, group)[0]
    if problem:
        raise CheckpointError(f"the checkpoint {path} is damaged: {problem}", damaged=True)
    return manifest


def _sums(everyone: Sequence[Mapping[Part, int]]) -> dict[str, int]:
    """Return the checksum of each whole tensor from ranks' parts; a part that several hold counts once."""
    total = Counter[str]()
    for (name, _), number in {part: n for rank_parts in everyone for part, n in rank_parts.items()}.items():
        total[name] += number
    return {name: number % (1 << 64) for name, number in total.items()}


@contextmanager
def _errors_of_dcp(what: str, so: str) -> Generator[None]:
    """Raise the error of any rank as a CheckpointError; silence warnings of what a process or store lacks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled|fsync not supported")
            yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{what}: {_first_line(cause)}; {so}") from error
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{what}: {_first_line(error)}; {so}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- the folder around it ---------------------------------------------------------------------------------


def check(storage: Any, kind: type[StorageReader | StorageWriter], keep_last: int | None = None) -> None:
    """Raise CheckpointError for a `storage=` that is neither the word nor of a kind, or deletes nothing."""
    if storage != WORD and not isinstance(storage, kind):
        raise CheckpointError(
            f"storage={show(storage)}: expected '{WORD}' or a {kind.__name__} of torch.distributed.checkpoint"
        )
    if storage != WORD and keep_last is not None:
        raise CheckpointError(
            f"keep_last={keep_last} with a StorageWriter, whose checkpoints only you can delete: leave one "
            f"of the two out, or give storage='{WORD}'"
        )


def _begin(path: str, storage: Any, manifest: Mapping[str, Any]) -> str | None:
    """Write our mark where the checkpoint goes; return why it cannot go there."""
    if storage != WORD:
        return None
    try:
        files, folder = _open_filesystem(path)
        if any(files.exists(f"{folder}/{name}") for name in (_DONE, checkpoint.MANIFEST)):
            return f"{path} holds a checkpoint already, and storage='dcp' replaces none: choose another name"
        if strange := _no_file(files, folder):
            return f"cannot write {path}: {strange}"
        files.makedirs(folder, exist_ok=True)
        files.pipe_file(f"{folder}/{_MARK}", json.dumps({"halfstep": manifest["halfstep"]}).encode())
    except (ImportError, ValueError, OSError) as error:
        return f"cannot write {path}: {_first_line(error)}; earlier checkpoints stand"
    return None


def _missing(path: str) -> str | None:
    """Say why there is nothing to read."""
    try:
        files, folder = _open_filesystem(path)
        is_done, plain = (files.exists(f"{folder}/{name}") for name in (_DONE, checkpoint.MANIFEST))
        if strange := _no_file(files, folder):
            return f"cannot read {path}: {strange}"
    except (ImportError, ValueError, OSError) as error:
        return f"cannot read {path}: {_first_line(error)}"
    hint = "; load without storage= reads what is there" if plain else ""
    return None if is_done else f"no checkpoint at {path}: it has no {_DONE}, which a save writes last{hint}"


def _no_file(files: Any, folder: str) -> str | None:
    """Name what a folder holds that reading or writing could wait for without end: a pipe or a device."""
    kinds = ("file", "directory")
    for entry in files.ls(folder, detail=True) if files.isdir(folder) else ():
        if entry["type"] not in kinds and files.info(entry["name"])["type"] not in kinds:  # through links
            return f"{entry['name']} is neither a file nor a folder"
    return None


def _open_filesystem(path: str) -> tuple[Any, str]:
    files, folder = cast(Any, fsspec).url_to_fs(path)
    files.invalidate_cache()
    return files, folder.rstrip("/")


def _prune(path: str, keep: int) -> None:
    """Delete older checkpoints beside `path` that have our mark, and what killed saves left of them."""
    files, folder = _open_filesystem(path)
    parent, _, name = folder.rpartition("/")
    others = {
        other.rstrip("/").rpartition("/")[2]: other.rstrip("/") for other in files.ls(parent, detail=False)
    }
    older = [
        others[old_name]
        for old_name in checkpoint.older(name, others)
        if files.exists(f"{others[old_name]}/{_MARK}")
    ]
    done = [old_folder for old_folder in older if files.exists(f"{old_folder}/{_DONE}")]
    for old_folder in older:
        if old_folder not in done[-keep:]:
            for file in (
                f"{old_folder}/{_DONE}",
                *files.glob(f"{old_folder}/*.distcp"),
                f"{old_folder}/{_MARK}",
            ):
                with suppress(OSError):
                    files.rm_file(file)
            with suppress(OSError):  # something else is in it
                files.rmdir(old_folder)
