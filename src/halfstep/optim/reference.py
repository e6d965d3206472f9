"""The step in plain torch: slow, short, and right; every device can run it and every kernel equals it.

No value is read back to the host: on an accelerator scale, clip factor and skip stay device scalars.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.kernels import codes as L
from halfstep.optim import rounding, storage
from halfstep.optim.algorithms import Algorithm, Number, Scalars


def update(
    algorithm: Algorithm,
    slot: storage.Slot,
    scalars: Scalars,
    factor: Number,
    key: rounding.Int,
    skip: Tensor | None,
) -> Tensor | None:
    """Update one parameter; where `skip` is a true tensor nothing changes.

    Its gradient is multiplied by `factor` first. Returns a 0-d bool tensor that is true where a weight left
    the range of its master (exact fp16), or None.
    """
    g = slot.grad.to(torch.float32) * factor
    old = [slot.weight, slot.extra, *slot.states, *slot.exponents]
    kept = [None if t is None else t.clone() for t in old] if skip is not None else []
    random = None
    if slot.state_kind != L.STATE_FP32 or slot.kind == L.BF16_STOCHASTIC:
        random = rounding.random_bits(g.numel(), key, g.device)
    w = storage.read_weight(slot.kind, slot.weight, slot.extra)
    states = [storage.read_state(slot, i) for i in range(len(slot.states))]
    bounds = _bounds(algorithm, slot, w, g, scalars)
    w, states = algorithm.update(w, g, states, scalars)
    for i, value in enumerate(states):
        storage.write_state(slot, i, value, random, bounds[i])
    again = rounding.again(random, key) if slot.kind == L.BF16_STOCHASTIC and random is not None else None
    over = storage.write_weight(slot.kind, w, slot.weight, slot.extra, again)
    if over is not None and skip is not None:
        over = over & ~skip
    for target, before in zip(old, kept):
        if target is not None and before is not None and skip is not None:
            target.copy_(torch.where(skip, before, target))
    return over


def _bounds(
    algorithm: Algorithm, slot: storage.Slot, w: Tensor, g: Tensor, scalars: Scalars
) -> Sequence[Tensor | None]:
    """Per state and block, how large its new values can get: known before they are, so one pass is enough."""
    if slot.state_kind != L.STATE_8BIT or not slot.states:
        return [None] * len(slot.states)
    old = [
        rounding.code_peaks(codes, exponents, signed=i == 0, width=slot.width)
        for i, (codes, exponents) in enumerate(zip(slot.states, slot.exponents))
    ]
    g = g if algorithm.decoupled else g + w * scalars[0]
    return algorithm.bounds(old, rounding.peaks(g, slot.width), scalars)
