"""An fp32 average of a prepared model's weights, in torch's own AveragedModel."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from halfstep.errors import ConfigError, UnsupportedError, show
from halfstep.optim.master_link import split_bounded
from halfstep.optim.masters import holders_of
from halfstep.outcome import Outcome


def start_average(session: Any, model: nn.Module, decay: float) -> AveragedModel:
    """Return the average that `Session.averaged` describes, which the session's steps update."""
    is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if not is_number or not 0 <= decay < 1:
        raise ConfigError(f"amp.averaged(decay={show(decay)}): expected a number from 0 up to below 1")
    if session.reverted:
        raise ConfigError("amp.averaged(): this session was reverted and takes no more steps: prepare() anew")
    if session.precision.stores_low and not session.precision.masters:
        raise UnsupportedError(
            f"{session.level.name} has no fp32 weights, and an average of 16-bit ones stands still "
            "where they change by less than half a unit: prepare at O2, or at O1"
        )
    with session.evaluating():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        average.update_parameters(model)  # its first update copies
    average.requires_grad_(False).eval()
    alive, source = weakref.ref(average), weakref.ref(model)

    def update(session: Any, outcome: Outcome) -> None:
        current, weights = alive(), source()
        if current is None or weights is None:
            session.listeners.remove(update)
        elif outcome.taken:
            _update(current, weights, session)

    session.listeners.append(update)
    return average


@torch.no_grad()
def _update(average: AveragedModel, model: nn.Module, session: Any) -> None:
    """Move an average towards the weights; their masters are there a bounded number at a time."""
    blend: Any = average.multi_avg_fn
    target = dict(zip(model.parameters(), average.module.parameters(), strict=True))
    for some in split_bounded(target):
        exact: dict[Tensor, Tensor] = {}
        for holder in holders_of(session.optimizers) if session.precision.masters else ():
            exact |= holder.masters({*some})
        blend([target[w] for w in some], [exact.get(w, w).to(target[w].dtype) for w in some], None)
    for old, new in zip(average.module.buffers(), model.buffers(), strict=True):
        if old.is_floating_point():
            blend([old], [new.to(old.dtype)], None)
        else:
            old.copy_(new)
    average.n_averaged += 1
