"""Other data for a parameter or buffer under the same identity, gradients and shared memory with it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.convert.hooks import CastInputs, CastOutputs, CastToWeight, HookSwitch
from halfstep.convert.sharded import is_shard
from halfstep.policy.levels import LOW_DTYPES
from halfstep.torch_private import flat_weights, hooks_of, set_flat_weights, set_local_tensor
from halfstep.trees import is_wide_float


def own_tensors(module: nn.Module) -> list[tuple[str, str, Tensor]]:
    """Parameters and buffers of fp32 or wider: what each is, its name in the module, the tensor."""
    tensors: list[tuple[str, str, Tensor]] = []
    for what, store in (("parameter", module._parameters), ("buffer", module._buffers)):
        tensors += [(what, key, t) for key, t in store.items() if t is not None and is_wide_float(t)]
    return tensors


def cast_together(changing: Iterable[tuple[Tensor, torch.dtype]]) -> Generator[tuple[Tensor, Tensor]]:
    """Yield the cast data of each tensor; tensors that share memory share it afterwards too."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor, dtype in changing:
        place = id(tensor) if tensor.is_meta or is_shard(tensor) else tensor.data.untyped_storage().data_ptr()
        groups.setdefault((place or id(tensor), tensor.dtype, dtype), []).append(tensor)
    for (_, before, dtype), tensors in groups.items():
        if len(tensors) == 1 or tensors[0].is_meta or is_shard(tensors[0]):
            for tensor in tensors:
                yield tensor, tensor.data.to(dtype)
            continue
        whole = torch.empty(0, dtype=before, device=tensors[0].device).set_(tensors[0].data.untyped_storage())
        low = whole.to(dtype)
        for tensor in tensors:
            yield tensor, low.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def replace_data(tensor: Tensor, data: Tensor) -> None:
    """Give a parameter or buffer other data, and a gradient of that dtype, under the same identity."""
    if is_shard(tensor):
        tensor.grad = None
        set_local_tensor(tensor, data)
        return
    grad = tensor.grad if tensor.is_leaf else None
    if grad is None:
        tensor.data = data
        return
    tensor.grad = None
    tensor.data = data
    widened = tensor.grad_dtype is None and grad.dtype == torch.float32 and data.dtype != torch.float64
    tensor.grad = grad if widened else grad.to(data.dtype)


def stand_in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in another dtype; a parameter's knows for which one it stands."""
    wide = tensor.detach().to(dtype)
    if not isinstance(tensor, nn.Parameter):
        return wide
    parameter = nn.Parameter(wide, requires_grad=tensor.requires_grad)
    parameter._stands_for = tensor  # pyright: ignore[reportAttributeAccessIssue]
    return parameter


def refresh_flat(modules: Iterable[nn.Module]) -> None:
    """Have the recurrent layers among modules reread their weights."""
    for module in modules:
        if (flat := flat_weights(module)) is not None:
            set_flat_weights(module, [getattr(module, name, None) for name in flat[0]])


# ---- what no record of a conversion knows ----------------------------------------------------------------
# A model that `torch.load` reads whole, or one that was copied at a level without masters, has casts, and
# nothing that would take them back.


def undo_copy(model: nn.Module) -> bool:
    """Make such a copy an fp32 model without casts; false where it has none.

    Its values stay what they are: masters are the original's, so 16-bit tensors are widened, all of them.
    """
    powers = [power for module in model.modules() for power in powers_of(module) if power.on]
    for power in powers:
        power.on = False
    if powers:
        for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
            if tensor.dtype in LOW_DTYPES:
                replace_data(tensor, tensor.data.float())
        refresh_flat(model.modules())
    return bool(powers)


def powers_of(module: nn.Module) -> list[HookSwitch]:
    """What switches the casts at the edges of a module; one conversion has one, for those inside too."""
    hooks = (hook for hook_dict in hooks_of(module)[:2] for hook in hook_dict.values())
    return [hook.power for hook in hooks if isinstance(hook, CastInputs | CastOutputs | CastToWeight)]
