"""How a checkpoint's folder comes to the disk: beside its place, forced to the disk, renamed by rank 0.

At the call of `save` or in a thread while training goes on. The thread talks to those of the other ranks over
a gloo group of its own: on the group of training its messages and the gradients' would meet each other.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from halfstep import checkpoint, shardfiles
from halfstep.distributed import gather, rank, world_size
from halfstep.distributed.reduce import Group
from halfstep.errors import CheckpointError, show
from halfstep.shardfiles import Piece

MANIFEST = "manifest.json"


class GroupWriter:
    """Writes the checkpoints of one session in a thread, from copies taken at the call; no error is lost.

    The thread is no daemon: an interpreter that ends waits for it. An error that nobody has asked for by then
    is told on standard error.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._group: Group | None = None
        self._made_for: tuple[Any, ...] = ()
        atexit.register(self._tell)

    def start(
        self,
        path: Path,
        pieces: Mapping[str, Piece],
        about: Mapping[str, Any],
        manifest: dict[str, Any],
        keep_last: int | None,
        group: Group | None,
    ) -> None:
        """Copy every value and begin to write; raises what the writing before this one raised."""
        self.wait()
        if world_size(group) > 1 and self._made_for != (group, dist.group.WORLD):
            ranks = None if group is None else dist.get_process_group_ranks(group)
            apart = ranks is not None
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=apart)
            self._made_for = group, dist.group.WORLD
        copies = {name: replace(p, value=p.value.detach().to("cpu", copy=True)) for name, p in pieces.items()}
        own = self._group if world_size(group) > 1 else group

        def work() -> None:
            try:
                write(path, copies, about, manifest, keep_last, own)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="halfstep saves", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written; raises what the last writing raised, once, on every rank."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if isinstance(error, RuntimeError) and not isinstance(error, CheckpointError):
            raise CheckpointError(
                "a save in the background was not finished: another rank is gone; what was saved before "
                "stands"
            ) from error
        if error is not None:
            raise error

    def _tell(self) -> None:
        try:
            self.wait()
        except Exception as error:
            print(f"halfstep: {error}", file=sys.stderr)


def write(
    path: Path,
    pieces: Mapping[str, Piece],
    about: Mapping[str, Any],
    manifest: dict[str, Any],
    keep_last: int | None = None,
    group: Group | None = None,
) -> None:
    """Write this rank's pieces and, on rank 0 of the group, the manifest, the name and the cleaning.

    All ranks of the group call.
    Raises CheckpointError on every rank where one of them could not.
    """
    own = path.with_name(f".{path.name}.{checkpoint.HOST}-{os.getpid()}.tmp")
    begun: list[tuple[Path, str]] = gather((own, manifest["model"]), group)
    if len({model for _, model in begun}) > 1:
        raise CheckpointError(
            f"cannot write {path}: ranks hold different parameters (stages of a pipeline?), and each would "
            "write a part of its own: save state_dict() of model, optimizer and session for each stage"
        )
    temporary = begun[0][0]
    file = temporary / f"rank-{rank(group):05d}-of-{world_size(group):05d}.safetensors"
    needed = sum(p.value.numel() * p.value.element_size() for p in pieces.values())
    try:
        _check_place(path)
        temporary.mkdir(parents=True, exist_ok=True)
        if rank(group) == 0:
            (temporary / MANIFEST).write_text(json.dumps({"halfstep": manifest["halfstep"]}))
        digest, count = shardfiles.write(file, pieces, about)
        told: Any = (file.name, digest, count)
    except OSError as error:
        told = f"cannot write {path}: {checkpoint.reason(error, path, needed)}"
    except CheckpointError as error:
        told = str(error)
    everyone = gather(told, group)
    wrong = [one for one in everyone if isinstance(one, str)]
    if not wrong and rank(group) == 0:
        manifest["files"] = {name: {"sha256": digest, "bytes": n} for name, digest, n in everyone}
        try:
            _finish(temporary, path, manifest)
        except OSError as error:
            wrong = [f"cannot write {path}: {checkpoint.reason(error, path, 0)}"]
    wrong = wrong or [one for one in gather(wrong[0] if wrong else None, group) if one]
    if wrong:
        if rank(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        stands = "what was saved before stands"
        raise CheckpointError(wrong[0] if stands in wrong[0] else f"{wrong[0]}; {stands}")
    if keep_last is not None and rank(group) == 0:
        _prune(path, keep_last)


def _finish(temporary: Path, path: Path, manifest: Mapping[str, Any]) -> None:
    with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
        file.write(json.dumps({**manifest, "sha256": checksum_of(manifest)}))  # dump() is ten times slower
        file.flush()
        os.fsync(file.fileno())
    checkpoint.sync_folder(temporary)
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        _remove(old, path)
        os.rename(path, old)
    os.rename(temporary, path)
    checkpoint.sync_folder(path.parent)
    _remove(old, path)
    for left in path.parent.glob(".*.tmp"):
        if checkpoint.was_abandoned(left, ".+"):
            _remove(left)


def _is_ours(folder: Path) -> bool:
    """Whether a folder has the mark of a checkpoint inside: a manifest that names halfstep; no link has."""
    if folder.is_symlink():
        return False
    try:
        with open(folder / MANIFEST, "rb") as file:
            return b'"halfstep": "' in file.read(4096)
    except OSError:
        return False


def _check_place(path: Path) -> None:
    """CheckpointError where something that is no checkpoint would have to go."""
    for place in (path, path.with_name(f".{path.name}.old")):
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


def checksum_of(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of what a manifest says, itself apart; the same before and after it was a file."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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


def _prune(path: Path, keep: int) -> None:
    """Delete older checkpoints beside `path` whose names differ from its name in the last number only."""
    found = _NUMBERED.fullmatch(path.name)
    assert found is not None
    pattern = re.compile(re.escape(found[1]) + r"(\d+)")
    older: list[tuple[int, Path]] = []
    for other in path.parent.iterdir():
        match = pattern.fullmatch(other.name)
        if match and int(match[1]) <= int(found[2]) and _is_ours(other):
            older.append((int(match[1]), other))
    for _, other in sorted(older)[:-keep]:
        _remove(other)
