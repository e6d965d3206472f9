"""Runs a function on several ranks joined by gloo; they fork from a server that imported torch once.

With HALFSTEP_TESTS_DEVICE=cuda their new tensors lie there and NCCL joins them.
"""

import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = [
    "torch",
    "torch._dynamo",  # DDP imports it when it is made
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "halfstep",
    "halfstep.session",
    "halfstep.optim",
    "halfstep.kernels.cpu.facts",  # Numba takes longer to import than most of these tests
    "halfstep.kernels.cpu.models",
    "pytest",
]


def start(function: Callable[..., Any], world: int, args: Sequence[Any], folder: Path) -> list[Any]:
    """Start `function(rank, *args)` on `world` ranks that meet in `folder`; returns the processes."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    given = [(rank, world, str(folder), function, tuple(args)) for rank in range(world)]
    processes = [context.Process(target=_rank, args=own, daemon=True) for own in given]
    for process in processes:
        process.start()
    return processes


def run(function: Callable[..., Any], world: int, *args: Any, seconds: float = 120.0) -> list[Any]:
    """What `function(rank, *args)` returned on each rank; AssertionError with the trace of a failed one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = start(function, world, args, folder)
        failed = wait(processes, seconds)
        traces = [path.read_text() for path in sorted(folder.glob("trace*"))]
        assert not failed, f"{failed}\n" + "\n".join(traces)
        return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(world)]


def wait(processes: Sequence[Any], seconds: float) -> str:
    """Wait for all; where one fails or time is up the others are ended, and the answer says so."""
    until = time.monotonic() + seconds
    try:
        while True:
            codes = [process.exitcode for process in processes]
            if any(codes):
                time.sleep(0.5)  # the others may have something to say
                return f"exit codes {[process.exitcode for process in processes]}"
            if None not in codes:
                return ""
            if time.monotonic() > until:
                return f"not done after {seconds:.0f} s: exit codes {codes}"
            time.sleep(0.01)
    finally:
        for process in processes:
            with suppress(AttributeError):
                process.kill()
            process.join()


def _rank(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = os.environ.get("HALFSTEP_TESTS_DEVICE")
    torch.set_default_device(device)
    try:
        meet, group = f"file://{folder}/meet", "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(group, init_method=meet, rank=rank, world_size=world)
        torch.save(function(rank, *args), f"{folder}/result{rank}")
        gc.collect()  # what holds the group goes first: its threads must not meet an interpreter that ends
        dist.destroy_process_group()
    except BaseException:
        Path(f"{folder}/trace{rank}").write_text(f"rank {rank}\n{traceback.format_exc()}")
        raise
