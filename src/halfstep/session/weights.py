"""The weights around a training: exact values that masters hold, and states that fit 16-bit weights."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from halfstep.convert.conversion import Conversion
from halfstep.distributed import local_of
from halfstep.optim.loading import HasMasters
from halfstep.optim.master_link import narrow_state
from halfstep.optim.masters import MasterWeights, holder_of
from halfstep.policy.levels import Level


def fit_states(level: Level, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give the states of torch optimizers without masters their weights' dtype, as torch's loading does."""
    if level.masters or level.param_role == "full":
        return
    for optimizer in (o for o in optimizers if holder_of(o) is None):
        for p, state in optimizer.state.items():
            if isinstance(p, Tensor) and p.is_floating_point():
                optimizer.state[p] = narrow_state(state, p.dtype)


@contextmanager
def exact_weights(
    models: Sequence[nn.Module],
    masters: Mapping[int, MasterWeights],
    conversions: Sequence[Conversion],
    holders: Sequence[HasMasters],
) -> Generator[None]:
    """Within, the models are in eval mode and compute with the fp32 masters, their conversions suspended.

    Weights that are set within are set for good.
    """
    modes = [(m, m.training) for model in models for m in model.modules()]
    with ExitStack() as stack:
        for one in masters.values():
            stack.enter_context(one.swap())
        for conversion in conversions:
            stack.enter_context(conversion.suspended())
        made = ((getattr(p, "_stands_for", None), p) for model in models for p in model.parameters())
        copies: dict[Tensor, Tensor] = {weight: copy for weight, copy in made if weight is not None}
        for holder in holders:
            for weight, value in holder.masters(copies.keys()).items():
                copies[weight].data.copy_(value)
        for model in models:
            model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
    for holder in holders:
        values = holder.masters(copies.keys())
        changed = [w for w, v in values.items() if not torch.equal(local_of(copies[w]), local_of(v))]
        holder.seed_masters({w: copies[w].detach() for w in changed})
