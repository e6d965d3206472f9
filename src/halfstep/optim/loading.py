"""What `load_state_dict` brings to a model reaches the masters of its optimizer unrounded.

torch rounds an fp32 checkpoint into 16-bit weights; the hooks here hand the values to whoever holds the bits
that the weights lack. Copies and pickles of a model keep empty ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.distributed import local_of
from halfstep.optim import saved_masters, storage
from halfstep.optim.base import OnePassOptimizer


class LoadedMasters:
    """Module hooks around `load_state_dict` that set an optimizer's masters to the values that came in.

    A weight that was given fp32 or fp64 values gets these as its master; one that was given 16 bits, or that
    the module made something else of, is its own master where it changed.
    """

    def __init__(self, optimizer: OnePassOptimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._came: dict[Tensor, tuple[int, Tensor, Tensor]] = {}

    def attach(self, models: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Hang the hooks on every module, since parts of a model are loaded alone; returns handles."""
        modules = dict.fromkeys(module for model in models for module in model.modules())
        return [
            handle
            for module in modules
            for handle in (
                module.register_load_state_dict_pre_hook(self.before),
                module.register_load_state_dict_post_hook(self.after),
            )
        ]

    @torch.no_grad()
    def before(self, module: nn.Module, state: dict[str, Any], prefix: str, *about: Any) -> None:
        """Note what comes in for the module's own parameters, and their masters as they are."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            return
        assigns = bool(about and about[0].get("assign_to_params_buffers"))
        names = {p: prefix + name for name, p in module._parameters.items() if p is not None}
        came = {p: state.get(name) for p, name in names.items()}
        held = {p for group in optimizer.param_groups for p in group["params"]} if came else set[Tensor]()
        for p, value in came.items():
            if p in held and p.dtype in storage.LOW_DTYPES and _fits(value, p):
                awaits = value.dtype in storage.LOW_DTYPES and optimizer.awaits(p)
                if awaits and value.dtype == p.dtype:
                    continue
                master = optimizer.master_of(p)
                if saved_masters.is_of_other_bits(value, p) and not assigns:
                    value = saved_masters.widened(value.detach().to(p.device), master)
                    state[names[p]] = value
                self._came[p] = p._version, value.detach(), master

    @torch.no_grad()
    def after(self, module: nn.Module, keys: Any) -> None:
        """Set the masters of those that were loaded."""
        optimizer = None if self._optimizer is None else self._optimizer()
        values: dict[Tensor, Tensor] = {}
        for p in (p for p in module._parameters.values() if p is not None and p in self._came):
            version, value, master = self._came.pop(p)
            if p._version != version:
                values[p] = _exact(p.detach(), value, master)
        if optimizer is not None and values:
            optimizer.seed_masters(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedMasters:
        return LoadedMasters()

    def __reduce__(self) -> tuple[type[LoadedMasters], tuple[()]]:
        return LoadedMasters, ()


def _fits(value: Any, p: Tensor) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or value.shape != p.shape or not value.is_floating_point():
        return False
    return (local_of(value) is value) == (local_of(p) is p)


def _exact(p: Tensor, value: Tensor, master: Tensor) -> Tensor:
    """The fp32 value of a weight that was loaded: what came in, or was there, where `p` is its rounding."""
    known = master if value.dtype in storage.LOW_DTYPES else value.to(p.device, torch.float32)
    same = known.to(p.dtype) == p
    if p.dtype == torch.bfloat16 and known is master:  # which exact masters round away from zero
        half, bits = p.to(torch.float32).view(torch.int32), known.view(torch.int32)
        same |= (bits + 0x8000) & ~0xFFFF == half
    return torch.where(same, known, p.to(torch.float32))
