"""How an op computes in a 16-bit dtype that its device has no fast kernels for, at all or at its size.

Inputs are rounded to the dtype, the arithmetic is fp32, the output is rounded: the numbers of a tensor core
with fp32 accumulation, at the speed of fp32. Gradients are rounded where a native kernel would round them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_C: Any = torch._C
_aten: Any = torch.ops.aten
_autograd: Any = _C._autograd
_F32 = torch.float32


def _has_memory(t: torch.Tensor) -> bool:
    return type(t) is torch.Tensor and t.layout is torch.strided and t.numel() > 0


class SavedLow:
    """While it is entered, autograd saves the 16-bit tensor that an fp32 copy was made of, not the copy.

    Saved-tensor hooks that were set around it (checkpointing, offloading, counting) get the 16-bit tensor.
    """

    def __init__(self, compute: torch.dtype) -> None:
        self._compute = compute
        self._low: dict[int, torch.Tensor] = {}
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._on = False

    def __enter__(self) -> SavedLow:
        if torch.is_grad_enabled() and _autograd._saved_tensors_hooks_is_enabled():
            self._outer = _autograd._top_saved_tensors_default_hooks(True)
            _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._on = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            _autograd._pop_saved_tensors_default_hooks()

    def remember(self, wide: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Note that `wide` is `low` in fp32; returns `wide`. Tracers' fake tensors have no memory to save."""
        if self._on and _has_memory(wide) and wide.stride() == low.stride():
            self._low[wide.untyped_storage().data_ptr()] = low
        return wide

    def _pack(self, t: torch.Tensor) -> tuple[Any, torch.Tensor | None, int]:
        low = None
        if t.dtype is _F32 and _has_memory(t):
            low = self._low.get(t.untyped_storage().data_ptr())
        if low is None:
            keep = t.detach()
        else:
            place = low.storage_offset() + t.storage_offset()
            keep = low.detach().as_strided(t.size(), t.stride(), place)
        version = -1 if low is None else low._version
        if self._outer is None:
            return keep, low if low is None else keep, version
        return self._outer[0](keep), None, version

    def _unpack(self, packed: tuple[Any, torch.Tensor | None, int]) -> torch.Tensor:
        kept, watched, version = packed
        if watched is not None and watched._version != version:
            raise RuntimeError(
                "a 16-bit tensor needed for backward was changed in place after the op that used it; "
                "clone it before the change, or change it before the op"
            )
        tensor = kept if self._outer is None else self._outer[1](kept)
        return tensor.to(_F32) if version >= 0 else tensor


# --- linear layers on CPUs ---------------------------------------------------------------------------------

# Below this many multiplications the call itself costs more than the faster kernel saves.
_SMALLEST = 1 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_onednn: Callable[..., torch.Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def fits_linear(args: Sequence[Any]) -> bool:
    """Whether `linear` takes these arguments of `torch.nn.functional.linear`.

    It wants plain CPU tensors (none of a tracer's) of fitting shapes and products large enough to pay.
    """
    x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
    plain = all(a is None or (type(a) in _PLAIN and a.layout is torch.strided) for a in args)
    return (
        _onednn is not None
        and plain
        and torch.backends.mkldnn.is_available()
        and weight.dim() == 2
        and x.dim() > 1
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and x.numel() * weight.shape[0] >= _SMALLEST
        and not torch.compiler.is_compiling()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias for 16-bit CPU tensors of one dtype, by oneDNN's fp32 kernel, rounded once.

    x: (..., k); weight: (m, k); bias: (m,); the result: (..., m). On CPUs where MKL does not use the widest
    vectors, oneDNN's kernel is about twice as fast as the one torch chooses for fp32.
    """
    return _Linear.apply(x, weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if _onednn is None or torch.is_grad_enabled():
        return torch.nn.functional.linear(x, weight, bias)
    return _onednn(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """Saves the 16-bit inputs themselves, so that autograd's own checks and hooks see them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        wide_bias = None if bias is None else bias.to(_F32)
        return _product(x.to(_F32), weight.to(_F32), wide_bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        compute = x.dtype
        grad = grad_outputs[0].to(_F32)
        rows = grad.reshape(-1, grad.shape[-1])
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = _product(grad, weight.to(_F32).t()).to(compute)
        if ctx.needs_input_grad[1]:
            to_weight = _product(rows.t(), x.to(_F32).reshape(-1, x.shape[-1]).t()).to(compute)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            to_bias = rows.sum(0).to(compute)
        return to_x, to_weight, to_bias


# --- attention on CPUs -------------------------------------------------------------------------------------

# Torch's bf16 backward pays about 40 us for each head of each sample, whatever its length; fp32 does not.
# Measured on AVX512-BF16, bf16 time / fp32 time at length x width: 20 (16 x 32), 3.2 (128 x 32), 1.9
# (128 x 64), 1.3 (128 x 128), 1.15 (384 x 32), 1.0 (256 x 64), 0.95 (512 x 32), 0.6 (1024 x 64).
_LONGEST = 12288
_FLASH = 1
_choice: Callable[..., int] = vars(torch)["_fused_sdp_choice"]
_flash: Any = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_flash_backward: Any = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def fits_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether `attention` takes these arguments of `scaled_dot_product_attention`, and is faster.

    It wants plain 4-d CPU tensors of which one is trained, short sequences, no mask, and that torch would
    choose its flash kernel. Where the CPU has tiles for bf16 (AMX) nothing is known: torch's kernel stays.
    """
    given = (query, key, value)
    if attn_mask is not None or dropout_p or enable_gqa or torch.compiler.is_compiling():
        return False
    if any(type(t) not in _PLAIN or t.dim() != 4 or t.layout is not torch.strided for t in given):
        return False
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in given):
        return False
    longest = max(query.shape[2], key.shape[2]) * query.shape[3]
    return (
        longest <= _LONGEST
        and query.shape[0] * query.shape[1] >= 4
        and query.shape[:2] == key.shape[:2]
        and _flash_backward is not None
        and not torch.cpu._is_amx_tile_supported()
        and _choice(query, key, value, None, 0.0, is_causal, scale=scale) == _FLASH
    )


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` of bf16 CPU tensors: torch's own forward, backward in fp32, rounded.

    query: (batch, heads, length, width); key, value: the same with a length of their own; the result is as
    query. The forward and what it saves are bit for bit torch's; gradients are nearer to the exact ones.
    """
    return _Attention.apply(query, key, value, is_causal, scale)


class _Attention(torch.autograd.Function):
    """Saves what torch's own node saves."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, is_causal: bool, scale: Any) -> torch.Tensor:
        out, sums = _flash(query, key, value, 0.0, is_causal, scale=scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *low, sums = ctx.saved_tensors
        wide = [t.to(_F32) for t in (grad_outputs[0], *low)]
        grads = _flash_backward(*wide, sums, 0.0, ctx.is_causal, scale=ctx.scale)
        return *(g.to(low[0].dtype) for g in grads), None, None
