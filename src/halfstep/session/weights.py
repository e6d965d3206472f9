"""The weights around a training: exact values that masters hold, and states that fit 16-bit weights."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.convert.conversion import Conversion
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


def fill_stand_ins(models: Sequence[nn.Module], held: Mapping[Any, Mapping[Tensor, Tensor]]) -> None:
    """Give the widened copies of a suspended conversion the masters' values."""
    exact = {p: value for masters in held.values() for p, value in masters.items()}
    for parameter in (p for model in models for p in model.parameters()):
        original: Tensor | None = getattr(parameter, "_stands_for", None)
        if original is not None and original in exact:
            parameter.data.copy_(exact[original])


@contextmanager
def exact_weights(
    models: Sequence[nn.Module],
    masters: Mapping[int, MasterWeights],
    conversions: Sequence[Conversion],
    held: Mapping[Any, Mapping[Tensor, Tensor]],
) -> Generator[None]:
    """Within, the models are in eval mode and compute with the fp32 masters, their conversions suspended."""
    modes = [(m, m.training) for model in models for m in model.modules()]
    with ExitStack() as stack:
        for one in masters.values():
            stack.enter_context(one.swap())
        for conversion in conversions:
            stack.enter_context(conversion.suspended())
        fill_stand_ins(models, held)
        for model in models:
            model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
