"""Linear layers, and products of matrices and of batches of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    needs_of,
    no_autocast,
    values_of,
    ways,
)
from halfstep.formats import parse_dtype
from halfstep.torch_private import not_compiled

_onednn: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def has_onednn() -> bool:
    """Whether oneDNN's own linear layer can be called."""
    return _onednn is not None and torch.backends.mkldnn.is_available()


# --- implementations ---------------------------------------------------------------------------------------


def product(how: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, (n, k) by (k, m) or batches of them, both of `dtype`, rounded to `dtype` once."""
    if how == "native":
        return torch.matmul(a, b)
    wide_a, wide_b = a.to(F32), b.to(F32)
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
        with no_autocast():
            to_a = product(choice.input, grad, b.mT, a.dtype) if ctx.needs_input_grad[0] else None
            to_b = product(choice.weight, a.mT, grad, a.dtype) if ctx.needs_input_grad[1] else None
        return to_a, to_b, None


def linear(how: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias, rounded once."""
    if how == "native":
        return F.linear(x, weight, bias)
    wide = None if bias is None else bias.to(F32)
    if how == "onednn" and _onednn is not None:
        return _onednn(x.to(F32), weight.to(F32), wide, "none", [], "").to(x.dtype)
    return F.linear(x.to(F32), weight.to(F32), wide).to(x.dtype)


class Linear(torch.autograd.Function):
    """x @ weight^T + bias; x: (..., k), weight: (m, k), bias: (m,), the result (..., m)."""

    @staticmethod
    @not_compiled
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> Tensor:
        """Compute the result; all arguments are of one 16-bit dtype."""
        ctx.save_for_backward(x, weight)
        ctx.choice = choice
        return linear(choice.forward, x, weight, bias)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """Return the gradients; the bias's is summed in fp32."""
        x, weight = ctx.saved_tensors
        grad, choice, needs = grad_outputs[0], ctx.choice, ctx.needs_input_grad
        to_x = to_weight = to_bias = None
        with no_autocast():
            rows = grad.reshape(-1, grad.shape[-1])
            if needs[0]:
                to_x = product(choice.input, rows, weight, x.dtype).reshape(x.shape)
            if needs[1]:
                to_weight = product(choice.weight, rows.t(), x.reshape(-1, x.shape[-1]), x.dtype)
            if needs[2]:
                to_bias = rows.sum(0, dtype=F32).to(x.dtype)
        return to_x, to_weight, to_bias, None


# --- probes ------------------------------------------------------------------------------------------------

_MATRICES = {
    "tiny": (32, 64, 32),
    "small": (128, 128, 128),
    "medium": (256, 256, 256),
    "large": (512, 512, 512),
}
BATCHES = {
    "matrices up to 64": {"tiny": (4, 16), "small": (64, 32), "medium": (384, 32), "large": (384, 56)},
    "matrices over 64": {"tiny": (1, 80), "small": (2, 112), "medium": (8, 128), "large": (8, 256)},
}


def _matrix_of(cls: OpClass) -> tuple[int, int, int]:
    """n, k and m of a product."""
    n, k, m = _MATRICES[cls.size]
    if cls.geometry == "thin":
        side = {"tiny": 96, "small": 512}.get(cls.size, 1536)
        return 4, side, side
    return n, k, m


def _linear_probe(cls: OpClass, direction: str) -> Candidates:
    dtype = parse_dtype(cls.dtype)
    n, k, m = _matrix_of(cls)
    x, weight, grad = values_of((n, k), dtype, 1), values_of((m, k), dtype, 2), values_of((n, m), dtype, 3)
    names = ["rounded", *(["onednn"] if has_onednn() else []), "native"]
    if direction == "forward":
        return ways(names, linear, x, weight, None)
    a, b = (grad, weight) if direction == "input" else (grad.t(), x)
    return ways(names, product, a, b, dtype)


def _batch_probe(cls: OpClass, direction: str) -> Candidates:
    """Batches of square matrices."""
    dtype = parse_dtype(cls.dtype)
    count, n = BATCHES[cls.geometry][cls.size]
    a, b, grad = (values_of((count, n, n), dtype, seed) for seed in (1, 2, 3))
    left, right = {"forward": (a, b), "input": (grad, b.mT), "weight": (a.mT, grad)}[direction]
    return ways(("rounded", "native"), product, left, right, dtype)


def _linear_layer(cls: OpClass) -> tuple[Callable[..., Tensor], list[Tensor]]:
    n, k, m = _matrix_of(cls)
    return F.linear, [values_of(shape, F32, seed) for seed, shape in enumerate(((n, k), (m, k), (m,)), 1)]


def _batch_layer(cls: OpClass) -> tuple[Callable[..., Tensor], list[Tensor]]:
    count, n = BATCHES[cls.geometry][cls.size]
    return torch.matmul, [values_of((count, n, n), F32, seed) for seed in (1, 2)]


# --- how torch's ops are read ------------------------------------------------------------------------------


def _read_linear(args: Args, kwargs: Mapping[str, Any]) -> OpCall | None:
    x, weight, bias = args[0], args[1], argument(args, 2, None)
    fits = weight.dim() == 2 and x.dim() > 1 and x.shape[-1] == weight.shape[1]
    if not fits or not (bias is None or bias.shape == weight.shape[:1]):
        return None
    rows = x.numel() // x.shape[-1]

    def run(choice: Choice, low: Args, _: Mapping[str, Any]) -> Any:
        bias = low[2] if len(low) > 2 else None
        if not torch.is_grad_enabled():
            return linear(choice.forward, low[0], low[1], bias)
        return Linear.apply(low[0], low[1], bias, choice)

    return OpCall("linear", _thin(rows), rows * weight.numel(), needs_of(x, weight), run)


def _thin(rows: int) -> str:
    return "thin" if rows < 8 else "plain"


def _multiply(choice: Choice, a: Tensor, b: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return product(choice.forward, a, b, a.dtype)
    return Product.apply(a, b, choice)


def _read_product(args: Args, kwargs: Mapping[str, Any]) -> OpCall | None:
    """Of matrices or batches of them; a batch by one matrix is one product of all its rows."""
    a, b = args[0], args[1]
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2] or (a.dim() == 2 and b.dim() > 2):
        return None
    n, k, m = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.dim() == 2:
        rows = a.numel() // k

        def run_rows(choice: Choice, low: Args, _: Mapping[str, Any]) -> Any:
            if low[0].dim() == 2:
                return _multiply(choice, low[0], low[1])
            out = _multiply(choice, low[0].reshape(-1, k), low[1])
            return out.reshape(*low[0].shape[:-1], m)

        return OpCall("linear", _thin(rows), rows * k * m, needs_of(a, b), run_rows)
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        return None

    def run_batch(choice: Choice, low: Args, _: Mapping[str, Any]) -> Any:
        if low[0].dim() == low[1].dim() == 3 and low[0].shape[0] == low[1].shape[0]:
            return _multiply(choice, low[0], low[1])
        left = low[0].expand(*batch, n, k).reshape(-1, n, k)
        right = low[1].expand(*batch, k, m).reshape(-1, k, m)
        return _multiply(choice, left, right).reshape(*batch, n, m)

    geometry = "matrices up to 64" if n * k * m <= 64**3 else "matrices over 64"
    return OpCall("bmm", geometry, math.prod(batch) * n * k * m, needs_of(a, b), run_batch)


LINEAR = Kind(
    geometries=("plain", "thin"),
    limits=(4e5, 6e6, 5e7),
    probe=_linear_probe,
    readers={"aten::linear": _read_linear, "aten::mm": _read_product},
    stands_for=(
        *("addmm", "_addmm_activation", "chain_matmul", "linalg_multi_dot", "mv", "addmv", "addr"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    ),
    layer=_linear_layer,
)
BATCH = Kind(
    geometries=tuple(BATCHES),
    limits=LINEAR.limits,
    probe=_batch_probe,
    readers={"aten::matmul": _read_product, "aten::bmm": _read_product},
    stands_for=("baddbmm", "addbmm", "einsum"),
    layer=_batch_layer,
)
