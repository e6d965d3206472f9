"""Products of 16-bit matrices that are accumulated and given out in fp32, never rounded.

Their gradient is rounded to 16 bits once, so that its two products are as fast as those of LOW. On CUDA the
forward is `torch.mm(out_dtype=)`, which has no derivative and no CPU kernel; on a CPU it is an fp32 product
of widened inputs. What does not fit here is rounded and multiplied in fp32 by `casts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.casting.kinds.kind import F32, Choice, no_autocast
from halfstep.casting.kinds.products import product
from halfstep.torch_private import not_compiled


class _Product(torch.autograd.Function):
    """a @ b in fp32, for an (n, k) and a (k, m) matrix of one 16-bit dtype."""

    @staticmethod
    @not_compiled
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.mm(a, b, out_dtype=F32)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of a and b, in their dtype."""
        a, b = ctx.saved_tensors
        grad, (needs_a, needs_b) = grad_outputs[0].to(a.dtype), ctx.needs_input_grad
        return grad @ b.t() if needs_a else None, a.t() @ grad if needs_b else None


class _WidenedLinear(torch.autograd.Function):
    """x @ weight^T in fp32, for (..., k) and (m, k) of one 16-bit dtype; gradients by kernels of a choice."""

    @staticmethod
    @not_compiled
    def forward(ctx: Any, x: Tensor, weight: Tensor, choice: Choice) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.choice = choice
        return F.linear(x.to(F32), weight.to(F32))

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Gradients of x and weight, in their dtype."""
        x, weight = ctx.saved_tensors
        (needs_x, needs_weight, _), dtype = ctx.needs_input_grad, x.dtype
        grad = grad_outputs[0].reshape(-1, weight.shape[0]).to(dtype)
        to_x = to_weight = None
        with no_autocast():
            if needs_x:
                to_x = product(ctx.choice.input, grad, weight, dtype).reshape(x.shape)
            if needs_weight:
                to_weight = product(ctx.choice.weight, grad.t(), x.reshape(-1, x.shape[-1]), dtype)
        return to_x, to_weight, None


def _matmul(choice: Choice | None, a: Tensor, b: Tensor) -> Tensor:
    if b.dim() != 2 or a.dim() < 2 or not a.numel() or not b.numel():
        return NotImplemented
    if choice is not None:
        return _WidenedLinear.apply(a, b.t(), choice)
    rows = a.reshape(-1, a.shape[-1])
    return _Product.apply(rows, b).reshape(*a.shape[:-1], b.shape[1])


def _linear(choice: Choice | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = _matmul(choice, x, weight.t()) if weight.dim() == 2 else NotImplemented
    return out if bias is None or out is NotImplemented else out + bias.to(F32)


PRODUCTS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"linear": _linear, "mm": _matmul, "matmul": _matmul}
)
"""By op: takes a CPU's choice of kernels, None on CUDA, and the op's 16-bit arguments; NotImplemented for
shapes that it does not know."""
