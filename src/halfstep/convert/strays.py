"""What no record of a conversion knows: copies of a converted model, and weights that came after.

A model that `torch.load` reads whole, or one that was copied at a level without masters, has casts, and
nothing that would take them back. A weight that `remove_parametrizations` makes of 16-bit ones is 16-bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn

from halfstep.convert.hooks import CastInputs, CastOutputs, Power
from halfstep.convert.in_place import refresh_flat
from halfstep.convert.sharded import is_shard
from halfstep.errors import HalfstepWarning
from halfstep.policy.levels import LOW_DTYPES
from halfstep.torch_private import hooks_of


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
        refresh_flat(module for module in model.modules() if isinstance(module, nn.RNNBase))
    return bool(powers)


def widen_newcomers(model: nn.Module, converted: Container[nn.Module], known: Iterable[Tensor]) -> None:
    """Make 16-bit parameters of converted modules fp32 that are none of those `known`, and say so.

    No master held what they lack. Modules that were appended later keep their dtype.
    """
    seen, found = {id(p) for p in known}, dict[str, Tensor]()
    for path, module in model.named_modules():
        for key, p in module._parameters.items() if module in converted else ():
            if p is not None and p.dtype in LOW_DTYPES and id(p) not in seen and not is_shard(p):
                found[f"{path}.{key}".lstrip(".")] = p
    for p in found.values():
        _widen(p)
    if found:
        warnings.warn(
            f"{', '.join(list(found)[:3])} came after the conversion, in 16 bits (remove_parametrizations, "
            "an assignment): fp32 now, with the 16-bit values, for no master is theirs. Call revert() first "
            "to make such a change in fp32",
            HalfstepWarning,
            stacklevel=4,
        )


def powers_of(module: nn.Module) -> list[Power]:
    """What switches the casts at the edges of a module; one conversion has one, for those inside too."""
    hooks = (hook for held in hooks_of(module)[:2] for hook in held.values())
    return [hook.power for hook in hooks if isinstance(hook, CastInputs | CastOutputs)]


def _widen(tensor: Tensor) -> None:
    if tensor.dtype in LOW_DTYPES:
        grad, tensor.grad = (tensor.grad, None) if tensor.is_leaf else (None, None)
        tensor.data = tensor.data.to(torch.float32)
        if grad is not None:
            tensor.grad = grad.to(torch.float32)
