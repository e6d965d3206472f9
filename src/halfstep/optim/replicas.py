"""DDP makes ranks agree on the 16-bit weights; here the fp32 masters behind those go along.

When it wraps a model, DDP writes rank 0's weights over those of the other ranks. Each rank would keep its own
masters, and train these. Wrapping is a collective, so the masters are sent right there, and no step asks.
They are with `init_sync=False` too: DDP would train what each rank has, and ranks are one run (law 14).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from halfstep.distributed import local_of
from halfstep.optim.masters import holders_of
from halfstep.policy.levels import LOW_DTYPES
from halfstep.torch_private import check_same_shapes


class Training(Protocol):
    """Who was prepared with masters: a session's setup, or the record of a drop-in interface."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return all optimizers, with masters or without."""
        ...


class WrapListener(Protocol):
    """Who wants to know of each DDP that is made around its weights."""

    def trains_in(self, module: nn.Module) -> bool:
        """Whether the module holds its weights."""
        ...

    def on_ddp_wrap(self, ddp: Any, sends: bool) -> None:
        """Called within DDP's constructor; `sends`: on every rank, and for no other of the same weights."""
        ...


_TRAININGS: weakref.WeakSet[Training] = weakref.WeakSet()
_TOLD: weakref.WeakKeyDictionary[WrapListener, None] = weakref.WeakKeyDictionary()
"""The latest last."""


@torch.no_grad()
def send_masters(ddp: Any, module: nn.Module, trainings: Sequence[Training], rank: int) -> None:
    """Set the fp32 masters behind what `ddp` keeps the same to those of `rank` of its group; weights follow.

    A collective, in the module's order, which is that of all ranks.
    """
    if torch.distributed.get_world_size(ddp.process_group) == 1:
        return
    low = {
        p
        for name, p in module.named_parameters()
        if name not in ddp.parameters_to_ignore and p.dtype in LOW_DTYPES and local_of(p) is p
    }
    holders = holders_of([o for training in trainings for o in training.optimizers])
    exact = {p: value for holder in holders for p, value in holder.masters(low).items()}
    weights: list[Tensor] = [p for p in module.parameters() if p in exact]
    values = {p: exact[p].detach().to(torch.float32, copy=True) for p in weights}
    if weights:
        check_same_shapes(ddp.process_group, weights)
    for value in values.values():
        torch.distributed.broadcast(value, group=ddp.process_group, group_src=rank)
    for holder in holders:
        holder.seed_masters(values)


def follow_wraps(training: Training) -> None:
    """Give all ranks rank 0's masters whenever a DDP is made around weights of this training."""
    if torch.distributed.is_available():
        _TRAININGS.add(training)
        _watch()


def listen_to_wraps(observer: WrapListener) -> None:
    """Call the listener for every DDP made around its weights from now on."""
    if torch.distributed.is_available():
        _TOLD[observer] = None
        _watch()


@functools.cache
def _watch() -> None:
    register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Run for every module that becomes part of another; act where DDP's constructor registers its module."""
    if not isinstance(parent, nn.parallel.DistributedDataParallel) or module is None:
        return
    if hasattr(parent, "reducer"):  # another module in the place of the one that it was made around
        return
    observers = [observer for observer in _TOLD if observer.trains_in(module)]
    for observer in observers:  # collectives for the latest alone: older ones may be gone on other ranks
        observer.on_ddp_wrap(parent, observer is observers[-1])
    send_masters(parent, module, list(_TRAININGS), 0)
