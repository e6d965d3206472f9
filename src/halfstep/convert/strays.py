"""Copies of a converted model that no record knows: loaded whole by `torch.load`, or copied at a level
without masters. Their casts came along, what would take them back did not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.convert.hooks import CastInputs, CastOutputs, Power, set_flat_weights
from halfstep.policy.levels import LOW_DTYPES


def undo_copy(model: nn.Module) -> bool:
    """Make such a copy an fp32 model without casts; false where it has none.

    Its values stay what they are: masters are the original's, so 16-bit tensors are widened, all of them.
    """
    powers = [power for module in model.modules() for power in powers_of(module) if power.on]
    for power in powers:
        power.on = False
    if powers:
        for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
            _widen(tensor)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                set_flat_weights(module, [getattr(module, name, None) for name in module._flat_weights_names])
    return bool(powers)


def powers_of(module: nn.Module) -> list[Power]:
    """What switches the casts at the edges of a module; one conversion has one, for those inside too."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook.power for hook in hooks if isinstance(hook, CastInputs | CastOutputs)]


def _widen(tensor: Tensor) -> None:
    if tensor.dtype in LOW_DTYPES:
        grad, tensor.grad = (tensor.grad, None) if tensor.is_leaf else (None, None)
        tensor.data = tensor.data.to(torch.float32)
        if grad is not None:
            tensor.grad = grad.to(torch.float32)
