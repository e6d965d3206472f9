"""The implementations of LOW ops on CPUs: autograd Functions whose every direction runs as a choice says.

All take tensors of the compute dtype and give the compute dtype, forward and backward, so that a choice never
changes a dtype, only last bits and time. `rounded` is fp32 arithmetic on the 16-bit values, its result
rounded: the numbers of a tensor core with fp32 accumulation. Autograd saves the 16-bit tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.casting.kernel_choice import Choice
from halfstep.torch_private import (
    DispatchKey,
    exclude_key,
    fused_attention_choice,
    is_key_excluded,
    not_compiled,
)

_aten: Any = torch.ops.aten
_F32 = torch.float32
_AUTOCAST = DispatchKey.AutocastCPU
_onednn: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_flash: Any = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_flash_backward: Any = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)

Grads = tuple[Tensor | None, ...]


@contextmanager
def _no_autocast() -> Generator[None]:
    """A backward runs in the dtypes it was made with, also where it is called inside a region."""
    before = is_key_excluded(_AUTOCAST)
    exclude_key(_AUTOCAST, True)
    try:
        yield
    finally:
        exclude_key(_AUTOCAST, before)


def has_onednn() -> bool:
    """Whether oneDNN's own linear layer can be called."""
    return _onednn is not None and torch.backends.mkldnn.is_available()


def has_flash() -> bool:
    """Whether this torch has its flash attention for CPUs, both directions."""
    return _flash is not None and _flash_backward is not None


# --- matrix products ---------------------------------------------------------------------------------------


def product(how: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, (n, k) by (k, m) or batches of them, both of `dtype`, rounded to `dtype` once."""
    if how == "native":
        return torch.matmul(a, b)
    wide_a, wide_b = a.to(_F32), b.to(_F32)
    if how == "onednn" and _onednn is not None and not torch.is_grad_enabled() and b.dim() == 2:
        return _onednn(wide_a, wide_b.t(), None, "none", [], "").to(dtype)
    return torch.matmul(wide_a, wide_b).to(dtype)


class Product(torch.autograd.Function):
    """a @ b for two matrices or two equal batches of matrices of one 16-bit dtype."""

    @staticmethod
    @not_compiled
    def forward(ctx: Any, a: Tensor, b: Tensor, choice: Choice) -> Tensor:
        """a: (..., n, k), b: (..., k, m); the result (..., n, m)."""
        ctx.save_for_backward(a, b)
        ctx.choice = choice
        return product(choice.forward, a, b, a.dtype)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """grad @ b^T and a^T @ grad, each as its direction says."""
        a, b = ctx.saved_tensors
        grad, choice = grad_outputs[0], ctx.choice
        with _no_autocast():
            to_a = product(choice.input, grad, b.mT, a.dtype) if ctx.needs_input_grad[0] else None
            to_b = product(choice.weight, a.mT, grad, a.dtype) if ctx.needs_input_grad[1] else None
        return to_a, to_b, None


def linear(how: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias, rounded once."""
    if how == "native":
        return F.linear(x, weight, bias)
    wide = None if bias is None else bias.to(_F32)
    if how == "onednn" and _onednn is not None:
        return _onednn(x.to(_F32), weight.to(_F32), wide, "none", [], "").to(x.dtype)
    return F.linear(x.to(_F32), weight.to(_F32), wide).to(x.dtype)


class Linear(torch.autograd.Function):
    """x @ weight^T + bias; x: (..., k), weight: (m, k), bias: (m,), the result (..., m)."""

    @staticmethod
    @not_compiled
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> Tensor:
        """All of one 16-bit dtype."""
        ctx.save_for_backward(x, weight)
        ctx.choice = choice
        return linear(choice.forward, x, weight, bias)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """The sum for the bias is taken in fp32."""
        x, weight = ctx.saved_tensors
        grad, choice, needs = grad_outputs[0], ctx.choice, ctx.needs_input_grad
        to_x = to_weight = to_bias = None
        with _no_autocast():
            rows = grad.reshape(-1, grad.shape[-1])
            if needs[0]:
                to_x = product(choice.input, rows, weight, x.dtype).reshape(x.shape)
            if needs[1]:
                to_weight = product(choice.weight, rows.t(), x.reshape(-1, x.shape[-1]), x.dtype)
            if needs[2]:
                to_bias = rows.sum(0, dtype=_F32).to(x.dtype)
        return to_x, to_weight, to_bias, None


# --- convolutions ------------------------------------------------------------------------------------------


class Geometry(NamedTuple):
    """What `aten::convolution` takes beside its tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def _last(t: Tensor) -> Tensor:
    """In channels_last, where it has images to lay out."""
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def _as_given(t: Tensor, like: Tensor) -> Tensor:
    """In the layout that a convolution of `like` alone would give."""
    if t.dim() != 4 or (like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()):
        return t
    return t.contiguous()


def convolve(how: str, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The convolution, rounded once."""
    dtype, given = x.dtype, x
    if how.startswith("rounded"):
        x, weight = x.to(_F32), weight.to(_F32)
        bias = None if bias is None else bias.to(_F32)
    if how.endswith("channels_last"):
        out = _aten.convolution(_last(x), _last(weight), bias, *geometry)
        return _as_given(out.to(dtype), given)
    return _aten.convolution(x, weight, bias, *geometry).to(dtype)


def convolve_backward(
    how: str, grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
) -> Grads:
    """The gradients that `mask` asks for (input, weight, bias), each rounded once.

    That of the input is no function of the input, nor that of the weight one of the weight: detached, they
    get no gradient of zeros where these are differentiated again.
    """
    x, weight = x if mask[1] else x.detach(), weight if mask[0] else weight.detach()
    dtype, given = x.dtype, x
    if how.startswith("rounded"):
        grad, x, weight = grad.to(_F32), x.to(_F32), weight.to(_F32)
    last = how.endswith("channels_last")
    if last:
        grad, x, weight = _last(grad), _last(x), _last(weight)
    sizes = [grad.shape[1]] if mask[2] else None
    found = _aten.convolution_backward(grad, x, weight, sizes, *geometry, mask)
    out = [t.to(dtype) if wanted else None for t, wanted in zip(found, mask, strict=True)]
    return tuple(_as_given(t, given) if last and t is not None else t for t in out)


class Convolution(torch.autograd.Function):
    """A convolution of any number of dimensions, transposed or not; x: (batch, channels, ...)."""

    @staticmethod
    @not_compiled
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, choice: Choice
    ) -> Tensor:
        """All of one 16-bit dtype."""
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.choice = geometry, choice
        return convolve(choice.forward, x, weight, bias, geometry)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """One call where both directions are made alike, else two."""
        x, weight = ctx.saved_tensors
        grad, choice, needs = grad_outputs[0], ctx.choice, ctx.needs_input_grad
        common = (grad, x, weight, ctx.geometry)
        to_x = to_weight = to_bias = None
        with _no_autocast():
            alike = choice.input == choice.weight and not torch.is_grad_enabled()
            if alike or not needs[0]:
                mask = list(needs[:3])
                to_x, to_weight, to_bias = convolve_backward(choice.weight, *common, mask)
            else:
                to_x = convolve_backward(choice.input, *common, [True, False, False])[0]
                if needs[1] or needs[2]:
                    mask = [False, needs[1], needs[2]]
                    _, to_weight, to_bias = convolve_backward(choice.weight, *common, mask)
        return to_x, to_weight, to_bias, None, None


# --- attention ---------------------------------------------------------------------------------------------


def attend(
    how: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any
) -> tuple[Tensor, Tensor]:
    """Torch's flash attention and the logarithms of its sums; with `rounded` in fp32 and rounded once."""
    dtype = q.dtype if how == "native" else _F32
    out, sums = _flash(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        0.0,
        causal,
        attn_mask=_added(mask, dtype),
        scale=scale,
    )
    return out.to(q.dtype), sums


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
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
    given = [grad, *low] if how == "native" else [t.to(_F32) for t in (grad, *low)]
    added = _added(mask, given[0].dtype)
    found = _flash_backward(*given, sums, 0.0, causal, attn_mask=added, scale=scale)
    return tuple(g.to(dtype) for g in found)


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
        """All but the mask of one 16-bit dtype; with `native` bit for bit torch's."""
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
        """All three gradients come of one kernel: the direction `input` says which."""
        q, k, v, out, sums, *mask = ctx.saved_tensors
        given = mask[0] if mask else None
        with _no_autocast():
            grads = attend_backward(
                ctx.choice.input, grad_outputs[0], (q, k, v, out, sums), given, ctx.causal, ctx.scale
            )
        return *grads, None, None, None, None


def uses_flash(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: bool, scale: Any) -> bool:
    """Whether torch itself would take its flash attention for these 16-bit tensors."""
    if not has_flash() or dropout or (mask is not None and mask.requires_grad):
        return False
    choice: Callable[..., int] = fused_attention_choice
    return choice(q, k, v, mask, dropout, causal, scale=scale) == 1
