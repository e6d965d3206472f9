"""The exact fp32 weights of a model whose optimizer keeps their masters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.optim import storage
from halfstep.optim.base import OnePassOptimizer
from halfstep.optim.master_link import Master, weight_of


@torch.no_grad()
def fp32_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """The model's `state_dict` in fp32: parameters from their masters, exactly; 16-bit buffers widened.

    `optimizer` is one or several, of `halfstep.optim` or with `MasterWeights`; parameters without a master
    are cast from what the model has. New, detached tensors; integer and fp64 entries are copied as they are.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if any(not isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise ConfigError("fp32_state_dict takes a model and its optimizer, or several of them")
    masters: dict[Tensor, Tensor] = {}
    for each in optimizers:
        if isinstance(each, OnePassOptimizer):
            masters.update(each.masters())
        else:
            masters.update(_masters_of(each))
    named = dict(model.named_parameters(remove_duplicate=False))
    out: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            continue
        p = named.get(key)
        if p is not None and p in masters:
            out[key] = masters[p]
        elif value.dtype in storage.LOW_DTYPES:
            out[key] = value.detach().to(torch.float32)
        else:
            out[key] = value.detach().clone()
    return out


def _masters_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """Copies of a torch optimizer's masters by their 16-bit weight; empty where it has none."""
    masters = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Master)]
    for link in {owner for master in masters if (owner := master._owner()) is not None}:
        link.sync()
    return {weight_of(master): master.detach().clone() for master in masters}
