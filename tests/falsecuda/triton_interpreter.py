"""Teaches Triton's interpreter the device: kernels run on its memory itself, and count as ops of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.falsecuda import control


def teach() -> None:
    """Let kernels that get tensors of the device work in its memory; the host's among them raise."""
    from triton.runtime.interpreter import GridExecutor

    run: Any = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not any(t.is_cuda for t in tensors):
            run(self, *args, **kwargs)
            return
        for t in tensors:
            if t.is_cpu and not t.is_pinned():
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        control.submit(self.fn.__name__)
        with _disable_current_modes(), torch.device("cpu"), np.errstate(all="ignore"):
            run(self, *map(_on_host, args), **{name: _on_host(value) for name, value in kwargs.items()})

    def as_they_are(self: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    GridExecutor.__call__ = call
    GridExecutor._init_args_hst = as_they_are
    GridExecutor._restore_args_dev = lambda self, *args: None


def _on_host(value: Any) -> Any:
    return torch.ops.falsecuda.on_cpu(value.detach()) if isinstance(value, Tensor) else value
