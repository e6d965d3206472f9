"""Bare `autocast()`, torch's CUDA form, where there is no CUDA: torch's documented CUDA lists, op by op.

The lists are those of torch's page "CUDA Ops that can autocast"; binary ops promote as everywhere.
"""

import pytest
import torch
import torch.nn.functional as F

from halfstep.compat import torch_amp
from halfstep.compat.torch_amp import autocast
from halfstep.errors import BannedOpError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA"),
    pytest.mark.filterwarnings("ignore:autocast for CUDA, but CUDA is not available"),
    pytest.mark.filterwarnings("ignore:Using torch.cross without specifying"),
]
FP16, FP32 = torch.float16, torch.float32
torch.manual_seed(0)
M, V, B = torch.rand(4, 4) + 0.5, torch.rand(4) + 0.5, torch.rand(2, 4, 4) + 0.5
H = {key: value.half() for key, value in {"M": M, "V": V, "B": B}.items()}
IMAGE, VOLUME, LINE = torch.rand(1, 4, 6, 6), torch.rand(1, 4, 5, 5, 5), torch.rand(1, 4, 8)
K1, K2, K3 = torch.rand(4, 4, 3), torch.rand(4, 4, 3, 3), torch.rand(4, 4, 3, 3, 3)
CLASSES = torch.tensor([0, 1, 2, 3])

TO_FP16 = {
    "__matmul__": lambda: M @ M,
    "addbmm": lambda: torch.addbmm(M, B, B),
    "addmm": lambda: torch.addmm(M, M, M),
    "addmv": lambda: torch.addmv(V, M, V),
    "addr": lambda: torch.addr(M, V, V),
    "baddbmm": lambda: torch.baddbmm(B, B, B),
    "bmm": lambda: torch.bmm(B, B),
    "chain_matmul": lambda: torch.linalg.multi_dot([M, M, M]),
    "multi_dot": lambda: torch.linalg.multi_dot([M, M]),
    "conv1d": lambda: F.conv1d(LINE, K1),
    "conv2d": lambda: F.conv2d(IMAGE, K2),
    "conv3d": lambda: F.conv3d(VOLUME, K3),
    "conv_transpose1d": lambda: F.conv_transpose1d(LINE, K1),
    "conv_transpose2d": lambda: F.conv_transpose2d(IMAGE, K2),
    "conv_transpose3d": lambda: F.conv_transpose3d(VOLUME, K3),
    "GRUCell": lambda: torch.nn.GRUCell(4, 4)(M),
    "linear": lambda: F.linear(M, M),
    "LSTMCell": lambda: torch.nn.LSTMCell(4, 4)(M)[0],
    "matmul": lambda: torch.matmul(B, M),
    "mm": lambda: torch.mm(M, M),
    "mv": lambda: torch.mv(M, V),
    "prelu": lambda: F.prelu(M, V[:1]),
    "RNNCell": lambda: torch.nn.RNNCell(4, 4)(M),
}
TO_FP32 = {
    "__pow__": lambda m, v, b: m**2,
    "__rdiv__": lambda m, v, b: 2.0 / m,
    "__rpow__": lambda m, v, b: 2.0**m,
    "acos": lambda m, v, b: torch.acos(m * 0.1),
    "asin": lambda m, v, b: torch.asin(m * 0.1),
    "binary_cross_entropy_with_logits": lambda m, v, b: F.binary_cross_entropy_with_logits(m, m * 0.5),
    "cosh": lambda m, v, b: torch.cosh(m),
    "cosine_embedding_loss": lambda m, v, b: F.cosine_embedding_loss(m, m, torch.ones(4)),
    "cdist": lambda m, v, b: torch.cdist(m, m),
    "cosine_similarity": lambda m, v, b: F.cosine_similarity(m, m),
    "cross_entropy": lambda m, v, b: F.cross_entropy(m, CLASSES),
    "cumprod": lambda m, v, b: torch.cumprod(m, 0),
    "cumsum": lambda m, v, b: torch.cumsum(m, 0),
    "dist": lambda m, v, b: torch.dist(m, m * 2),
    "erfinv": lambda m, v, b: torch.erfinv(m * 0.1),
    "exp": lambda m, v, b: torch.exp(m),
    "expm1": lambda m, v, b: torch.expm1(m),
    "group_norm": lambda m, v, b: F.group_norm(b, 2),
    "hinge_embedding_loss": lambda m, v, b: F.hinge_embedding_loss(v, torch.ones(4)),
    "kl_div": lambda m, v, b: F.kl_div(m, m, reduction="batchmean"),
    "l1_loss": lambda m, v, b: F.l1_loss(m, m * 2),
    "layer_norm": lambda m, v, b: F.layer_norm(m, (4,)),
    "log": lambda m, v, b: torch.log(m),
    "log10": lambda m, v, b: torch.log10(m),
    "log_softmax": lambda m, v, b: F.log_softmax(m, -1),
    "log1p": lambda m, v, b: torch.log1p(m),
    "log2": lambda m, v, b: torch.log2(m),
    "margin_ranking_loss": lambda m, v, b: F.margin_ranking_loss(v, v * 2, torch.ones(4)),
    "mse_loss": lambda m, v, b: F.mse_loss(m, m * 2),
    "multilabel_margin_loss": lambda m, v, b: F.multilabel_margin_loss(v, torch.tensor([0, 1, -1, 0])),
    "multi_margin_loss": lambda m, v, b: F.multi_margin_loss(m, CLASSES),
    "nll_loss": lambda m, v, b: F.nll_loss(m, CLASSES),
    "norm": lambda m, v, b: torch.norm(m),
    "normalize": lambda m, v, b: F.normalize(m.float()),
    "pdist": lambda m, v, b: F.pdist(m),
    "poisson_nll_loss": lambda m, v, b: F.poisson_nll_loss(m, m),
    "pow": lambda m, v, b: torch.pow(m, 3.0),
    "prod": lambda m, v, b: torch.prod(m),
    "reciprocal": lambda m, v, b: torch.reciprocal(m),
    "rsqrt": lambda m, v, b: torch.rsqrt(m),
    "sinh": lambda m, v, b: torch.sinh(m),
    "smooth_l1_loss": lambda m, v, b: F.smooth_l1_loss(m, m * 2),
    "soft_margin_loss": lambda m, v, b: F.soft_margin_loss(m, torch.ones(4, 4)),
    "softmax": lambda m, v, b: F.softmax(m, -1),
    "softmin": lambda m, v, b: F.softmin(m, -1),
    "softplus": lambda m, v, b: F.softplus(m),
    "sum": lambda m, v, b: torch.sum(m),
    "renorm": lambda m, v, b: torch.renorm(m, 1, 0, 2),
    "tan": lambda m, v, b: torch.tan(m),
    "triplet_margin_loss": lambda m, v, b: F.triplet_margin_loss(m, m * 2, m * 3),
}
TO_WIDEST = {
    "addcdiv": lambda low, full: torch.addcdiv(low, full, low),
    "addcmul": lambda low, full: torch.addcmul(low, full, low),
    "atan2": lambda low, full: torch.atan2(low, full),
    "bilinear": lambda low, full: F.bilinear(low, full, torch.ones(3, 4, 4)),
    "cross": lambda low, full: torch.cross(low[:, :3], full[:, :3]),
    "dot": lambda low, full: torch.dot(low[0], full[0]),
    "grid_sample": lambda low, full: F.grid_sample(
        low.view(1, 1, 4, 4), full[:, :2].view(1, 2, 2, 2), align_corners=False
    ),
    "index_put": lambda low, full: torch.index_put(low, (torch.tensor([0]),), full[:1]),
    "scatter_add": lambda low, full: torch.scatter_add(full, 0, torch.zeros(1, 4, dtype=torch.long), low[:1]),
    "tensordot": lambda low, full: torch.tensordot(low, full, 1),
    "cat": lambda low, full: torch.cat([low, full]),
    "stack": lambda low, full: torch.stack([low, full]),
    "add": lambda low, full: low + full,
}
AS_GIVEN = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "mean": lambda x: x.mean(),
    "max_pool2d": lambda x: F.max_pool2d(x.view(1, 1, 4, 4), 2),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x.view(1, 1, 1, 4, 4), 1),
    "reflection_pad1d": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "trace": torch.trace,
}


@pytest.mark.parametrize("op", TO_FP16)
def test_ops_that_autocast_to_fp16(op):
    with autocast():
        assert TO_FP16[op]().dtype == FP16


@pytest.mark.parametrize("op", TO_FP32)
def test_ops_that_autocast_to_fp32(op):
    with autocast():
        got = TO_FP32[op](*H.values())
    assert got.dtype == FP32
    expected = TO_FP32[op](*(value.float() for value in H.values()))
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("op", TO_WIDEST)
def test_ops_that_promote_to_the_widest(op):
    with autocast():
        assert TO_WIDEST[op](H["M"], M).dtype == FP32


@pytest.mark.parametrize("op", AS_GIVEN)
def test_ops_on_no_list_run_in_what_they_are_given(op):
    """Also those that torch's CPU list names: a region of CUDA's form does what it does on CUDA."""
    try:
        AS_GIVEN[op](H["M"])
    except NotImplementedError:
        pytest.skip(f"torch {torch.__version__} has no fp16 kernel of {op}")
    with autocast():
        assert AS_GIVEN[op](H["M"]).dtype == FP16
        assert AS_GIVEN[op](M).dtype == FP32


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_run_in_fp16_as_on_cuda(kind):
    with autocast():
        assert kind(4, 4)(torch.ones(3, 2, 4))[0].dtype == FP16


def test_a_torch_device_names_its_type():
    with autocast(torch.device("cpu")):
        assert torch.mm(M, M).dtype == torch.bfloat16


def test_binary_cross_entropy_is_banned():
    with autocast(), pytest.raises(BannedOpError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(H["M"] * 0.5, H["M"] * 0.5)


@pytest.mark.parametrize("op", ["exp", "sum", "pow", "cumsum", "norm"])
def test_a_layers_output_stays_finite_where_cuda_keeps_it(op):
    big = {
        "exp": torch.exp,
        "sum": lambda x: x.repeat(4096).sum(),
        "pow": lambda x: x.pow(5),
        "cumsum": lambda x: x.repeat(8192).cumsum(0),
        "norm": lambda x: (x * 100).repeat(64).norm(),
    }
    with autocast():
        out = F.linear(torch.full((1, 4), 4.0), torch.full((4, 4), 0.8))[0]
        assert out.dtype == FP16
        assert big[op](out).isfinite().all()


@pytest.mark.parametrize("form", [lambda: autocast("cuda"), lambda: torch_amp._CudaAutocast()])
def test_every_cuda_form_carries_the_list(form):
    with form():
        assert H["M"].exp().dtype == FP32
        assert F.pad(H["M"], (1, 1), mode="reflect").dtype == FP16
