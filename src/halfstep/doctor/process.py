"""Run a script in a process of its own, and fork it so that its steps can be run again.

A function with its order, which can be pickled, runs in a copy of this process where that is safe, else in a
fresh one. `ForkPoint.fork_here` forks a running process: it returns in the run itself, and in each copy that
is asked for later. A copy goes on from that line with everything as it was (data iterators, Python's own
variables, random state), does what its order says and leaves with `send_and_exit`. Processes that have used
an accelerator cannot be forked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import spec_from_file_location
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from halfstep.doctor.document import Document
from halfstep.doctor.files import Layer, detach_open_files, let_write_only
from halfstep.doctor.ledger import Ledger
from halfstep.numerics.fault import RerunRequest, RerunResult, SuspectStep
from halfstep.numerics.tape import is_users

if TYPE_CHECKING:
    from halfstep.doctor.examiner import Examiner


@dataclass(frozen=True)
class Order:
    """A script to run for `steps` iterations (0: to its end), or, with `request`, until that has been run.

    `copies`: whether the run may be copied; `forked`: whether its process is a copy of the first one's.
    `text`: what to run in place of what the file holds. `files`: a folder that the script's runs share, for
    what its files were and what is written when it runs again (see `files.py`); none: files are not kept.
    `module`: the name by which `python -m` starts the script, if that is how it is started.
    """

    script: str
    args: tuple[str, ...]
    steps: int
    seed: int
    request: RerunRequest | None = None
    copies: bool = True
    forked: bool = False
    text: str | None = None
    files: str = ""
    module: str = ""

    @property
    def is_first(self) -> bool:
        """Whether this is the run that writes the script's files."""
        return self.request is None and self.text is None


@dataclass
class RunFindings:
    """Findings of a run: a document without faults, the notes of the run, what its copies showed (`result`),
    and the steps that could not be rerun (`unchecked_steps`)."""

    document: Document
    ledger: Ledger
    rerun_result: RerunResult = field(default_factory=RerunResult)
    unchecked_steps: list[SuspectStep] = field(default_factory=list[SuspectStep])

    @property
    def first_bad(self) -> int | None:
        """Return the index of the first bad step."""
        return next((index for index, note in enumerate(self.ledger.notes) if note.bad), None)


#: After so many seconds a copy is ended; after a third of them it begins no step.
SECONDS = 30
#: After so many seconds steps are held so many apart (every page that is written to while a copy waits is
#: copied), and holding one takes no more than this share of a run. A copy goes on to the step that is wanted.
_EACH, _APART, _SHARE = 2.0, 0.5, 0.15


def can_fork() -> bool:
    """Whether this process can be forked: not on Windows, nor with a device or other ranks in use."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return False
    if torch.accelerator.is_available() and torch.get_device_module().is_initialized():
        return False
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


class ForkPoint:
    """A fork of the process at the beginning of the latest step, from which copies run it again.

    The fork is a child that waits until it is asked.
    """

    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner
        self._may = examiner.order.copies and examiner.order.request is None and can_fork()
        self._held: tuple[int, Connection] | None = None
        self._asker: Connection | None = None
        self._began = self._latest = time.monotonic()
        self._took = 0.0
        self._around = contextlib.ExitStack()

    def fork_here(self, freely: bool = True) -> None:
        """Fork the process here; without `freely` only if the last fork is not recent.

        Returns in each copy as well, whose examiner knows by then what to run again.
        """
        began = time.monotonic()
        soon = began - self._latest < max(_APART, self._took / _SHARE) and began - self._began > _EACH
        if not self._may or (soon and not freely):
            return
        self.close()
        ours, theirs = Pipe()
        child = os.fork()
        if not child:
            ours.close()
            request = _wait_for_orders(theirs)
            self._may, self._held, self._asker = False, None, theirs
            self._leave_files_alone(self._examiner.order.files)
            self._examiner.run_as_copy(request)
            return
        theirs.close()
        self._held = child, ours
        self._latest = time.monotonic()
        self._took = self._latest - began

    def _leave_files_alone(self, folder: str) -> None:
        """Have this copy write to the folder only, what it holds open included."""
        if folder:
            detach_open_files(folder)
            Layer(folder, copy=True).install(self._around, replace)
            let_write_only(folder)

    def run(self, request: RerunRequest) -> RerunResult | None:
        """Return the result of a copy that goes on from the fork; it cannot begin at the start.

        None too if the copy fails or takes too long.
        """
        if self._held is None or request.from_start:
            return None
        try:
            self._held[1].send_bytes(to_bytes(request))
            return _receive(self._held[1], SECONDS + 5)
        except (EOFError, OSError):
            return None

    def send_and_exit(self, value: Any) -> None:
        """Send a copy's result and end it, without its exit handlers."""
        if self._asker is not None:
            with contextlib.suppress(OSError):
                self._asker.send_bytes(to_bytes(value))
            os._exit(0)

    def close(self) -> None:
        """End the fork that waits."""
        if self._held is None:
            return
        child, ours = self._held
        self._held = None
        with contextlib.suppress(OSError):
            ours.send_bytes(to_bytes(None))  # workers that were started since hold this pipe open too
        ours.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _receive(end: Connection, seconds: float | None) -> Any:
    """Receive what comes within so many seconds, else None."""
    return pickle.loads(end.recv_bytes()) if end.poll(seconds) else None


def _wait_for_orders(end: Connection) -> RerunRequest:
    """Fork a copy for each order, in the waiting child; returns in the copies only."""
    try:
        run = os.getppid()
        while True:
            while not end.poll(2.0):
                if os.getppid() != run:
                    os._exit(0)
            order = _receive(end, None)
            if order is None:
                os._exit(0)
            copy = os.fork()
            if copy == 0:
                break
            if os.waitpid(copy, 0)[1]:
                end.send_bytes(to_bytes(None))
    except BaseException:
        os._exit(1)
    signal.alarm(SECONDS)  # the default action ends a copy that hangs
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    torch.set_num_threads(1)  # the threads of the run are not in its copies
    return order


_START = "import sys; from halfstep.doctor.process import carry_out; carry_out(*sys.argv[1:])"


def seed(number: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def replace(stack: contextlib.ExitStack, owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a function or method by `instead(function, *arguments)` until the stack closes."""
    function, inherited = getattr(owner, name), name not in vars(owner)

    @functools.wraps(function)  # where a mode is active, torch hands it this one, looked up by its name
    def call_instead(*args: Any, **kwargs: Any) -> Any:
        return instead(function, *args, **kwargs)

    if inherited:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, function)
    setattr(owner, name, call_instead)


class StopScript(BaseException):
    """Raised to end a script after the last step that was asked for."""


def run_main(
    script: str, args: Sequence[str], text: str | None = None, name: str = ""
) -> BaseException | None:
    """Run a script, or this text of it, as `__main__`; return its error, if it failed.

    An exit with a status other than 0, or with a message, is a failure. `name`: that of the module by which
    `python -m` starts it, so that its relative imports work and the current folder is the first looked in.
    """
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [script, *args]
    sys.path.insert(0, os.getcwd() if name else str(Path(script).resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    try:
        if name:
            module.__spec__ = spec_from_file_location(name, script)
            module.__package__ = name.rpartition(".")[0]
            import_module(module.__package__ or name)
        code = compile(Path(script).read_bytes() if text is None else text, script, "exec")
        exec(code, vars(module))
    except StopScript:
        return None
    except BaseException as error:
        fine = isinstance(error, SystemExit) and error.code in (None, 0)
        return None if fine else error
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
    return None


def in_words(error: BaseException, steps: int) -> str:
    """Describe a script's error in a line, with the user's line."""
    message = (str(error).splitlines() or ["no message"])[0]
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    where = next((f" ({Path(file).name}:{line})" for file, line in reversed(frames) if is_users(file)), "")
    return f"{type(error).__name__} after {steps} steps: {message}{where}"


class _Pickler(pickle.Pickler):
    """Pickles tensors of a device as copies on the host: the reader needs no context on the device."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors of a device to copies on the host."""
        if isinstance(obj, Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes for another process."""
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(value)
    return out.getvalue()


def carry_out(folder: str, files: str = "", pipe: str = "") -> None:
    """Call the function pickled in a folder and leave its result there: the main of a fresh process.

    `files`: the only folder in which it may write. `pipe`: the number of a pipe whose other end the asking
    process holds.
    """
    if pipe:
        _end_with(int(pipe))
    if files:
        let_write_only(files)
    run = pickle.loads((Path(folder) / "run").read_bytes())
    (Path(folder) / "found").write_bytes(to_bytes(run()))


def can_copy() -> bool:
    """Whether a copy of this process is as good as a fresh one: no thread, no accelerator, nothing computed.

    For the command line, which has only imported modules: a process that has computed may have threads that
    its copies lack.
    """
    return can_fork() and threading.active_count() == 1 and not torch.accelerator.is_available()


class Interrupted(KeyboardInterrupt):
    """Raised for Ctrl-C during a patient run; `args` hold its result and its standard error."""


def run_in_process(
    run: Callable[[], Any],
    environment: Mapping[str, str],
    forked: bool = False,
    patient: bool = False,
    files: str = "",
) -> tuple[Any, str]:
    """Return the result of `run` in a process of its own (None: it had none), and its standard error.

    With `files` it may write in that folder only, where the system can see to that.
    `run` and its result are pickled. The process has a session of its own, so that Ctrl-C reaches
    this one alone, and ends when this one does; but not on Windows, where Ctrl-C reaches both.

    Raises:
        KeyboardInterrupt: Ctrl-C, or a second one where the run is `patient`, which the first one ends as it
            would a script. That raises `Interrupted` afterwards, where the run gave something.
    """
    interrupted, posix = False, hasattr(os, "fork")
    ours, theirs = os.pipe()[::-1]
    with tempfile.TemporaryDirectory(dir=files or None) as name:
        folder = Path(name)
        (folder / "run").write_bytes(to_bytes(run))
        with (folder / "said").open("wb") as errors:
            child: Any
            if forked:
                arguments = name, files, errors.fileno(), ours, theirs
                child = multiprocessing.get_context("fork").Process(target=_in_copy, args=arguments)
                child.start()
                join = child.join
            else:
                options: dict[str, Any] = {"pass_fds": [theirs], "start_new_session": True} if posix else {}
                child = subprocess.Popen(
                    [sys.executable, "-c", _START, name, files, *([str(theirs)] if posix else [])],
                    stdout=subprocess.DEVNULL, stderr=errors, env=environment, **options,
                )  # fmt: skip
                join = child.wait
            try:
                join()
            except KeyboardInterrupt:
                if not patient:
                    raise
                interrupted = True
                with contextlib.suppress(ProcessLookupError):  # it has ended by now
                    if posix:
                        os.kill(child.pid, signal.SIGINT)
                join()
            finally:
                child.kill()
                join()
                os.close(ours)
                os.close(theirs)
        result = folder / "found"
        value = pickle.loads(result.read_bytes()) if result.exists() else None
        stderr = (folder / "said").read_text(encoding="utf-8", errors="replace")
    if interrupted:
        raise KeyboardInterrupt if value is None else Interrupted(value, stderr)
    return value, stderr


def _end_with(pipe: int) -> None:
    """End this process when the other end of the pipe is closed: its holder has ended."""
    import fcntl

    def end(*_: object) -> None:
        os._exit(1)

    signal.signal(signal.SIGIO, end)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)


def _in_copy(folder: str, files: str, errors: int, ours: int, theirs: int) -> None:
    """Call the function pickled in the folder, in a copy of the first process, then end it."""
    os.setsid()
    os.close(ours)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(errors, 2)
    atexit._clear()
    try:
        carry_out(folder, files, str(theirs))
    finally:
        atexit._run_exitfuncs()
