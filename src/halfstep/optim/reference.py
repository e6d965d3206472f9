"""The step in plain torch: slow, short, and right; every device can run it and every kernel equals it.

No value is read back to the host: on an accelerator scale, clip factor and skip stay device scalars.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
    first: rounding.Int = 0,
    group: Mapping[str, Any] | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """What the tensors of `slot.kept` become in a step, and where a weight left the range of its master.

    The gradient is multiplied by `factor` first. `scalars`, the random `key` and where its elements begin
    (less what a whole tensor holds before them) are numbers, or tensors with one for each element. `group` is
    what algorithms of whole parameters go by. The second value is a 0-d bool tensor (exact fp16) or None.
    """
    g = slot.grad.to(torch.float32) * factor
    random = None
    if slot.state_kind != L.STATE_FP32 or slot.kind == L.BF16_STOCHASTIC:
        width = slot.width if slot.state_kind == L.STATE_8BIT else None
        random = rounding.random_bits(g.numel(), key, g.device, first, width)
    w = storage.read_weight(slot.kind, slot.weight, slot.extra)
    states = [storage.read_state(slot, i) for i in range(len(slot.states))]
    bounds = _bounds(algorithm, slot, w, g, scalars)
    about = (slot.param, group) if algorithm.whole else (scalars,)
    w, states = algorithm.update(w, g, states, *about)
    new = [storage.store_state(slot, i, v, random, bounds[i]) for i, v in enumerate(states)]
    again = rounding.again(random, key) if slot.kind == L.BF16_STOCHASTIC and random is not None else None
    weight, over = storage.store_weight(slot.kind, w, slot.weight.dtype, again)
    exponents = [fields for _, fields in new if fields is not None]
    return [*weight, *(state for state, _ in new), *exponents], over


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
    of_rows = tuple(
        s.view(-1, slot.width)[:, :1] if isinstance(s, Tensor) and s.dim() else s for s in scalars
    )
    return algorithm.bounds(old, rounding.peaks(g, slot.width), of_rows)
