"""One run of a script in a process of its own: a copy of this one where that is safe, else a fresh one.

The one runner of scripts: what is run is an order, which can be pickled and whose `run` gives what was found.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from halfstep.distributed import world_size
from halfstep.doctor.order import Order

_START = "import sys; from halfstep.doctor.process import carry_out; carry_out(sys.argv[1])"


class Written(Protocol):
    """An order for another process: it writes what `run` gives to the file `result`."""

    @property
    def result(self) -> str:
        """The file."""
        ...

    def run(self) -> Any:
        """What was found."""
        ...


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


def carry_out(path: str) -> None:
    """Carries out the order in a file: what a fresh process does."""
    order: Written = pickle.loads(Path(path).read_bytes())
    Path(order.result).write_bytes(pickle.dumps(order.run()))


def started(order: Written, errors: Any, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A fresh process that carries out an order; what it says on standard error goes to `errors`."""
    path = Path(f"{order.result}.order")
    path.write_bytes(pickle.dumps(order))
    command = [sys.executable, "-c", _START, str(path)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)


def can_copy() -> bool:
    """Whether a copy of this process is as good as a fresh one: no thread, no accelerator, nothing computed.

    For the command line, which has done nothing but load: a process that has computed may hold threads that
    its copies miss.
    """
    alone = threading.active_count() == 1 and world_size() == 1
    return hasattr(os, "fork") and sys.platform != "darwin" and alone and not torch.accelerator.is_available()


def run_in_process(order: Order, environment: Mapping[str, str]) -> tuple[Any, str]:
    """What a run found (None: it ended without an answer), and what it said on standard error."""
    with tempfile.TemporaryDirectory() as folder:
        order = dataclasses.replace(order, result=str(Path(folder) / "found"))
        said = Path(folder) / "said"
        with said.open("wb") as errors:
            if order.forked:
                _copied(order, errors.fileno())
            else:
                child = started(order, errors, environment)
                try:
                    child.wait()
                finally:
                    child.kill()
        result = Path(order.result)
        found = pickle.loads(result.read_bytes()) if result.exists() else None
        return found, said.read_text(encoding="utf-8", errors="replace")


def _copied(order: Order, errors: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    copy = os.fork()
    if copy == 0:
        _run_here(order, errors)
    os.waitpid(copy, 0)


def _run_here(order: Order, errors: int) -> None:
    """In the copy: run the order, write down what was found, and end without what this process would do."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(errors, 2)
        atexit._clear()  # what the first process does at its end is not for its copy
        Path(order.result).write_bytes(pickle.dumps(order.run()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stderr.flush()
        finally:
            os._exit(code)
