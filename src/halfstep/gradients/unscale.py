"""Divide the loss scale out of gradients in place, and find whether any was inf or NaN, in one pass.

A device may bring a kernel of its own for this (`devices.register`); elsewhere torch's kernel runs where it
exists and a plain implementation where not. No host synchronisation on accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from halfstep import devices
from halfstep.torch_private import stored_values, unscale_and_check
from halfstep.trees import all_finite, dense_values, home_device, move_to, multiply

_torch_kernel: Callable[[list[Tensor], Tensor, Tensor], None] = unscale_and_check


@torch.no_grad()
def unscale_(grads: Iterable[Tensor | None], inv_scale: Tensor) -> Tensor:
    """Multiply gradients by `inv_scale` in place; return a 0-d bool tensor: some gradient was not finite.

    The product is computed in float32 (float64 gradients: float64) and rounded to each gradient's dtype, so
    16-bit gradients may lose small values: with fp16 gradients the part below 2^-25 becomes 0 (keep fp32
    masters, or an optimizer with `one_pass`, to avoid it). Dtypes, devices, sparse and sharded gradients may
    be mixed. The answer lies on the first accelerator met.
    """
    gradients = [g.detach() for g in grads if g is not None]
    values = [_own_memory(g) for g in gradients]
    flags: list[Tensor] = []
    for device, dtype in dict.fromkeys((v.device, v.dtype) for v in values):
        group = [v for v in values if v.device == device and v.dtype == dtype]
        flag = torch.zeros((), dtype=torch.float32, device=device)
        _check_and_unscale(group, flag, move_to(inv_scale, device, torch.float32))
        flags.append(flag != 0)
        if dtype == torch.float16:  # a scale below 1 can lift a finite gradient over 65504
            flags.append(~all_finite(group))
    flags += [~all_finite(g) for g in gradients if g.is_sparse and not g.is_coalesced()]  # sums may overflow
    return any_of(flags)


def _own_memory(grad: Tensor) -> Tensor:
    """Return the gradient's own memory: duplicates of an uncoalesced sparse gradient stay apart."""
    return stored_values(grad) if grad.is_sparse else dense_values(grad)


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Return the OR of 0-d flags (bool or 0/1, on any devices) as one 0-d bool tensor."""
    if not flags:
        return torch.zeros((), dtype=torch.bool, device="cpu")
    if len(flags) == 1:
        return flags[0].reshape(()) != 0
    home = home_device(list(flags))
    return torch.stack([move_to(flag.reshape(()), home) != 0 for flag in flags]).any()


def _check_and_unscale(group: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    vendor = devices.declared(found_inf.device.type).finite_check
    if vendor is not None:
        vendor(group, found_inf, inv_scale)
        return
    try:
        _torch_kernel(group, found_inf, inv_scale)
    except NotImplementedError:
        plain_check_and_unscale(group, found_inf, inv_scale)


def plain_check_and_unscale(group: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Do what torch's kernel does with ordinary ops, for devices that have no such kernel."""
    found_inf.copy_(torch.maximum(found_inf, (~all_finite(group)).to(found_inf.dtype)))
    for grad in group:
        grad.copy_(multiply(grad, inv_scale, grad.dtype))
