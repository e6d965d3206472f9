"""Checkpoints: written whole or not at all, checked when read, keyed by fully qualified names.

`save` and `load` are of one file, which `torch.load(path, weights_only=True)` reads too. `write_folder` and
`read_manifest` are of a folder that any number of ranks writes and any other number reads: a safetensors file
a rank (`shardfiles`) and `manifest.json` with the SHA-256 of each. Nothing is pickled there. What stands in
it is the business of `session/saving.py` and `loading.py`.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import pickle
import re
import secrets
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from halfstep import shardfiles
from halfstep.distributed import gather, gather_on_first, rank, world_size
from halfstep.distributed.reduce import Group
from halfstep.errors import CheckpointError, show, warn
from halfstep.shardfiles import Piece
from halfstep.trees import tensors_in

T = TypeVar("T")

FOLDER_FORMAT = 3
"""The version of the layout of a folder that is written and read."""
MANIFEST = "manifest.json"


# ---- one file -------------------------------------------------------------------------------------------


def save(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Write `state` (tensors, numbers, strings, lists, tuples, dicts of these) to `path` atomically.

    The bytes go to a temporary file beside it, are forced to the disk, and take the name in one rename: a
    crash at any moment leaves the old file or the new one. `load` reads what
    `torch.load(path, weights_only=True)` reads: nothing of numpy. CheckpointError when the disk refuses.
    """
    path = Path(path)
    temporary = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        needed = sum(t.numel() * t.element_size() for t in tensors_in(state))
        raise CheckpointError(f"cannot write checkpoint {path}: {_reason(error, path, needed)}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def _reason(error: BaseException, path: Path, needed: int) -> str:
    """Describe a failed write; where the disk is full, with the bytes needed and free."""
    causes = [error, error.__context__, error.__cause__]
    full = any(isinstance(cause, OSError) and cause.errno in _FULL for cause in causes)
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return str(error)
    if not (full or free < needed):
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"no room for it: about {needed:,} bytes are needed, {free:,} are free on this disk (or a quota or "
        "file size limit is lower); what was saved before stands. Free some, or choose another folder"
    )


def _sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint after verifying every record's checksum.

    No code in the file is run (`weights_only`). Raises CheckpointError, in one line, for a file that is
    missing, truncated, altered or not a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}", damaged=True)
    try:
        with zipfile.ZipFile(path) as archive:
            if altered := archive.testzip():
                raise ValueError(f"the checksum of {altered} does not match")
        state = torch.load(path, map_location=map_location, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}, expected a mapping")
    except Exception as error:  # zipfile, zlib, pickle and torch each raise their own kinds on damaged bytes
        raise CheckpointError(f"checkpoint {path} {_wrong_with(error)}", damaged=True) from error
    return state


def _wrong_with(error: Exception) -> str:
    """What a file that cannot be read is, in words of ours: torch's come with advice on running its code."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"{named[1]}, " if named else ""
        return (
            f"is not a checkpoint of halfstep: it holds {what}objects that only running its code would make"
        )
    what = _ESCAPE.sub("", str(error)).strip().splitlines() or [type(error).__name__]
    return f"is corrupt or not a checkpoint: {what[0]}"


_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


# ---- what must fit --------------------------------------------------------------------------------------


def check_shapes(saved: Mapping[str, list[int]], here: Mapping[str, list[int]]) -> None:
    """Raise CheckpointError that names what is missing, unexpected or misshapen among saved tensors."""
    missing, extra = sorted(here.keys() - saved.keys()), sorted(saved.keys() - here.keys())
    if missing or extra:
        raise CheckpointError(
            f"the checkpoint is of another model: missing {_some(missing)}, unexpected {_some(extra)}"
        )
    for name, shape in saved.items():
        if shape != here[name]:
            raise CheckpointError(
                f"the checkpoint is of another model: size mismatch for {name}, {shape} and here {here[name]}"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"


def algorithm_of(optimizer: Optimizer) -> str:
    """What the optimizer computes: the nearest class that torch or halfstep ships, else its own class."""
    for kind in getattr(optimizer, "compacts", type(optimizer)).__mro__:
        if kind.__module__.startswith(("torch.optim.", "halfstep.optim.")) and kind is not Optimizer:
            return kind.__name__
    return type(optimizer).__name__


def check_schedulers(saved: int, here: int) -> None:
    """Raise CheckpointError where a checkpoint holds more or fewer schedulers than there are to load."""
    if saved != here:
        raise CheckpointError(f"the checkpoint holds {saved} schedulers, {here} were given")


def warn_if_threads_differ(saved: int) -> None:
    """Warn once when a run resumes with another thread count, since sums may then round differently."""
    now = torch.get_num_threads()
    if now != saved:
        warn(
            f"the checkpoint was written with {saved} threads and resumes with {now}: "
            "results may differ in the last bits"
        )


# ---- a folder of many ranks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """What one rank writes: pieces of tensors and facts into its file; the manifest is alike on all ranks."""

    pieces: Mapping[str, Piece]
    about: Mapping[str, Any]
    manifest: dict[str, Any]


def write_folder(
    path: Path, contents: Contents, keep_last: int | None = None, group: Group | None = None
) -> None:
    """Write this rank's pieces and, on rank 0 of the group, the manifest, the name and the cleaning.

    All ranks of the group call. The folder is made beside its place and takes the name in one rename. Raises
    CheckpointError on every rank where one of them could not.
    """
    pieces, manifest = contents.pieces, contents.manifest
    begun: list[tuple[Path, str]] = gather((_beside(path), manifest["model"]), group)
    check_same_model(path, [model for _, model in begun])
    temporary, first = begun[0][0], rank(group) == 0
    file = temporary / f"rank-{rank(group):05d}-of-{world_size(group):05d}.safetensors"

    def part() -> Any:
        _check_place(path)
        temporary.mkdir(parents=True, exist_ok=True)
        if first:
            (temporary / MANIFEST).write_text(json.dumps({"halfstep": manifest["halfstep"]}))
        digest, count = shardfiles.write(file, pieces, contents.about)
        index = zlib.compress(json.dumps(shardfiles.summary(pieces)).encode())  # rank 0 gets many of them
        return file.name, {"sha256": digest, "bytes": count}, index

    needed = sum(piece.bytes for piece in pieces.values())
    everyone = gather_on_first(_try_write(part, path, needed), group)
    failure = next((message for _, message in everyone if message), None)
    if first and not failure:
        names, sums, summaries = zip(*(written for written, _ in everyone))
        index = shardfiles.join_index(json.loads(zlib.decompress(summary)) for summary in summaries)
        whole = {**manifest, "files": dict(zip(names, sums)), "index": index}
        _, failure = _try_write(lambda: _commit(temporary, path, whole), path, 0)
    if first and failure:
        shutil.rmtree(temporary, ignore_errors=True)
    failure = gather(failure, group)[0]
    if failure:
        stands = "what was saved before stands"
        raise CheckpointError(failure if stands in failure else f"{failure}; {stands}")
    if first:
        _prune(path, keep_last)


def check_same_model(path: str | Path, models: Sequence[str]) -> None:
    """CheckpointError where the ranks' checksums of what their models hold differ."""
    if len(set(models)) > 1:
        raise CheckpointError(
            f"cannot write {path}: ranks hold different parameters (stages of a pipeline?), and each would "
            "write a part of its own: save state_dict() of model, optimizer and session for each stage"
        )


def _try_write(write: Callable[[], Any], path: Path, needed: int) -> tuple[Any, str | None]:
    """Return what `write` gives, or why it could not."""
    try:
        return write(), None
    except OSError as error:
        return None, f"cannot write {path}: {_reason(error, path, needed)}"
    except CheckpointError as error:
        return None, str(error)
    except (RuntimeError, ValueError, TypeError) as error:  # a tensor that torch cannot bring to the CPU
        return None, f"cannot write {path}: {_reason(error, path, 0)}"


def _commit(temporary: Path, path: Path, manifest: Mapping[str, Any]) -> None:
    with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
        file.write(json.dumps({**manifest, "sha256": checksum_of(manifest)}))  # dump() is ten times slower
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(temporary)
    old = _path_of_replaced(path)
    if path.exists():
        _remove(old, path)
        os.rename(path, old)
    os.rename(temporary, path)
    _sync_folder(path.parent)
    _remove(old, path)


def checksum_of(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of what a manifest says, itself apart; the same before and after it was a file."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path, group: Group | None = None) -> tuple[Path, dict[str, Any]]:
    """The folder in which the checkpoint `path` stands, and its manifest, every file's checksum being right.

    All ranks of the group call, each of which reads some of the files. Raises CheckpointError on all of them
    where one finds a file missing or altered.
    """
    if not path.exists() and (_path_of_replaced(path) / MANIFEST).is_file():
        path = _path_of_replaced(path)  # killed between two renames
    return path, on_every_rank(lambda: manifest_of(path, rank(group), world_size(group)), group)


def on_every_rank(make: Callable[[], T], group: Group | None, said: str = "{text}") -> T:
    """What `make` gives on this rank of the group, whose ranks all call.

    Where it raises, other ranks raise a CheckpointError: `said`, with the `rank` it was and the `text`.
    """
    results, raised = list[T](), None
    try:
        results.append(make())
    except Exception as error:
        raised = error
    failure = None if raised is None else (str(raised), getattr(raised, "damaged", False))
    failures = gather(failure, group)
    if raised is not None:
        raise raised
    for number, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(said.format(rank=number, text=failure[0]), damaged=failure[1])
    return results[0]


def manifest_of(folder: Path, number: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Return the manifest in a folder, once its checksum is right and that of every file whose turn it is.

    Of so many `ranks` each looks at the files whose turn is its `number`. Raises CheckpointError.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(_text_of(path))
        if manifest["format"] != FOLDER_FORMAT:
            raise CheckpointError(
                f"{folder} has layout {manifest['format']!r}; this version reads {FOLDER_FORMAT}"
            )
        if manifest.pop("sha256") != checksum_of(manifest):
            raise ValueError("its checksum is not the one it states")
        for place, (name, entry) in enumerate(sorted(manifest["files"].items())):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"it names a file outside of the folder, {name!r}")
            if place % ranks == number and (
                shardfiles.checksum(folder / name, entry.get("bytes")) != entry["sha256"]
            ):
                message = f"{folder / name} is corrupt: its checksum is not the manifest's"
                raise CheckpointError(message, damaged=True)
    except NotADirectoryError:
        raise CheckpointError(
            f"{folder} is one file; Session.load reads the folders that Session.save writes", damaged=True
        ) from None
    except FileNotFoundError:
        hint = "; storage='dcp' reads what was saved with it" if (folder / ".metadata").exists() else ""
        raise CheckpointError(
            f"no checkpoint at {folder}: it has no {MANIFEST}{hint}", damaged=True
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{path} is damaged or not a manifest: {what}", damaged=True) from error
    return manifest


_LARGEST_MANIFEST = 1 << 30


def _text_of(path: Path) -> str:
    """Return a manifest as it stands; ValueError, with little of it read, for what is none."""
    with shardfiles.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        begins = file.read(1) == b"{"
        file.seek(max(0, size - 16))
        if size > _LARGEST_MANIFEST or not begins or not file.read(16).rstrip().endswith(b"}"):
            raise ValueError(f"{size:,} bytes that are no JSON object")
        file.seek(0)
        return file.read().decode()


class Background:
    """Writes the folders of one session in a thread while training goes on, from copies made at the call.

    The thread talks to those of the other ranks over a gloo group of its own: on the group of training its
    messages and the gradients' would meet each other. An interpreter that ends waits for the thread; an error
    that nobody has asked for by then goes to standard error.
    """

    def __init__(self) -> None:
        self._saving: Future[None] | None = None
        self._group: Group | None = None
        self._made_for: tuple[Any, ...] = ()
        atexit.register(self._at_exit)

    def start(self, write: Callable[..., None], contents: Contents, group: Group | None) -> None:
        """Copy every value and `write(contents=, group=)`; raises what the writing before this one raised."""
        self.wait()
        if world_size(group) > 1 and self._made_for != (group, dist.group.WORLD):
            ranks = None if group is None else dist.get_process_group_ranks(group)
            is_subgroup = ranks is not None
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=is_subgroup)
            self._made_for = group, dist.group.WORLD
        copies = {n: replace(p, value=p.on_host(), widen=None) for n, p in contents.pieces.items()}
        save_group = self._group if world_size(group) > 1 else group
        pool = ThreadPoolExecutor(1, "halfstep saves")
        copied = replace(contents, pieces=copies)
        self._saving = pool.submit(write, contents=copied, group=save_group)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Return when nothing is being written; raises what the last writing raised, once, on every rank."""
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.result()
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise CheckpointError(
                "a save in the background was not finished: another rank is gone; what was saved before "
                "stands"
            ) from error

    def _at_exit(self) -> None:
        try:
            self.wait()
        except Exception as error:
            print(f"halfstep: {error}", file=sys.stderr)


# ---- what lies around it --------------------------------------------------------------------------------


def _beside(path: Path) -> Path:
    """Return where one save writes what becomes `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _path_of_replaced(path: Path) -> Path:
    """Return where a checkpoint lies while another takes its name."""
    return path.with_name(f".{path.name}.old")


def _is_ours(folder: Path) -> bool:
    """Whether a folder has the mark of a checkpoint inside: a manifest that names halfstep; no link has."""
    if folder.is_symlink():
        return False
    try:
        with shardfiles.open_file(folder / MANIFEST) as file:
            return b'"halfstep": "' in file.read(4096)
    except OSError:
        return False


def _check_place(path: Path) -> None:
    """CheckpointError where something that is no checkpoint would have to go."""
    for place in (path, _path_of_replaced(path)):
        empty = place.is_dir() and not place.is_symlink() and not any(place.iterdir())
        if os.path.lexists(place) and not empty and not _is_ours(place):
            what = "a link" if place.is_symlink() else "no checkpoint of halfstep"
            raise CheckpointError(f"{place} is {what}, so that it is not replaced: choose another name")


def _remove(folder: Path, successor: Path | None = None) -> None:
    """Delete a checkpoint's own files, its mark last, and the folder where nothing else is in it.

    What else is in it goes to the same name in `successor`, the checkpoint that replaces it, or stays.
    """
    with suppress(OSError):
        for file in (*folder.glob("rank-*-of-*.safetensors"), folder / MANIFEST) if _is_ours(folder) else ():
            file.unlink()
        if successor is not None:
            for guest in folder.iterdir():
                if not os.path.lexists(successor / guest.name):
                    os.rename(guest, successor / guest.name)
        folder.rmdir()  # fails where something is left


def local(path: str | Path) -> Path:
    """Return a path on a disk; CheckpointError for a URL."""
    if "://" in str(path):
        raise CheckpointError(
            f"{path} is a URL: give storage='dcp' to save() and load(), or a path on a disk"
        )
    return Path(path)


def check_keep(path: Path, keep: int | None) -> None:
    """CheckpointError for no name, and for a number to keep that cannot be or a name without a number."""
    if not path.name:
        raise CheckpointError(
            f"save({str(path)!r}): expected the name of a folder to make, such as 'runs/step-1'; one that "
            "holds other files is not replaced"
        )
    whole = isinstance(keep, int) and not isinstance(keep, bool)
    if keep is not None and not (whole and keep >= 1 and _NUMBERED.fullmatch(path.name)):
        raise CheckpointError(
            f"keep_last={show(keep)} for {path.name}: expected a whole number, 1 or more, and a name ending "
            "in a number, such as step-100"
        )


_NUMBERED = re.compile(r"(.*?)(\d+)")


def _prune(path: Path, keep: int | None) -> None:
    """Delete what killed saves of this name left; with `keep` what those of its series left, and older ones.

    A series are names that differ in the last number only.
    """
    names = [other.name for other in path.parent.iterdir()]
    begun = {name: match[1] for name in names if (match := re.fullmatch(r"\.(.+)\.[\w-]+\.tmp", name))}
    series = [path.name] if keep is None else older(path.name, begun.values())
    gone = [name for name, target in begun.items() if target in series]
    if keep is not None:
        gone += [name for name in older(path.name, names) if _is_ours(path.with_name(name))][:-keep]
    for name in gone:
        _remove(path.with_name(name))


def older(name: str, others: Iterable[str]) -> list[str]:
    """Those of `others` that differ from `name` in its last number only and have none larger, in order."""
    name_match = _NUMBERED.fullmatch(name)
    assert name_match is not None
    pattern = re.compile(re.escape(name_match[1]) + r"(\d+)")
    numbers = {other: int(match[1]) for other in others if (match := pattern.fullmatch(other))}
    return sorted((o for o, n in numbers.items() if n <= int(name_match[2])), key=lambda o: (numbers[o], o))


class CheckpointFolder:
    """The last `keep` checkpoints of one run in one folder: `step-00000100`, as `Session.save` writes them.

    Nothing else in the folder counts. One that holds checkpoints which this object neither wrote nor loaded
    belongs to another run: `claim` refuses it.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}; a folder keeps at least 1 checkpoint")
        self.folder, self.keep = Path(folder), keep
        self._known: set[str] = set()

    def paths(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        named = [path for path in entries if re.fullmatch(r"step-\d{8,}", path.name)]
        return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))

    def has(self, step: int) -> bool:
        """Whether the checkpoint of `step` was written or loaded here."""
        return f"step-{step:08d}" in self._known

    def claim(self) -> None:
        """Raise CheckpointError where the folder holds checkpoints of another run."""
        strangers = [path.name for path in self.paths() if path.name not in self._known]
        if strangers:
            raise CheckpointError(
                f"{self.folder} holds checkpoints of another run ({_some(strangers)}): pass resume=True to "
                "go on with that run, or another folder for this one"
            )

    def path_for(self, step: int) -> Path:
        """Where to write the checkpoint of `step`, which from now on is of this run; raises as `claim`."""
        self.claim()
        name = f"step-{step:08d}"
        self._known.add(name)
        return self.folder / name

    def read_latest(self, read: Callable[[Path], Any]) -> None:
        """Call `read` for the newest checkpoint; where that is damaged, for the one before it, and so on.

        A damaged one is named in a warning and set aside as `step-00000100.damaged`. Raises CheckpointError
        where there are checkpoints and all are damaged.
        """
        damaged: list[tuple[Path, CheckpointError]] = []
        paths = self.paths()
        self._known |= {path.name for path in paths}
        while paths:
            path = paths.pop()
            try:
                read(path)
            except CheckpointError as error:
                if not error.damaged:
                    raise
                damaged.append((path, error))
                continue
            for other, error in damaged:
                self._known.discard(other.name)
                _rename_damaged(other, f"{error}; it is now {other.name}.damaged, going on from {path.name}")
            return
        if damaged:
            raise CheckpointError(
                f"{damaged[0][1]}; {self.folder} has no earlier checkpoint that can be read: "
                "start afresh in another folder"
            ) from damaged[0][1]


def _rename_damaged(path: Path, message: str) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    if aside.is_dir():
        shutil.rmtree(aside)
    with suppress(FileNotFoundError):  # another rank did it
        os.replace(path, aside)
        warn(message)
