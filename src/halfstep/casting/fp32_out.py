"""Products of 16-bit matrices that CUDA accumulates and gives out in fp32, never rounded.

`torch.mm(out_dtype=)` has no derivative and no CPU kernel: here is its derivative, the two products that a
16-bit product has. Where it does not run, `casts.py` rounds the inputs and multiplies in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from halfstep.torch_private import not_compiled


class _Product(torch.autograd.Function):
    """a @ b in fp32, for an (n, k) and a (k, m) matrix of one 16-bit dtype."""

    @staticmethod
    @not_compiled
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.mm(a, b, out_dtype=torch.float32)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradient is rounded to 16 bits once, so that its two products are as fast as those of LOW."""
        a, b = ctx.saved_tensors
        grad, (needs_a, needs_b) = grad_outputs[0].to(a.dtype), ctx.needs_input_grad
        return grad @ b.t() if needs_a else None, a.t() @ grad if needs_b else None


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if b.dim() != 2 or a.dim() < 2 or not a.numel() or not b.numel():
        return NotImplemented
    rows = a.reshape(-1, a.shape[-1])
    return _Product.apply(rows, b).reshape(*a.shape[:-1], b.shape[1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = _matmul(x, weight.t()) if weight.dim() == 2 else NotImplemented
    return out if bias is None or out is NotImplemented else out + bias.to(torch.float32)


PRODUCTS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"linear": _linear, "mm": _matmul, "matmul": _matmul}
)
"""By op: takes its 16-bit arguments; NotImplemented for shapes that it does not know."""
