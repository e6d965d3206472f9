"""Casts around the user's own functions: decorators, and attributes replaced for as long as amp is active."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from halfstep.errors import ConfigError
from halfstep.torch_private import pytree
from halfstep.trees import cast_floats, is_wide_float

P = ParamSpec("P")
R = TypeVar("R")


class Casts:
    """Whether casts act, and which attributes of which modules were replaced."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.disabled = 0
        self.waiting: list[tuple[Any, str, str]] = []
        self.replaced: list[tuple[Any, str, Any]] = []

    def active(self) -> bool:
        """Whether decorated functions cast now."""
        return self.dtype is not None and self.disabled == 0

    def start(self, dtype: torch.dtype) -> None:
        """Begin to cast, and replace what was registered."""
        self.dtype = dtype
        waiting, self.waiting = self.waiting, []
        for module, name, kind in waiting:
            self._replace(module, name, kind)

    def stop(self) -> None:
        """Put every replaced attribute back."""
        self.dtype = None
        self.waiting = []
        while self.replaced:
            module, name, original = self.replaced.pop()
            setattr(module, name, original)

    def register(self, module: Any, name: str, kind: str) -> None:
        """Replace `module.name` from the next (or present) initialize on, until shutdown."""
        if not hasattr(module, name):
            raise ConfigError(f"no function named {name} in module {module}")
        if self.dtype is None:
            self.waiting.append((module, name, kind))
        else:
            self._replace(module, name, kind)

    def _replace(self, module: Any, name: str, kind: str) -> None:
        original = getattr(module, name)
        self.replaced.append((module, name, original))
        setattr(module, name, wrapped(original, kind))


CASTS = Casts()


def wrapped(fn: Callable[P, R], kind: str) -> Callable[P, R]:
    """`fn` with floating arguments cast while amp casts: to "half", "float", or "promote" (the widest)."""

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not CASTS.active():
            return fn(*args, **kwargs)
        dtype = _dtype(kind, (args, kwargs))
        if dtype is None:
            return fn(*args, **kwargs)
        return fn(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))  # pyright: ignore[reportCallIssue]

    return wrapper


def _dtype(kind: str, arguments: Any) -> torch.dtype | None:
    if kind == "half":
        return CASTS.dtype
    if kind == "float":
        return torch.float32
    dtypes = [leaf.dtype for leaf in pytree.tree_leaves(arguments) if is_wide_float(leaf)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None
