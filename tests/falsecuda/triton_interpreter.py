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
    from triton import language
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor

    run: Any = GridExecutor.__call__
    patch_language: Any = interpreter._patch_lang
    patched = set[frozenset[int]]()
    """The names by which functions of the present launch know the language."""

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        on_device = any(t.is_cuda for t in tensors)
        for t in tensors if on_device else ():
            if t.is_cpu and not t.is_pinned():
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        if on_device:
            control.submit(self.fn.__name__)
            args = (*map(_on_host, args),)
            kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        patched.clear()
        with _disable_current_modes(), torch.device("cpu"), np.errstate(all="ignore"):
            run(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        """What a kernel calls finds triton.language patched: doing it anew takes most of a launch."""
        modules = frozenset(
            id(m) for m in function.__globals__.values() if m is language or m is language.core
        )
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        return patch_language(function)

    def as_they_are(self: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    interpreter._patch_lang = patch_once
    GridExecutor.__call__ = call
    GridExecutor._init_args_hst = as_they_are
    GridExecutor._restore_args_dev = lambda self, *args: None


def _on_host(value: Any) -> Any:
    return torch.ops.falsecuda.on_cpu(value.detach()) if isinstance(value, Tensor) else value
