"""The weights around a training: exact values that masters hold, and states that fit 16-bit weights."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.convert.conversion import Conversion
from halfstep.distributed import local_of
from halfstep.optim.base import OnePassOptimizer
from halfstep.optim.master_link import narrow_state
from halfstep.optim.masters import MasterWeights
from halfstep.policy.levels import Level


def fit_states(level: Level, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give the states of torch optimizers without masters their weights' dtype, as torch's loading does."""
    if level.masters or level.param_role == "full":
        return
    for optimizer in (o for o in optimizers if not isinstance(o, OnePassOptimizer)):
        for p, state in optimizer.state.items():
            if isinstance(p, Tensor) and p.is_floating_point():
                optimizer.state[p] = narrow_state(state, p.dtype)


def one_pass_masters(
    level: Level, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[Any, dict[Tensor, Tensor]]:
    """The exact fp32 weights that optimizers of `halfstep.optim` hold, by optimizer."""
    if not level.masters:
        return {}
    return {o: o.masters() for o in optimizers if isinstance(o, OnePassOptimizer)}


def stand_ins(
    models: Sequence[nn.Module], held: Mapping[Any, Mapping[Tensor, Tensor]]
) -> list[tuple[Tensor, Any, Tensor]]:
    """The widened copies of a suspended conversion: copy, its optimizer, its weight."""
    owners = {p: optimizer for optimizer, masters in held.items() for p in masters}
    copies = [(p, getattr(p, "_stands_for", None)) for model in models for p in model.parameters()]
    return [(p, owners[weight], weight) for p, weight in copies if weight is not None and weight in owners]


@contextmanager
def exact_weights(
    models: Sequence[nn.Module],
    masters: Mapping[int, MasterWeights],
    conversions: Sequence[Conversion],
    held: Mapping[Any, Mapping[Tensor, Tensor]],
) -> Generator[None]:
    """Within, the models are in eval mode and compute with the fp32 masters, their conversions suspended.

    Weights that are set within are set for good.
    """
    modes = [(m, m.training) for model in models for m in model.modules()]
    found = list[tuple[Tensor, Any, Tensor]]()
    with ExitStack() as stack:
        for one in masters.values():
            stack.enter_context(one.swap())
        for conversion in conversions:
            stack.enter_context(conversion.suspended())
        found = stand_ins(models, held)
        for copy, optimizer, weight in found:
            copy.data.copy_(held[optimizer][weight])
        for model in models:
            model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
    for copy, optimizer, weight in found:
        if not torch.equal(local_of(copy), local_of(held[optimizer][weight])):
            optimizer.seed_masters({weight: copy.detach()})
