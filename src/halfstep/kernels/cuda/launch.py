"""Whether Triton's kernels run on a device, and how they are launched."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import torch

from halfstep.errors import UnsupportedError, warn


@cache
def kernels() -> Any:
    """Return the kernels' module, or None where Triton cannot be imported."""
    try:
        from halfstep.kernels.cuda import update as _triton_kernels
    except ImportError:
        return None
    return _triton_kernels


@cache
def usable(device: torch.device, demanded: bool) -> bool:
    """Whether the kernels run on `device`; if not, UnsupportedError where `demanded`, a warning on CUDA."""
    problem = why_not(device)
    if problem and demanded:
        raise UnsupportedError(f"backend='triton' does not run on {problem}")
    if problem and device.type == "cuda":
        warn(
            "hs.optim runs its reference in plain torch, which gives the same numbers in 30 to 280 launches "
            f"for each parameter group instead of 2 and is slower, on {problem}"
        )
    return not problem


@cache
def why_not(device: torch.device) -> str:
    """Say what keeps the kernels from running, and what to do; empty where they run."""
    if device.type == "cpu" and (os.environ.get("TRITON_INTERPRET") != "1" or kernels() is None):
        return "a CPU (except in Triton's interpreter, TRITON_INTERPRET=1); leave backend at 'auto'"
    if device.type not in ("cpu", "cuda"):
        return f"{device.type} devices; leave backend at 'auto'"
    if torch.version.hip is not None:
        return "AMD GPUs, for which the arithmetic of the Triton kernels was not verified"
    if kernels() is None:
        return "a machine where Triton cannot be imported: pip install triton"
    if device.type != "cuda" or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return ""  # a graph under capture may not load a kernel; the steps before it have tried
    return _failure(device)


def _failure(device: torch.device) -> str:
    """Say why a first small kernel could not be compiled and launched; empty where it ran."""
    try:
        room = torch.zeros(8, dtype=torch.float32, device=device)
        peaks, flags = room.view(torch.int32), room[4:].view(torch.uint8)
        launch(kernels().total, device, 1, room, peaks, 0, 1.0, None, flags, room, LANES=1024)
    except Exception as error:  # of a compiler, a linker, the driver or Triton itself
        text = " ".join(str(error).split())[:300]
        return (
            f"a machine where Triton cannot compile or launch a kernel ({type(error).__name__}: {text}): it "
            "needs a C compiler (gcc or clang), the headers of Python (python3-dev) and NVIDIA's driver"
        )
    return ""


def launch(kernel: Any, device: torch.device, programs: int, *args: Any, **constants: Any) -> None:
    """Launch on `device`, by default with four warps a program, fused multiply-add off."""
    constants = {"num_warps": 4, "enable_fp_fusion": False, **constants}
    context = torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")
    with context:  # in the interpreter numpy computes, and warns of infinities
        kernel[(programs,)](*args, **constants)
