"""Keep a script's files as its first run leaves them, however often its steps are run again.

The first run writes as the user wrote it; what a file was before its first change is kept (`Journal`). What
is run again sees the files as they were before the first run (a copy of the process: as they are by then) and
writes to a folder of its own (`Layer`), through the calls by which Python writes: `open`, `os`,
`shutil.rmtree`, `torch.save`, SQLite, safetensors. A library that writes by itself is refused, by the audit
hook of the interpreter or, on Linux, by the kernel (Landlock): such a run fails, and no file of the user's is
touched.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import gc
import io
import os
import re
import shutil
import socket
import sqlite3
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

#: Variables by which services that log over a network do nothing in a run that is the doctor's alone.
MUTED = {"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug", "COMET_MODE": "disabled"}
#: Where a run may write besides its own folder: devices, and what the kernel shows of processes.
_DEVICES = ("/dev/", "/proc/", "/sys/")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
#: Audit events of calls that change files: by the place of each path the place of the open folder below which
#: it is, if one is given.
_CHANGES: dict[str, dict[int, int]] = {
    "os.remove": {0: 1}, "os.rmdir": {0: 1}, "os.truncate": {0: 9}, "os.mkdir": {0: 2}, "os.chmod": {0: 2},
    "os.utime": {0: 3}, "os.rename": {0: 2, 1: 3}, "os.link": {1: 3}, "os.symlink": {1: 2},
    "sqlite3.connect": {0: 9},
}  # fmt: skip

_hooked = False
_databases: list[Any] = []
"""Those that this process has connected to."""
_listener: Callable[[str], None] | None = None
"""Called with each path that a call of this process is about to change."""


def _on_audit(event: str, args: tuple[Any, ...]) -> None:
    listener = _listener
    if listener is None:
        return
    if event == "sqlite3.connect":
        _databases.append(args[0])
    if event == "open":
        writes = isinstance(args[2], int) and args[2] & _WRITING
        paths = args[:1] if writes and not os.path.isdir(args[0]) else ()  # a folder: another opener opens it
    else:
        paths = [_below(args[i], *args[j : j + 1]) for i, j in _CHANGES.get(event, {}).items()]
    for path in paths:
        full = full_path(path)
        if full is not None and not full.startswith(_DEVICES):
            listener(full)


def _below(path: Any, folder: int = -1) -> Any:
    """Return a path below an open folder, None where that is not known; the path itself if there is none."""
    if folder < 0:
        return path
    with contextlib.suppress(OSError):
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
    return None


@contextlib.contextmanager
def _listening(listener: Callable[[str], None]) -> Generator[None]:
    """Have a function called with each path that is about to be changed."""
    global _hooked, _listener
    if not _hooked:
        _hooked = True
        sys.addaudithook(_on_audit)
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def full_path(path: Any) -> str | None:
    """Return an absolute path; None for a file descriptor, a database in memory or what is no path."""
    if not isinstance(path, str | bytes | os.PathLike) or path == ":memory:":
        return None
    return os.path.abspath(os.fsdecode(path))


class Journal:
    """Keeps what each file was before the first run changed it, in the folder that a script's runs share."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._noted = set[str]()

    def keep(self, stack: ExitStack, replace: Callable[..., None]) -> None:
        """Follow what this process changes until the stack closes; torch.save opens a path by itself."""
        stack.enter_context(_listening(self._note))
        replace(stack, torch, "save", self._save)

    def _save(self, save: Callable[..., Any], value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        full = full_path(file)
        if full is not None:
            self._note(full)
        return save(value, file, *args, **kwargs)

    def _note(self, full: str) -> None:
        if full in self._noted or full.startswith(str(self._folder)):
            return
        self._noted.add(full)
        if not os.path.lexists(full):
            with (self._folder / "made").open("a", encoding="utf-8") as made:
                made.write(full + "\n")
        elif os.path.isfile(full):
            old = _under(self._folder / "before", full)
            os.makedirs(os.path.dirname(old), exist_ok=True)
            shutil.copy2(full, old)


def _under(root: Path, full: str) -> str:
    return str(root) + os.path.splitdrive(full)[1]


class Layer:
    """Files as a run sees them that must not change any: what it writes goes to a folder of its own.

    Args:
        folder: the one that all runs of a script share.
        copy: whether the run is a copy of the first, which sees the files as they are.
    """

    def __init__(self, folder: str, copy: bool) -> None:
        self._shared = folder
        self._own = Path(tempfile.mkdtemp(dir=folder))
        self._before = self._own if copy else Path(folder, "before")
        made = Path(folder, "made")
        lines = made.read_text(encoding="utf-8").splitlines() if made.exists() and not copy else []
        self._gone = set(lines)
        """Paths that are not there in this run, though the user's folders have them."""
        self._busy = threading.local()

    # Where a path is.

    def _ours(self, path: Any, options: Any = ()) -> str | None:
        """Return the full path if this layer is to say where it is; not one below an open folder."""
        full = None if "dir_fd" in options else full_path(path)
        return None if full is None or full.startswith((self._shared, *_DEVICES)) else full

    def _is_gone(self, full: str) -> bool:
        return full in self._gone or any(str(above) in self._gone for above in Path(full).parents)

    def find(self, full: str) -> str:
        """Return where the content of a path is in this run."""
        own, old = _under(self._own, full), _under(self._before, full)
        merged = os.path.isdir(own) and os.path.isdir(full)
        if self._is_gone(full) or (os.path.lexists(own) and not merged):
            return own
        if os.path.lexists(old) and not os.path.isdir(old):
            return old
        return full if os.path.lexists(full) else own

    def _claim(self, full: str, content: bool = True) -> str:
        """Return where this run writes a path, with what it holds so far if that counts."""
        own, found = _under(self._own, full), self.find(full)
        if os.path.isdir(self.find(os.path.dirname(full))):
            os.makedirs(os.path.dirname(own), exist_ok=True)
        if found != own and os.path.isdir(found):
            os.makedirs(own, exist_ok=True)
            for name in self._entries(os.listdir, full):
                self._claim(os.path.join(full, name))
        elif found != own and content and os.path.exists(found):
            shutil.copy2(found, own)
        return own

    def _appears(self, full: str) -> None:
        """Note that a path is there again; of a folder that was removed, what was in it is not."""
        for path in (*map(str, reversed(Path(full).parents)), full):
            if path in self._gone:
                self._gone.discard(path)
                roots = filter(os.path.isdir, (path, _under(self._before, path)))
                self._gone |= {os.path.join(path, name) for root in roots for name in os.listdir(root)}

    # What a script calls.

    def _open(self, call: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        full = self._ours(file)
        if full is None:
            return call(file, mode, *args, **options)
        if not any(letter in mode for letter in "wax+"):
            return call(self.find(full), mode, *args, **options)
        if "x" in mode and os.path.lexists(self.find(full)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
        stream = call(self._claim(full, "w" not in mode), mode, *args, **options)
        self._appears(full)
        return stream

    def _open_number(
        self, call: Callable[..., int], path: Any, flags: int, *args: Any, **options: Any
    ) -> int:
        full = self._ours(path, options)
        if full is None or not flags & _WRITING:
            return call(path if full is None else self.find(full), flags, *args, **options)
        if flags & os.O_EXCL and os.path.lexists(self.find(full)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        number = call(self._claim(full, not flags & os.O_TRUNC), flags, *args, **options)
        self._appears(full)
        return number

    def _read(self, call: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        full = self._ours(path, options)
        return call(path if full is None else self.find(full), *args, **options)

    def _change(self, call: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        full = self._ours(path, options)
        return call(path if full is None else self._claim(full), *args, **options)

    def _remove(self, call: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        result = self._change(call, path, *args, **options)
        self._gone |= {self._ours(path, options) or ""}
        return result

    def _remove_tree(self, call: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        full = self._ours(path, options)
        if full is None or not os.path.isdir(self.find(full)):
            return call(path if full is None else _under(self._own, full), *args, **options)
        self._gone |= {full}
        return call(_under(self._own, full), ignore_errors=True)

    def _make(self, call: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        full = self._ours(path, options)
        if full is None:
            return call(path, *args, **options)
        if os.path.lexists(self.find(full)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        result = call(self._claim(full), *args, **options)
        self._appears(full)
        return result

    def _move(self, call: Callable[..., Any], source: Any, target: Any, **options: Any) -> Any:
        old, new = self._ours(source), self._ours(target)
        result = call(
            source if old is None else self._claim(old),
            target if new is None else self._claim(new, content=False),
            **options,
        )
        self._gone |= {old or ""}
        self._appears(new or "")
        return result

    def _link(self, call: Callable[..., Any], source: Any, target: Any, **options: Any) -> Any:
        old, new = self._ours(source), self._ours(target)
        call(
            source if old is None else self.find(old), target if new is None else self._claim(new), **options
        )
        self._appears(new or "")

    def _save(self, call: Callable[..., Any], value: Any, file: Any, *args: Any, **options: Any) -> Any:
        full = self._ours(file)
        result = call(value, file if full is None else self._claim(full, False), *args, **options)
        self._appears(full or "")
        return result

    def _list(self, call: Callable[..., list[str]], path: Any = ".") -> list[str]:
        full = self._ours(path)
        return call(path) if full is None else self._entries(call, full)

    def _scan(self, call: Callable[..., Any], path: Any = ".") -> Any:
        full = self._ours(path)
        if full is None:
            return call(path)
        return _Entries([_Entry(entry, os.fsdecode(path)) for entry in self._entries(call, full)])

    def _entries(self, call: Callable[..., Any], full: str) -> list[Any]:
        """Return the entries of a folder, those that this run made before those that were there."""
        entries = dict[str, Any]()
        roots = [
            _under(self._own, full),
            *([] if self._is_gone(full) else [_under(self._before, full), full]),
        ]
        there = [root for root in roots if os.path.isdir(root)]
        for root in there or roots[:1]:
            for entry in call(root):
                name = entry if isinstance(entry, str) else entry.name
                if root == roots[0] or os.path.join(full, name) not in self._gone:
                    entries.setdefault(name, entry)
        return [*entries.values()]

    def _outermost(
        self, instead: Callable[..., Any], call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Call `instead`, but within it what it stands for: its paths are final."""
        if getattr(self._busy, "is_busy", False) or options.get("opener"):
            return call(*args, **options)
        self._busy.is_busy = True
        try:
            return instead(call, *args, **options)
        finally:
            self._busy.is_busy = False

    def install(self, stack: ExitStack, replace: Callable[..., None]) -> None:
        """Put the layer before Python's functions until the stack closes."""
        for owner, calls, instead in (
            (builtins, ("open",), self._open),
            (io, ("open",), self._open),
            (os, ("open",), self._open_number),
            (os, ("stat", "lstat", "access", "readlink", "listxattr", "getxattr"), self._read),
            (os, ("truncate", "chmod", "utime", "setxattr"), self._change),
            (os, ("remove", "unlink", "rmdir"), self._remove),
            (os, ("rename", "replace"), self._move),
            (os, ("link", "symlink"), self._link),
            (os, ("mkdir",), self._make),
            (os, ("listdir",), self._list),
            (os, ("scandir",), self._scan),
            (shutil, ("rmtree",), self._remove_tree),
            (torch, ("save",), self._save),
            (sqlite3, ("connect",), self._change),
        ):
            for call in filter(partial(hasattr, owner), calls):
                replace(stack, owner, call, partial(self._outermost, instead))
        for name in (
            "safetensors.torch",
            "safetensors.numpy",
        ):  # they write by themselves, and many save by them
            with contextlib.suppress(ImportError):
                replace(stack, import_module(name), "serialize_file", partial(self._outermost, self._save))
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = tempfile.mkdtemp(dir=self._own)
        stack.enter_context(_listening(self._refuse))

    def _refuse(self, full: str) -> None:
        if not full.startswith(self._shared):
            raise PermissionError(errno.EACCES, "a run of the doctor's changes no file of the user's", full)


class _Entry:
    """An entry of a folder as `os.scandir` gives it, under the path by which the script knows it."""

    def __init__(self, entry: os.DirEntry[str], folder: str) -> None:
        self.name, self.path = entry.name, os.path.join(folder, entry.name)
        self.is_dir, self.is_file, self.is_symlink = entry.is_dir, entry.is_file, entry.is_symlink
        self.stat, self.inode = entry.stat, entry.inode

    def __fspath__(self) -> str:
        return self.path


class _Entries:
    """The entries of a folder, as `os.scandir` gives them."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """Do nothing: no folder is open."""


def detach_open_files(folder: str) -> None:
    """Replace files that this copy of a process may write to, open or mapped into memory, by copies of them.

    What it sends to a network arrives nowhere.
    """
    if not os.path.isdir("/proc/self/fd"):
        return
    import fcntl

    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):
            flags, mode = fcntl.fcntl(number, fcntl.F_GETFL), os.fstat(number).st_mode
            if stat.S_ISSOCK(mode):
                _disconnect(number)
            if number <= 2 or not stat.S_ISREG(mode) or flags & os.O_ACCMODE == os.O_RDONLY:
                continue
            where = os.readlink(f"/proc/self/fd/{number}")
            if where.startswith((folder, *_DEVICES)):
                continue
            own, name = tempfile.mkstemp(dir=folder)
            if flags & os.O_ACCMODE == os.O_RDWR and os.path.exists(where):
                shutil.copyfile(where, name)
            os.truncate(name, os.fstat(number).st_size)
            os.close(own)
            own = os.open(name, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
            os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, number, os.get_inheritable(number))
            os.close(own)
    _detach_mappings()
    for thing in gc.get_objects() if _databases else ():
        if issubclass(type(thing), sqlite3.Connection):  # else it keeps a journal beside the user's file
            with contextlib.suppress(sqlite3.Error):
                thing.execute("pragma journal_mode = memory")


def _disconnect(number: int) -> None:
    """Connect a socket that has a named peer to one that nobody reads."""
    connected = socket.socket(fileno=os.dup(number))
    with connected, contextlib.suppress(OSError):
        if connected.getpeername():
            sink, unread = socket.socketpair()
            os.dup2(sink.fileno(), number, os.get_inheritable(number))
            unread.detach()
            sink.close()


def _detach_mappings() -> None:
    """Map files privately that are mapped so that what is written reaches them (memory-mapped arrays)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    shared = re.compile(r"(\w+)-(\w+) rw.s (\w+) \S+ \d+ +(/.*)")
    for begin, end, offset, path in shared.findall(Path("/proc/self/maps").read_text()):
        if path.startswith(_DEVICES) or path.endswith(" (deleted)"):
            continue
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY)
            address, size = int(begin, 16), int(end, 16) - int(begin, 16)
            private_and_fixed, read_and_write = 0x02 | 0x10, 0x1 | 0x2
            libc.mmap(address, size, read_and_write, private_and_fixed, number, int(offset, 16))
            os.close(number)


def let_write_only(folder: str) -> None:
    """Have Linux refuse this process to write outside of a folder, where the kernel knows Landlock.

    System calls and structures: https://docs.kernel.org/userspace-api/landlock.html
    """
    create_ruleset, add_rule, restrict_self, no_new_privileges = 444, 445, 446, 38
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    version = min(libc.syscall(create_ruleset, None, 0, 1), 3)
    # Write to a file, remove, make; from version 2 move to another folder, from 3 truncate.
    writing = sum(1 << bit for bit in (1, *range(4, 12 + version)))
    attributes = struct.pack("Q", writing)
    ruleset = libc.syscall(create_ruleset, attributes, len(attributes), 0)
    if version < 1 or ruleset < 0:
        return
    for root in (folder, *_DEVICES):
        with contextlib.suppress(OSError):
            number = os.open(root, os.O_PATH)
            libc.syscall(add_rule, ruleset, 1, struct.pack("=Qi", writing, number), 0)
            os.close(number)
    libc.prctl(no_new_privileges, 1, 0, 0, 0)
    libc.syscall(restrict_self, ruleset, 0)
    os.close(ruleset)
