"""`scaled_dot_product_attention` by torch's flash attention for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.casting.kinds.kind import (
    F32,
    Args,
    Candidates,
    Choice,
    Grads,
    Kind,
    OpCall,
    OpClass,
    argument,
    no_autocast,
    values_of,
    ways,
)
from halfstep.formats import parse_dtype
from halfstep.torch_private import fused_attention_choice, not_compiled

_aten: Any = torch.ops.aten
_flash: Any = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_flash_backward: Any = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def has_flash() -> bool:
    """Whether this torch has its flash attention for CPUs, both directions."""
    return _flash is not None and _flash_backward is not None


# --- implementations ---------------------------------------------------------------------------------------


def attend(
    how: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any
) -> tuple[Tensor, Tensor]:
    """Torch's flash attention and the logarithms of its sums; with `rounded` in fp32 and rounded once."""
    dtype = q.dtype if how == "native" else F32
    out, sums = _flash(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        0.0,
        causal,
        attn_mask=_additive_mask(mask, dtype),
        scale=scale,
    )
    return out.to(q.dtype), sums


def _additive_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as the flash kernels add it to the scores: in their dtype, -inf where a boolean one is off."""
    if mask is None or mask.dtype is not torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def attend_backward(
    how: str, grad: Tensor, saved: tuple[Tensor, ...], mask: Any, causal: bool, scale: Any
) -> Any:
    """The gradients of query, key and value; `saved`: these three, the output, the logarithms of the sums."""
    *low, sums = saved
    dtype = low[0].dtype
    inputs = [grad, *low] if how == "native" else [t.to(F32) for t in (grad, *low)]
    added = _additive_mask(mask, inputs[0].dtype)
    grads = _flash_backward(*inputs, sums, 0.0, causal, attn_mask=added, scale=scale)
    return tuple(g.to(dtype) for g in grads)


class Attention(torch.autograd.Function):
    """`scaled_dot_product_attention` without dropout: saves what torch's own node saves.

    query: (batch, heads, length, width); key, value: the same with a length of their own.
    """

    @staticmethod
    @not_compiled
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: Any,
        choice: Choice,
    ) -> Tensor:
        """Attend; all but the mask of one 16-bit dtype, with `native` bit for bit torch's."""
        out, sums = attend(choice.forward, q, k, v, mask, causal, scale)
        if mask is None:
            ctx.save_for_backward(q, k, v, out, sums)
        else:
            ctx.save_for_backward(q, k, v, out, sums, mask)
        ctx.causal, ctx.scale, ctx.choice = causal, scale, choice
        return out

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """Return all three gradients, by one kernel: the direction `input` says which."""
        q, k, v, out, sums, *mask = ctx.saved_tensors
        attn_mask = mask[0] if mask else None
        with no_autocast():
            grads = attend_backward(
                ctx.choice.input, grad_outputs[0], (q, k, v, out, sums), attn_mask, ctx.causal, ctx.scale
            )
        return *grads, None, None, None, None


def uses_flash(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: bool, scale: Any) -> bool:
    """Whether torch itself would take its flash attention for these 16-bit tensors."""
    if not has_flash() or dropout or (mask is not None and mask.requires_grad):
        return False
    choice: Callable[..., int] = fused_attention_choice
    return choice(q, k, v, mask, dropout, causal, scale=scale) == 1


# --- probes ------------------------------------------------------------------------------------------------

_LENGTHS = {"tiny": (16, 32), "small": (64, 32), "medium": (192, 32), "large": (512, 64)}


def _candidates(cls: OpClass, direction: str) -> Candidates:
    dtype = parse_dtype(cls.dtype)
    length, width = _LENGTHS[cls.size]
    shape = (4 if length < 100 else 1, 4, length, width)
    q, k, v, grad = (values_of(shape, dtype, seed) for seed in range(4))
    causal, names = cls.geometry == "causal", ("rounded", "native")
    if direction == "forward":
        return ways(names, attend, q, k, v, None, causal, None)
    saved = (q, k, v, *attend("native", q, k, v, None, causal, None))
    return ways(names, attend_backward, grad, saved, None, causal, None)


# --- how torch's op is read --------------------------------------------------------------------------------


def _read(
    args: Args,
    kwargs: Mapping[str, Any],
) -> OpCall | None:
    q, k, v = args[:3]
    dropout, causal = argument(args, 4, 0.0), argument(args, 5, False)
    scale = kwargs.get("scale")
    if kwargs.get("enable_gqa") or any(t.dim() != 4 for t in (q, k, v)) or q.shape[:2] != k.shape[:2]:
        return None

    def run(choice: Choice, low: Args, _: Mapping[str, Any]) -> Any:
        q, k, v, mask = low[0], low[1], low[2], argument(low, 3, None)
        if not uses_flash(q, k, v, mask, dropout, causal, scale):
            return NotImplemented
        if not torch.is_grad_enabled():
            return attend(choice.forward, q, k, v, mask, causal, scale)[0]
        return Attention.apply(q, k, v, mask, causal, scale, choice)

    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    work = float(q.shape[2] * k.shape[2] * q.shape[3])
    return OpCall("attention", "causal" if causal else "full", work, "i" if trained else "", run)


ATTENTION = Kind(
    geometries=("full", "causal"),
    limits=(3e4, 4e5, 4e6),
    probe=_candidates,
    readers={"aten::scaled_dot_product_attention": _read},
    one_backward=True,
)
