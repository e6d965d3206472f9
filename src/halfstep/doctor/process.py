"""One run of a script in a process of its own, the one runner of scripts; and a run held as it is.

What is run is a function with its order, which can be pickled: in a copy of this process where that is safe,
else in a fresh one. `Moment.hold()` keeps a running process by fork: it returns None in
the run itself and an order in each copy that is asked for later, which goes on from that line with everything
as it was (data iterators, Python's own variables, random state), does what the order says and leaves with
`answer`. Not for processes that have used an accelerator. `Copies` is this way to run a script's steps again.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep.doctor.document import Document
from halfstep.doctor.ledger import Ledger, RunNotes
from halfstep.numerics.fault import Again, Seen, Suspect

if TYPE_CHECKING:
    from halfstep.doctor.examiner import Examiner


@dataclass(frozen=True)
class Order:
    """A script to run for `steps` iterations, or, with `again`, until that part of it has been run.

    `copies`: whether the run may be copied; `forked`: whether its process is a copy of the first one's.
    """

    script: str
    args: tuple[str, ...]
    steps: int
    seed: int
    again: Again | None = None
    copies: bool = True
    forked: bool = False


@dataclass
class Found:
    """What a run found: a document without faults, the notes of the run, what its copies showed (`seen`), and
    the steps that could not be looked at."""

    document: Document
    notes: RunNotes
    seen: Seen = field(default_factory=Seen)
    suspects: list[Suspect] = field(default_factory=list[Suspect])

    @property
    def ledger(self) -> Ledger:
        """The notes by step."""
        return self.notes.ledger

    @property
    def first_bad(self) -> int | None:
        """The index of the first bad step."""
        return next((index for index, note in enumerate(self.ledger.notes) if note.bad), None)


_LENGTH = 8
#: What holding steps may cost: seconds, and beyond them a share of the run.
_GRACE, _SHARE = 0.5, 0.15


def can_fork() -> bool:
    """Whether a copy of this process could go on: not on Windows, nor with a device or other ranks in use."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return False
    if torch.accelerator.is_available() and torch.get_device_module().is_initialized():
        return False
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


class Moment:
    """The state of this process at `hold`, waiting in a child that does nothing until it is asked."""

    def __init__(self) -> None:
        self._pid = 0
        self._asks = -1
        self._answers = -1

    def hold(self) -> Any:
        """Keep this moment. None in the process that runs on; in a copy of it, the order it was given."""
        order_end, self._asks = os.pipe()
        self._answers, answer_end = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(order_end)
            os.close(answer_end)
            return None
        os.close(self._asks)
        os.close(self._answers)
        return _wait_for_orders(order_end, answer_end)

    def ask(self, order: Again) -> Any:
        """What a copy that goes on from here with `order` answers; None if it fails or takes too long."""
        try:
            _send(self._asks, order)
            return _receive(self._answers, time.monotonic() + order.seconds + 5)
        except OSError:
            return None

    def close(self) -> None:
        """Let go of the moment."""
        with contextlib.suppress(OSError):
            _send(self._asks, None)  # workers that were started since hold this pipe open too
        for end in (self._asks, self._answers):
            with contextlib.suppress(OSError):
                os.close(end)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


class Copies:
    """Holds the beginning of the latest step, and runs it again in copies of the process, where it can."""

    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner
        self._may = examiner.order.copies and examiner.order.again is None and can_fork()
        self._moment: Moment | None = None
        self._began = time.monotonic()
        self._spent = 0.0

    def hold(self, freely: bool = True) -> None:
        """Keep this moment; not `freely`: unless that takes too large a share of the run's time.

        Returns in each copy as well, whose examiner has been told by then what to run again.
        """
        late = self._spent > _GRACE + _SHARE * (time.monotonic() - self._began)
        if not self._may or (late and not freely):
            return
        self.close()
        began = time.monotonic()
        moment = Moment()
        again = moment.hold()
        if again is not None:
            self._may, self._moment = False, None
            self._examiner.become_copy(again)
            return
        self._moment = moment
        self._spent += time.monotonic() - began

    def run(self, again: Again) -> Seen | None:
        """What a copy shows that goes on from the moment that is held; it cannot begin at the start."""
        if self._moment is None or again.from_start:
            return None
        found = self._moment.ask(again)
        return found if isinstance(found, Seen) else None

    def close(self) -> None:
        """Let go of the moment that is held."""
        if self._moment is not None:
            self._moment.close()
            self._moment = None


_answer_end = -1


def answer(value: Any) -> None:
    """End this copy with its answer; nothing of what it would still do at exit is done."""
    with contextlib.suppress(OSError):
        _send(_answer_end, value)
    os._exit(0)


def _send(end: int, value: Any) -> None:
    data = pickle.dumps(value)
    view = memoryview(len(data).to_bytes(_LENGTH, "little") + data)
    while view:
        view = view[os.write(end, view) :]


def _read(end: int, count: int, until: float | None) -> bytes:
    data = b""
    while len(data) < count:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([end], [], [], left)[0]:
            raise TimeoutError
        part = os.read(end, count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _receive(end: int, until: float | None) -> Any:
    try:
        size = int.from_bytes(_read(end, _LENGTH, until), "little")
        return pickle.loads(_read(end, size, until))
    except (TimeoutError, EOFError):
        return None


def _wait_for_orders(order_end: int, answer_end: int) -> Any:
    """In the waiting child: fork a copy for each order; returns in the copies only."""
    global _answer_end
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run itself says what an interrupt means
        run = os.getppid()
        while True:
            while not select.select([order_end], [], [], 2.0)[0]:
                if os.getppid() != run:
                    os._exit(0)
            order = _receive(order_end, None)
            if order is None:
                os._exit(0)
            copy = os.fork()
            if copy == 0:
                break
            status = os.waitpid(copy, 0)[1]
            if status:
                _send(answer_end, None)
    except BaseException:
        os._exit(1)
    os.close(order_end)
    _answer_end = answer_end
    signal.alarm(math.ceil(order.seconds))  # the default action ends a copy that hangs
    _be_quiet()
    torch.set_num_threads(1)  # the threads of the run are not in its copies
    return order


def _be_quiet() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for end in (1, 2):
        os.dup2(nowhere, end)


_START = "import sys; from halfstep.doctor.process import carry_out; carry_out(sys.argv[1])"


class Enough(BaseException):
    """Ends a script after the last step that was asked for."""


def run_main(script: str, args: Sequence[str]) -> BaseException | None:
    """Runs a script as `__main__`; returns what it failed with, if it did."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except (Enough, SystemExit):
        return None
    except BaseException as error:
        return error
    finally:
        sys.argv, sys.path[:] = argv, path
    return None


def in_words(error: BaseException, steps: int) -> str:
    """What a script failed with, in a line."""
    said = (str(error).splitlines() or ["no message"])[0]
    return f"{type(error).__name__} after {steps} steps: {said}"


def carry_out(folder: str) -> None:
    """Calls what lies in a folder and leaves there what it gives: what a fresh process does."""
    run = pickle.loads((Path(folder) / "run").read_bytes())
    (Path(folder) / "found").write_bytes(pickle.dumps(run()))


def can_copy() -> bool:
    """Whether a copy of this process is as good as a fresh one: no thread, no accelerator, nothing computed.

    For the command line, which has done nothing but load: a process that has computed may hold threads that
    its copies miss.
    """
    return can_fork() and threading.active_count() == 1 and not torch.accelerator.is_available()


def run_in_process(
    run: Callable[[], Any],
    environment: Mapping[str, str],
    forked: bool = False,
    wait: Callable[[subprocess.Popen[bytes]], object] = subprocess.Popen.wait,
) -> tuple[Any, str]:
    """What `run` gives in a process of its own (None: it gave nothing), and what it said on standard error.

    `run` is pickled, and so is what it gives. `wait`: after it the process, unless it is `forked`, is ended.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run").write_bytes(pickle.dumps(run))
        with (folder / "said").open("wb") as errors:
            if forked:
                _copied(name, errors.fileno())
            else:
                command = [sys.executable, "-c", _START, name]
                child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
                try:
                    wait(child)
                finally:
                    child.kill()
                    child.wait()
        result = folder / "found"
        found = pickle.loads(result.read_bytes()) if result.exists() else None
        return found, (folder / "said").read_text(encoding="utf-8", errors="replace")


def _copied(folder: str, errors: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    copy = os.fork()
    if copy == 0:
        _run_here(folder, errors)
    os.waitpid(copy, 0)


def _run_here(folder: str, errors: int) -> None:
    """In the copy: do what lies in the folder, and end without what this process would do."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(errors, 2)
        atexit._clear()  # what the first process does at its end is not for its copy
        carry_out(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stderr.flush()
        finally:
            os._exit(code)
