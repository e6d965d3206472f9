"""One run of a script in a process of its own: a copy of this one where that is safe, else a fresh one."""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep.distributed import world_size
from halfstep.doctor.order import Order


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
        said = _copied(order, folder) if order.forked else _fresh(order, folder, environment)
        result = Path(order.result)
        return (pickle.loads(result.read_bytes()) if result.exists() else None), said


def _fresh(order: Order, folder: str, environment: Mapping[str, str]) -> str:
    orders = Path(folder) / "orders"
    orders.write_bytes(pickle.dumps(order))
    command = [sys.executable, "-m", "halfstep.doctor.in_script", str(orders)]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
    )
    return done.stderr


def _copied(order: Order, folder: str) -> str:
    said = Path(folder) / "said"
    said.touch()
    sys.stdout.flush()
    sys.stderr.flush()
    copy = os.fork()
    if copy == 0:
        _run_here(order, said)
    os.waitpid(copy, 0)
    return said.read_text(encoding="utf-8", errors="replace")


def _run_here(order: Order, said: Path) -> None:
    """In the copy: run the order, write down what was found, and end without what this process would do."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(said, os.O_WRONLY), 2)
        atexit._clear()  # what the first process does at its end is not for its copy
        from halfstep.doctor.in_script import run_order

        Path(order.result).write_bytes(pickle.dumps(run_order(order)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stderr.flush()
        finally:
            os._exit(code)
