"""How many bytes training holds on one rank, of the tensors that `prepare` and a step make on meta.

No size is written here: weights are converted and states made as in training, of tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import UnsupportedError
from halfstep.optim import storage
from halfstep.optim.base import OnePassOptimizer
from halfstep.optim.compacted import Compact
from halfstep.optim.master_link import split_bounded
from halfstep.policy.levels import LOW_DTYPES, Level, level_of
from halfstep.policy.plan import Plan
from halfstep.session.precision import lower
from halfstep.session.prepare import apply_precision
from halfstep.session.steppers import goes_by_groups
from halfstep.trees import parameters_of


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank, by kind and at the peak of what one does with a run; `parameters`: of all ranks.

    `masters`: fp32 copies, or the bits that 16-bit weights lack. `gradients`: as the optimizer reads them. In
    `prepare`, `save` and `load` the largest tensor is there once more, in fp32. Activations come on top, and
    what `fully_shard` gathers for a while.
    """

    parameters: int
    weights: int
    masters: int
    states: int
    gradients: int
    at_rest: int
    prepare: int
    step: int
    save: int
    load: int


def footprint(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    level: str | Level,
    dtype: str | torch.dtype | None = None,
    plan: Plan | None = None,
    ranks: int = 1,
) -> Footprint:
    """Count what a rank holds of models on the meta device that `ranks` share by `fully_shard`; uses them up.

    Raises:
        UnsupportedError: an optimizer of torch's that cannot step without values.
    """
    params = list({p: None for model in models for p in model.parameters()})
    count = sum(p.numel() for p in params)
    for p in params if ranks > 1 else ():
        p.data = p.data[: -(-len(p) // ranks)] if p.dim() else p.data
    built, largest = _bytes_of_models(models), max((p.numel() * 4 for p in params), default=0)
    dtype = None if level_of(level)[0].compute_role == "full" else dtype or "bf16"
    precision = lower(level, dtype, None, plan, torch.device("meta"))
    one_pass = [o for o in optimizers if isinstance(o, OnePassOptimizer)]
    others = [o for o in optimizers if not isinstance(o, OnePassOptimizer)]
    theirs = [p for o in others for p in parameters_of(o) if p.requires_grad]
    states = _make_states(others) if precision.masters else 0
    if not (precision.masters and others and ranks > 1):  # else fp32 shards are the weights
        apply_precision(precision, models, one_pass, [], {})
    low = {p for p in theirs if precision.masters and p.dtype in LOW_DTYPES}
    late = states or _make_states(others)
    of_masters, early = _bytes_of_entries(one_pass)
    masters = 4 * sum(p.numel() for p in low) + of_masters
    compacted = [o for o in one_pass if isinstance(o, Compact)]
    _make_states(compacted)
    late += _bytes_of_entries(one_pass)[1] - early
    gradients = sum(p.numel() * p.element_size() for p in theirs)
    for o in others:  # which reads fp32 copies: all of them, or a part at a time
        mine = [p for p in parameters_of(o) if p in low]
        whole = 2 * sum(p.numel() for p in mine)
        part = 4 * max((sum(p.numel() for p in some) for some in split_bounded(mine)), default=0)
        gradients += part if goes_by_groups(o) else max(whole, part)
    for o in one_pass:  # released ones are there one at a time
        sizes = [p.numel() * (p.grad_dtype or p.dtype).itemsize for p in parameters_of(o) if p.requires_grad]
        gradients += max(sizes, default=0) if o.release else sum(sizes)
    widened = max((o.bytes_of_bucket() for o in compacted), default=0)
    prepared = (weights := _bytes_of_models(models)) + masters + early
    rest = prepared + late
    return Footprint(
        count, weights, masters, early + late, gradients, rest, max(built + largest, prepared),
        rest + gradients + widened, rest + largest, rest + largest,
    )  # fmt: skip


def _bytes_of_models(models: Sequence[nn.Module]) -> int:
    return _bytes({id(t): t for m in models for t in (*m.parameters(), *m.buffers())}.values())


def _bytes_of_entries(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[int, int]:
    """Return the bytes of masters and of states."""
    found = [
        (k in storage.MASTER_KEYS, t) for o in optimizers for e in o.state.values() for k, t in e.items()
    ]
    tensors = [(is_master, t) for is_master, t in found if isinstance(t, Tensor)]
    return _bytes(t for is_master, t in tensors if is_master), _bytes(
        t for is_master, t in tensors if not is_master
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _make_states(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Make the states of torch's optimizers for their parameters as they are; returns their bytes."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({key: False for key in ("fused", "foreach", "capturable") if key in group})
            for p in (p for p in group["params"] if p.requires_grad):
                p.grad = torch.empty_like(p)
        try:
            optimizer.step()
        except Exception as error:
            raise UnsupportedError(
                f"{type(optimizer).__name__} takes no step on tensors without values, by which states are "
                f"counted: name another one ({error})"
            ) from error
        optimizer.zero_grad()
    states: list[Any] = [t for o in optimizers for entry in o.state.values() for t in entry.values()]
    return _bytes(t for t in states if isinstance(t, Tensor))
