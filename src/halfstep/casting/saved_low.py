"""What autograd keeps of an op rounded around fp32 as a whole: the 16-bit tensors, not their copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from halfstep.torch_private import can_save_hooks, not_compiled, top_save_hooks

_F32 = torch.float32


def _has_memory(t: torch.Tensor) -> bool:
    return type(t) is torch.Tensor and t.layout is torch.strided and t.numel() > 0


class SavedLow(saved_tensors_hooks):
    """While it is entered, autograd saves the 16-bit tensor that an fp32 copy was made of, not the copy.

    Saved-tensor hooks that were set around it (checkpointing, offloading, counting) get the 16-bit tensor.
    """

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self._low: dict[int, torch.Tensor] = {}
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._on = torch.is_grad_enabled() and can_save_hooks()

    def __enter__(self) -> None:
        if self._on:
            self._outer = top_save_hooks(True)
            super().__enter__()

    def __exit__(self, *args: object) -> None:
        if self._on:
            super().__exit__(*args)

    def remember(self, wide: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Note that `wide` is `low` in fp32; returns `wide`. Tracers' fake tensors have no memory to save."""
        if self._on and _has_memory(wide) and wide.stride() == low.stride():
            self._low[wide.untyped_storage().data_ptr()] = low
        return wide

    @not_compiled
    def _pack(self, t: torch.Tensor) -> tuple[Any, torch.Tensor | None, int]:
        low = None
        if t.dtype is _F32 and _has_memory(t):
            low = self._low.get(t.untyped_storage().data_ptr())
        if low is None:
            keep = t.detach()
        else:
            place = low.storage_offset() + t.storage_offset()
            keep = low.detach().as_strided(t.size(), t.stride(), place)
        version = -1 if low is None else low._version
        if self._outer is None:
            return keep, low if low is None else keep, version
        return self._outer[0](keep), None, version

    @not_compiled
    def _unpack(self, packed: tuple[Any, torch.Tensor | None, int]) -> torch.Tensor:
        value, watched, version = packed
        if watched is not None and watched._version != version:
            raise RuntimeError(
                "a 16-bit tensor needed for backward was changed in place after the op that used it; "
                "clone it before the change, or change it before the op"
            )
        tensor = value if self._outer is None else self._outer[1](value)
        return tensor.to(_F32) if version >= 0 else tensor
