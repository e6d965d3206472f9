"""One small call for every op in a table, so that what a device really does with it can be probed.

`SAMPLES[name](device, dtype)` gives a function and its arguments; floating arguments are in `dtype`. The
calls go through `torch.ops.aten`, so they reach the Autocast key under the tables' names. Import runs no op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from halfstep.policy.op_tables import IN_PLACE

Call = tuple[Callable[..., Any], tuple[Any, ...]]
Sample = Callable[[torch.device | str, torch.dtype], Call]


class _Make:
    """Makes small tensors of one dtype on one device; every maker takes a shape."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def t(self, *shape: int) -> Tensor:
        """Values in [-1, 1), never two alike."""
        return self.u(*shape) * 2 - 1

    def u(self, *shape: int) -> Tensor:
        """Values in (0, 1), never two alike."""
        count = max(1, torch.Size(shape).numel())
        values = (torch.arange(count, dtype=torch.float32) * 0.618034 + 0.3).remainder(1.0)
        return values.reshape(shape).to(device=self._device, dtype=self._dtype)

    def i(self, *shape: int) -> Tensor:
        """Indices 0, 1, 0, 1 ... in int64."""
        count = max(1, torch.Size(shape).numel())
        return (torch.arange(count) % 2).reshape(shape).to(self._device)

    def eye(self, n: int) -> Tensor:
        """Return a symmetric positive definite n x n matrix."""
        return torch.eye(n).to(device=self._device, dtype=self._dtype) * 2

    def sign(self, *shape: int) -> Tensor:
        """Values 1 and -1."""
        return (self.i(*shape) * 2 - 1).to(self._dtype)


def _rnn(gates: int) -> Callable[[_Make], tuple[Any, ...]]:
    def arguments(m: _Make) -> tuple[Any, ...]:
        weights = [m.t(gates * 4, 3), m.t(gates * 4, 4), m.t(gates * 4), m.t(gates * 4)]
        state: Any = [m.t(1, 2, 4), m.t(1, 2, 4)] if gates == 4 else m.t(1, 2, 4)
        return (m.t(5, 2, 3), state, weights, True, 1, 0.0, True, False, False)

    return arguments


def _cell(gates: int) -> Callable[[_Make], tuple[Any, ...]]:
    def arguments(m: _Make) -> tuple[Any, ...]:
        state: Any = [m.t(2, 4), m.t(2, 4)] if gates == 4 else m.t(2, 4)
        return (m.t(2, 3), state, m.t(gates * 4, 3), m.t(gates * 4, 4), m.t(gates * 4), m.t(gates * 4))

    return arguments


def _conv(dims: int, transposed: bool) -> Callable[[_Make], tuple[Any, ...]]:
    size = (4,) * dims
    kernel = (2, 3) if transposed else (3, 2)
    return lambda m: (m.t(1, 2, *size), m.t(*kernel, *(2,) * dims), m.t(3))


def _mkldnn_rnn(m: _Make) -> tuple[Any, ...]:
    weights = (m.t(16, 3), m.t(16, 4), m.t(16), m.t(16))
    return (m.t(5, 2, 3), *weights, m.t(2, 4), m.t(2, 4), False, [], 2, 4, 1, True, False, False, False)


def _cudnn_rnn(m: _Make) -> tuple[Any, ...]:
    weights = [m.t(16, 3), m.t(16, 4), m.t(16), m.t(16)]
    state = (m.t(1, 2, 4), m.t(1, 2, 4))
    return (m.t(5, 2, 3), weights, 4, None, *state, 2, 4, 0, 1, False, 0.0, True, False, [], None)


def _attention(m: _Make) -> tuple[Any, ...]:
    return (m.t(1, 1, 4, 8), m.t(1, 1, 4, 8), m.t(1, 1, 4, 8))


def _native_mha(m: _Make) -> tuple[Any, ...]:
    x = m.t(1, 3, 4)
    return (x, x, x, 4, 2, m.t(12, 4), m.t(12), m.t(4, 4), m.t(4))


def _pad(dims: int) -> Callable[[_Make], tuple[Any, ...]]:
    return lambda m: (m.t(1, 2, *(4,) * dims), [1, 1] * dims)


def _pool(dims: int) -> Callable[[_Make], tuple[Any, ...]]:
    return lambda m: (m.t(1, 2, *(4,) * dims), [2] * dims)


def _upsample(dims: int, *extra: Any) -> Callable[[_Make], tuple[Any, ...]]:
    return lambda m: (m.t(1, 2, *(3,) * dims), [6] * dims, *extra)


def _images(m: _Make, *filters: int) -> tuple[Any, ...]:
    return (m.t(1, 2, 4, 4), m.t(*filters, 2, 2))


def _full_convolution(m: _Make) -> tuple[Any, ...]:
    return (*_images(m, 3, 2), m.t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def _pivots(m: _Make) -> Tensor:
    """Return the pivots of a factorisation of three rows that swapped none."""
    return torch.arange(1, 4, dtype=torch.int32).to(m.t(1).device)


def _corners(m: _Make) -> Tensor:
    """Return where the largest of each quarter of a 4 x 4 image was, one channel."""
    return (m.i(1, 2, 2) * 2) + torch.tensor([[0], [8]]).to(m.t(1).device)


_ONE: Callable[[_Make], tuple[Any, ...]] = lambda m: (m.u(3, 4),)  # noqa: E731
_TWO: Callable[[_Make], tuple[Any, ...]] = lambda m: (m.t(3, 4), m.t(3, 4))  # noqa: E731
_MATRIX: Callable[[_Make], tuple[Any, ...]] = lambda m: (m.eye(3),)  # noqa: E731
_UNARY = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus relu "
    "sigmoid gelu sum mean prod nansum var std var_mean std_mean norm linalg_vector_norm linalg_norm "
    "pdist fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 "
    "fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft nuclear_norm linalg_matrix_norm"
)
_BINARY = (
    "heaviside dist cdist cosine_similarity mse_loss l1_loss smooth_l1_loss huber_loss kl_div atan2 add sub "
    "mul div eq equal ge gt le lt ne binary_cross_entropy_with_logits polar linalg_vecdot soft_margin_loss"
)
_MATRIX_OPS = (
    "cholesky cholesky_inverse inverse pinverse linalg_cond linalg_matrix_rank linalg_cholesky "
    "linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv geqrf _lu_with_info qr svd linalg_qr "
    "linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh linalg_inv_ex linalg_matrix_sqrth linalg_pinv "
    "trace matrix_exp linalg_matrix_exp"
)
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_UPSAMPLES_2D = "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa"
_ARGUMENTS: dict[str, Callable[[_Make], tuple[Any, ...]]] = {
    **dict.fromkeys(_UNARY.split(), _ONE),
    **dict.fromkeys(_BINARY.split(), _TWO),
    **dict.fromkeys(("dot", "vdot"), lambda m: (m.t(4), m.t(4))),
    **dict.fromkeys(_MATRIX_OPS.split(), _MATRIX),
    **{f"conv{d}d": _conv(d, False) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _conv(d, True) for d in (1, 2, 3)},
    **{f"reflection_pad{d}d": _pad(d) for d in (1, 2)},
    **{f"replication_pad{d}d": _pad(d) for d in (1, 2, 3)},
    **{
        f"{kind}_pool{d}d": _pool(d)
        for d in (1, 2, 3)
        for kind in ("max", "avg", "adaptive_avg", "adaptive_max")
    },
    **{f"upsample_nearest{d}d": _upsample(d) for d in (1, 2, 3)},
    **{f"_upsample_nearest_exact{d}d": _upsample(d) for d in (1, 2, 3)},
    "upsample_linear1d": _upsample(1, False),
    "upsample_trilinear3d": _upsample(3, False),
    **dict.fromkeys(_UPSAMPLES_2D.split(), _upsample(2, False)),
    "conv_tbc": lambda m: (m.t(4, 1, 2), m.t(2, 2, 3), m.t(3)),
    "convolution": _full_convolution,
    # The overload without allow_tf32 is the one that torch casts on every device.
    "_convolution": lambda m: (*_full_convolution(m), False, False, True),
    "cudnn_convolution": lambda m: (*_images(m, 3, 2), [0, 0], [1, 1], [1, 1], 1, False, False, True),
    "cudnn_convolution_transpose": lambda m: (
        *(*_images(m, 2, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, True),
    ),
    "linear": lambda m: (m.t(2, 3), m.t(4, 3), m.t(4)),
    **dict.fromkeys(("matmul", "mm"), lambda m: (m.t(2, 3), m.t(3, 4))),
    "bmm": lambda m: (m.t(1, 2, 3), m.t(1, 3, 4)),
    "baddbmm": lambda m: (m.t(1, 2, 4), m.t(1, 2, 3), m.t(1, 3, 4)),
    "addmm": lambda m: (m.t(2, 4), m.t(2, 3), m.t(3, 4)),
    "_addmm_activation": lambda m: (m.t(4), m.t(2, 3), m.t(3, 4)),
    "addbmm": lambda m: (m.t(2, 4), m.t(1, 2, 3), m.t(1, 3, 4)),
    "addmv": lambda m: (m.t(2), m.t(2, 3), m.t(3)),
    "addr": lambda m: (m.t(2, 3), m.t(2), m.t(3)),
    "mv": lambda m: (m.t(2, 3), m.t(3)),
    "einsum": lambda m: ("ij,jk->ik", [m.t(2, 3), m.t(3, 4)]),
    **dict.fromkeys(("chain_matmul", "linalg_multi_dot"), lambda m: ([m.t(2, 3), m.t(3, 4)],)),
    **dict.fromkeys(("scaled_dot_product_attention", "_scaled_dot_product_flash_attention"), _attention),
    "_native_multi_head_attention": _native_mha,
    **{name: _rnn(gates) for name, gates in _GATES.items()},
    **{f"{name}_cell": _cell(gates) for name, gates in _GATES.items()},
    "_thnn_fused_lstm_cell": lambda m: (m.t(2, 16), m.t(2, 16), m.t(2, 4)),
    "_thnn_fused_gru_cell": lambda m: (m.t(2, 12), m.t(2, 12), m.t(2, 4)),
    "mkldnn_rnn_layer": _mkldnn_rnn,
    "_cudnn_rnn": _cudnn_rnn,
    "prelu": lambda m: (m.t(2, 3), m.u(1)),
    "pow": lambda m: (m.u(3, 4), 2.5),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), lambda m: (m.t(3, 4), 0)),
    "logsumexp": lambda m: (m.t(3, 4), [0]),
    **dict.fromkeys(("softmax", "log_softmax"), lambda m: (m.t(3, 4), -1)),
    "frobenius_norm": lambda m: (m.t(3, 4), [0, 1]),
    "renorm": lambda m: (m.t(3, 4), 2.0, 0, 1.0),
    "layer_norm": lambda m: (m.t(3, 4), [4], m.u(4), m.t(4)),
    "native_layer_norm": lambda m: (m.t(3, 4), [4], m.u(4), m.t(4), 1e-5),
    "rms_norm": lambda m: (m.t(3, 4), [4], m.u(4)),
    "group_norm": lambda m: (m.t(3, 4), 2, m.u(4), m.t(4)),
    "batch_norm": lambda m: (m.t(3, 4), m.u(4), m.t(4), None, None, True, 0.1, 1e-5, False),
    "instance_norm": lambda m: (m.t(2, 4, 5), m.u(4), m.t(4), None, None, True, 0.1, 1e-5, False),
    **dict.fromkeys(("nll_loss", "cross_entropy_loss", "multi_margin_loss"), lambda m: (m.t(2, 4), m.i(2))),
    "nll_loss2d": lambda m: (m.t(2, 4, 3, 3), m.i(2, 3, 3)),
    "poisson_nll_loss": lambda m: (m.t(3, 4), m.u(3, 4), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda m: (m.t(3, 4), m.t(3, 4), m.sign(3)),
    "hinge_embedding_loss": lambda m: (m.t(3), m.sign(3)),
    "margin_ranking_loss": lambda m: (m.t(3), m.t(3), m.sign(3)),
    "multilabel_margin_loss": lambda m: (m.t(2, 4), m.i(2, 4)),
    "multilabel_margin_loss_forward": lambda m: (m.t(2, 4), m.i(2, 4), 1),
    "triplet_margin_loss": lambda m: (m.t(3, 4), m.t(3, 4), m.u(3, 4)),
    "ctc_loss": lambda m: (torch.log_softmax(m.t(6, 1, 3), -1), m.i(1, 2) + 1, [6], [2]),
    "binary_cross_entropy": lambda m: (m.u(3, 4), m.u(3, 4)),
    "cholesky_solve": lambda m: (m.t(3, 2), m.eye(3)),
    **dict.fromkeys(("linalg_solve", "linalg_solve_ex", "linalg_lstsq"), lambda m: (m.eye(3), m.t(3, 2))),
    **dict.fromkeys(("linalg_lu_solve", "linalg_ldl_solve"), lambda m: (m.eye(3), _pivots(m), m.t(3, 2))),
    "lu_solve": lambda m: (m.t(3, 2), m.eye(3), _pivots(m)),
    **dict.fromkeys(("orgqr", "linalg_householder_product"), lambda m: (m.eye(3), m.u(3))),
    "ormqr": lambda m: (m.eye(3), m.u(3), m.t(3, 2)),
    "linalg_tensorinv": lambda m: (m.eye(4), 1),
    "linalg_tensorsolve": lambda m: (m.eye(3), m.t(3)),
    "triangular_solve": lambda m: (m.t(3, 2), m.eye(3)),
    "stft": lambda m: (m.t(16), 8, None, None, torch.ones_like(m.t(8)), False, None, True),
    "istft": lambda m: (torch.ones(5, 4, dtype=torch.complex64).to(m.t(1).device), 8, 2, 8, m.u(8)),
    "view_as_complex": lambda m: (m.t(3, 2),),
    **dict.fromkeys(("quantile", "nanquantile"), lambda m: (m.t(12), 0.5)),
    "max_unpool2d": lambda m: (m.t(1, 1, 2, 2), _corners(m)[None], [4, 4]),
    "max_unpool3d": lambda m: (
        *(m.t(1, 1, 1, 2, 2), _corners(m)[None, None], [1, 4, 4], [1, 2, 2], [0, 0, 0]),
    ),
    "fractional_max_pool2d": lambda m: (m.t(1, 2, 4, 4), [2, 2], [2, 2], m.u(1, 2, 2)),
    "fractional_max_pool3d": lambda m: (m.t(1, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2], m.u(1, 2, 3)),
    "fake_quantize_per_tensor_affine": lambda m: (m.t(3, 4), 0.1, 0, 0, 255),
    **dict.fromkeys(
        ("grid_sampler", "grid_sampler_2d", "_grid_sampler_2d_cpu_fallback"),
        lambda m: (m.t(1, 2, 4, 4), m.t(1, 3, 3, 2), 0, 0, False),
    ),
    "grid_sampler_3d": lambda m: (m.t(1, 2, 4, 4, 4), m.t(1, 3, 3, 3, 3), 0, 0, False),
    **dict.fromkeys(("meshgrid", "cartesian_prod"), lambda m: ([m.t(2), m.t(3)],)),
    **dict.fromkeys(("cat", "stack"), lambda m: ([m.t(2, 3), m.t(2, 3)],)),
    "where": lambda m: (m.i(2, 3) > 0, m.t(2, 3), m.t(2, 3)),
    "index_put": lambda m: (m.t(3), [m.i(2)], m.t(2)),
    **dict.fromkeys(("index_copy", "index_add"), lambda m: (m.t(3, 4), 0, m.i(2), m.t(2, 4))),
    **dict.fromkeys(("scatter_add", "scatter"), lambda m: (m.t(3, 4), 0, m.i(2, 4), m.t(2, 4))),
    "scatter_reduce": lambda m: (m.t(3, 4), 0, m.i(2, 4), m.t(2, 4), "sum"),
    "index_reduce": lambda m: (m.t(3, 4), 0, m.i(2), m.t(2, 4), "amax"),
    "masked_scatter": lambda m: (m.t(2, 3), m.i(2, 3) > 0, m.t(2, 3)),
    "put": lambda m: (m.t(3), m.i(2), m.t(2)),
    "lerp": lambda m: (m.t(2, 3), m.t(2, 3), 0.5),
    "embedding_bag": lambda m: (m.t(3, 4), m.i(4), m.i(2) * 2, False, 0, False, m.t(4)),
    "addcdiv": lambda m: (m.t(3, 4), m.t(3, 4), m.u(3, 4)),
    "addcmul": lambda m: (m.t(3, 4), m.t(3, 4), m.t(3, 4)),
    "bilinear": lambda m: (m.t(2, 3), m.t(2, 4), m.t(5, 3, 4), m.t(5)),
    "cross": lambda m: (m.t(4, 3), m.t(4, 3), -1),
    "linalg_cross": lambda m: (m.t(4, 3), m.t(4, 3)),
    "tensordot": lambda m: (m.t(2, 3), m.t(3, 4), [1], [0]),
    "nanmean": _ONE,
}


def _sample(name: str) -> Sample:
    def call(device: torch.device | str, dtype: torch.dtype) -> Call:
        fn: Any = getattr(torch.ops.aten, name)
        return fn, _ARGUMENTS[name.removesuffix("_")](_Make(device, dtype))

    return call


SAMPLES: Mapping[str, Sample] = MappingProxyType(
    {name: _sample(name) for name in sorted((*_ARGUMENTS, *IN_PLACE.split()))}
)
