"""`frozen_weights`: a scope that casts each weight of a module once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from halfstep.casting import state
from halfstep.errors import ConfigError


@contextmanager
def frozen_weights(module: torch.nn.Module) -> Generator[None]:
    """A scope in which autocast casts each fp32 weight of `module` once instead of at every use.

    For recurrent cells and shared weights. The promise is the caller's: no weight changes inside, for a
    change would not be seen. Every use sends its gradient to the fp32 weight, where they are summed in fp32.
    The copies (2 bytes an element) live until the scope ends and in graphs made inside; the scope holds for
    this thread, and does nothing in compiled code, which casts once anyway.
    """
    if torch.compiler.is_compiling():
        yield
        return
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"frozen_weights takes a torch.nn.Module, got {type(module).__name__}")
    frozen = state.thread().frozen
    weights = [p for p in module.parameters() if p.dtype is torch.float32 and id(p) not in frozen]
    frozen.update((id(p), (p, {})) for p in weights)
    try:
        yield
    finally:
        for p in weights:
            del frozen[id(p)]
