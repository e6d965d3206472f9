"""Gradients of normalisations and tables: summed in fp32 and rounded once, by every way to call them."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.compat import torch_amp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 2**-8, FP16: 2**-11}
USES = 8192
INDEX = torch.arange(USES) % 3
BELOW_0 = INDEX - 2


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm())


def gradients(f: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = f(*tensors)
    torch.manual_seed(1)
    upstream = (torch.rand(out.shape) + 0.25).to(BF16).to(out.dtype)
    return list(torch.autograd.grad(out, tensors, upstream))


def check(
    f: Callable[..., Tensor],
    in_region: Callable[..., Tensor],
    tensors: list[Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Gradients in the region equal those in fp64 of the same values but for one rounding (to `dtype`)."""
    leaves = [t.requires_grad_() for t in tensors]
    exact = gradients(f, [t.detach().double().requires_grad_() for t in leaves])
    for t, got, right in zip(leaves, gradients(in_region, leaves), exact, strict=True):
        assert got.dtype is t.dtype
        assert error(got, right) < 2 * ROUNDING[dtype or t.dtype]


NORMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), (USES, 8)),
    "layer_norm of two": (
        lambda x, w, b: F.layer_norm(x, (2, 4), w.reshape(2, 4), b.reshape(2, 4)),
        (USES, 2, 4),
    ),
    "native_layer_norm": (lambda x, w, b: torch.native_layer_norm(x, w.shape, w, b, 1e-5)[0], (USES, 8)),
    "no bias": (lambda x, w, b: F.layer_norm(x, w.shape, w) + b, (USES, 8)),
    "module": (
        lambda x, w, b: torch.func.functional_call(
            nn.LayerNorm(8), {"weight": w.to(w.dtype), "bias": b.to(b.dtype)}, x
        ),
        (USES, 8),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (2, 8, USES)),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        (USES, 8, 1, 1),
    ),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), (2, 8, USES)),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, (8,), w) + b, (USES, 8)),
}


def region(how: str, dtype: torch.dtype, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*tensors: Tensor) -> Tensor:
        manager = {
            "O1": lambda: hs.autocast("cpu", dtype),
            "O3": lambda: hs.autocast("cpu", dtype, policy="low"),
            "native": lambda: hs.autocast("cpu", dtype, kernels="native"),
            "rounded": lambda: hs.autocast("cpu", dtype, kernels="rounded"),
            "table torch": lambda: hs.autocast("cpu", dtype, policy="torch"),
            "compat": lambda: torch_amp.autocast("cpu", dtype),
        }[how]
        with manager():
            return f(*tensors)

    return run


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("how", ["O1", "O3", "native", "rounded", "table torch", "compat"])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_a_normalisation_are_summed_in_fp32(name, how):
    f, shape = NORMS[name]
    torch.manual_seed(0)
    for dtype, weights in itertools.product((BF16, FP16), (FP32, None)):
        x = (torch.randn(shape) + 0.5).to(dtype)
        affine = [(torch.rand(8) + 0.5).to(BF16).to(weights or dtype) for _ in "wb"]
        in_region = region(how, dtype, f)
        check(f, lambda x, *affine, run=in_region: run(x, *affine), [x, *affine], dtype)


@pytest.mark.parametrize("trains", [(True, True, True), (False, True, True), (True, True, False)])
def test_layer_norm_of_more_elements_than_a_block_of_rows(trains):
    values = (torch.randn(9, 700, 8, 8) + 0.5).to(BF16), torch.rand(8, 8), torch.rand(8, 8).to(BF16)
    leaves = [t.requires_grad_(needs) for t, needs in zip(values, trains, strict=True)]
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    upstream = torch.rand(values[0].shape).to(BF16)
    with hs.autocast("cpu", BF16):
        F.layer_norm(leaves[0], (8, 8), *leaves[1:]).backward(upstream)
    F.layer_norm(exact[0], (8, 8), *exact[1:]).backward(upstream.double())
    for t, right in zip(leaves, exact, strict=True):
        assert (t.grad is None) == (right.grad is None)
        assert t.grad is None or (t.grad.dtype is t.dtype and error(t.grad, right.grad) < 2**-8)


def test_channels_last_batches_too():
    x = torch.randn(4, 8, 32, 32).to(BF16).to(memory_format=torch.channels_last)
    f = NORMS["batch_norm"][0]
    check(f, region("O1", BF16, f), [x, (torch.rand(8) + 0.5).to(BF16), torch.rand(8).to(BF16)])


@pytest.mark.parametrize("statistics", [FP32, FP16])
def test_a_batch_norm_of_many_images_is_summed_in_fp32(statistics):
    """The 16-bit kernel adds image by image: the gradient of 65,536 was off by 20 units of fp16."""
    x = torch.rand(4, 5, 3).to(FP16).float().repeat(16384, 1, 1)
    upstream = torch.linspace(0.25, 0.75, x.numel()).to(FP16).view(x.shape)
    found = []
    for low, wide in ((FP16, FP32), (torch.float64, torch.float64)):
        t, w = x.to(low).requires_grad_(), torch.ones(5, dtype=wide, requires_grad=True)
        kept = torch.zeros(5), torch.ones(5)
        kept = [s.to(statistics if low is FP16 else low) for s in kept]
        with hs.autocast("cpu", FP16):
            out = F.batch_norm(t, *kept, w, torch.zeros_like(w), True)
        found.append([out.detach(), *torch.autograd.grad(out, t, upstream.to(out.dtype)), *kept])
    assert found[0][3].dtype is statistics
    for got, right in zip(*found, strict=True):
        assert error(got, right) < 2 * ROUNDING[FP16]


@pytest.mark.parametrize("how", ["O1", "O3", "native", "rounded", "table torch", "compat"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_of_a_convolution_are_summed_in_fp32(how, dtype):
    """Where the processor has no instructions for a dtype, torch's own kernels add image by image in it."""
    for f, images in ((F.conv1d, (4096, 2, 3)), (F.conv_transpose2d, (4096, 2, 2, 2))):
        x, w = torch.rand(images).to(dtype), torch.rand(2, 2, *[1] * (len(images) - 2)).to(dtype)
        check(f, region(how, dtype, f), [x, w])


@pytest.mark.parametrize("dims", [2, 3])
def test_a_grid_s_gradient_is_summed_over_channels_in_fp32(dims):
    x = torch.rand(1, 4096, *[2] * dims).to(BF16)
    grid = (torch.rand(1, *[1] * dims, dims) * 0.5).to(BF16)

    def sample(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, align_corners=False)

    check(sample, region("O3", BF16, sample), [x, grid])


#: So many uses of a table of (5, 4) are more than what runs on fp32 copies; a quarter of them is less.
LOOK_UPS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "embedding, small": (lambda w: F.embedding(INDEX[::4], w), (5, 4)),
    "w[index], small": (lambda w: w[INDEX[::4]], (5, 4)),
    "bag, small": (lambda w: F.embedding_bag(INDEX[::4].view(-1, 4), w, mode="sum"), (5, 4)),
    "embedding": (lambda w: F.embedding(INDEX, w), (5, 4)),
    "embedding, int32": (lambda w: F.embedding(INDEX.int(), w), (5, 4)),
    "embedding, padding": (lambda w: F.embedding(INDEX, w, padding_idx=1), (5, 4)),
    "embedding, by frequency": (lambda w: F.embedding(INDEX, w, scale_grad_by_freq=True), (5, 4)),
    "w[index]": (lambda w: w[BELOW_0], (5, 4)),
    "w[index] of one": (lambda w: w[INDEX], (5,)),
    "w[:, index]": (lambda w: w[:, INDEX], (4, 5)),
    "w[index, index]": (lambda w: w[INDEX, INDEX % 2], (5, 4)),
    "index_select": (lambda w: w.index_select(0, INDEX), (5, 4)),
    "index_select, int32": (lambda w: w.index_select(1, INDEX.int()), (4, 5)),
    "index_select of one": (lambda w: w.index_select(0, INDEX), (5,)),
    "gather": (lambda w: w.gather(0, INDEX[:, None].expand(-1, 4)), (5, 4)),
    "take_along_dim": (lambda w: torch.take_along_dim(w, INDEX[:, None], 0), (5, 4)),
    "take": (lambda w: w.take(INDEX), (5, 4)),
    "bag, sum": (lambda w: F.embedding_bag(INDEX.view(-1, 4), w, mode="sum"), (5, 4)),
    "bag, mean": (lambda w: F.embedding_bag(INDEX.view(1, -1), w, mode="mean"), (5, 4)),
    "bag, max": (lambda w: F.embedding_bag(INDEX.view(-1, 4), w, mode="max"), (5, 4)),
    "bag, padding": (lambda w: F.embedding_bag(INDEX.view(-1, 4), w, mode="mean", padding_idx=1), (5, 4)),
    "bag, weights": (
        lambda w: F.embedding_bag(
            INDEX.view(-1, 4),
            w,
            mode="sum",
            per_sample_weights=torch.full((USES // 4, 4), 0.5, dtype=w.dtype),
        ),
        (5, 4),
    ),
}


@pytest.mark.parametrize("how", ["O1", "O3", "native", "table torch"])
@pytest.mark.parametrize("name", LOOK_UPS)
def test_gradients_of_a_table_are_summed_in_fp32(name, how):
    f, shape = LOOK_UPS[name]
    for dtype in (BF16, FP16):
        table = (torch.rand(shape) + 0.5).to(dtype)
        check(f, region(how, dtype, f), [table])


def test_a_sparse_gradient_has_each_row_once():
    table = torch.rand(5, 4).to(BF16).requires_grad_()
    with hs.autocast("cpu", BF16):
        F.embedding(INDEX, table, padding_idx=1, sparse=True).sum().backward()
    assert table.grad._nnz() == 2
    assert table.grad.dtype is BF16
    assert table.grad.to_dense()[:, 0].tolist() == [2736.0, 0.0, 2736.0, 0.0, 0.0]  # 2731 and 2730 in bf16


OVERLAPS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "replicate 1": (lambda x: F.pad(x, (2048, 0), mode="replicate"), (1, 2, 4)),
    "replicate 2": (lambda x: F.pad(x, (64, 0, 64, 0), mode="replicate"), (1, 2, 4, 4)),
    "replicate 3": (lambda x: F.pad(x, (16, 0, 16, 0, 16, 0), mode="replicate"), (1, 2, 4, 4, 4)),
    "F.fold": (lambda x: F.fold(x, (48, 48), (17, 17)), (1, 289, 1024)),
    "F.unfold": (lambda x: F.unfold(x, (17, 17)), (1, 1, 48, 48)),
    "unfold": (lambda x: x.unfold(1, 1024, 1), (1, 2048)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 1025, 1), (1, 1, 2049)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 33, 1), (1, 1, 64, 64)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2, 33, 1), (1, 1, 64, 64)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2049, 1), (1, 1, 4097)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 33, 1), (1, 1, 64, 64)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 9, 1), (1, 1, 17, 17, 17)),
    "max_pool2d with indices": (lambda x: F.max_pool2d(x, 33, 1, return_indices=True)[0], (1, 1, 64, 64)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 64), (1, 1, 2, 2)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 4096), (1, 1, 4)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (64, 64)), (1, 1, 2, 2)),
}


@pytest.mark.parametrize("how", ["O1", "O3"])
@pytest.mark.parametrize("name", OVERLAPS)
def test_sums_where_windows_overlap_are_fp32(name, how):
    """How long such a sum is, kernel sizes, strides and paddings say, not the shape of a tensor."""
    f, shape = OVERLAPS[name]
    torch.manual_seed(0)
    x = (torch.rand(shape) + 0.25).to(BF16).requires_grad_()
    run = region(how, BF16, f)
    check(f, run, [x])
    assert error(run(x).detach(), f(x.detach().double())) < 2 * ROUNDING[BF16]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", ["O1", "O3", "rounded"])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_sums_over_the_steps_of_a_recurrent_layer_are_fp32(kind, how, packed):
    torch.manual_seed(0)
    layer = getattr(nn, kind)(2, 2)
    weights = [p.detach().to(BF16) for p in layer.parameters()]

    def f(x: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(dict(layer.named_parameters()), weights, strict=True))
        given = nn.utils.rnn.pack_padded_sequence(x, [256, 200]) if packed else x
        found = torch.func.functional_call(layer, named, (given,))[0]
        return found.data if packed else found

    for dtype in (BF16, FP16):
        x = torch.rand(256, 2, 2).to(BF16)
        check(f, region(how, dtype, f), [t.to(dtype) for t in (x, *weights)])


def test_the_state_of_a_long_lstm_is_fp32():
    x, state = torch.full((2048, 1, 1), 1.0), torch.zeros(1, 1, 1)
    layer = nn.LSTM(1, 1)
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(8.0)  # all gates open: the state counts
        with hs.autocast("cpu", BF16):
            counted = layer(x, (state, state))[1][1]
    assert counted.item() == 2048


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_losses_of_more_rows_than_fp16_counts_have_gradients(loss):
    x, y = torch.rand(66000, 2).to(FP16).requires_grad_(), torch.zeros(66000, dtype=torch.long)

    def f(x: Tensor) -> Tensor:
        return loss(x, y) * 1024

    check(f, region("O3", FP16, f), [x])


FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "index_put": lambda s: s.new_zeros(2, 4).index_put((INDEX * 0,), s, accumulate=True),
    "index_put_": lambda s: s.new_zeros(2, 4).index_put_((INDEX * 0,), s, accumulate=True),
    "put": lambda s: s.new_zeros(2).put(INDEX * 0, s[:, 0], accumulate=True),
    "put_": lambda s: s.new_zeros(2).put_(INDEX * 0, s[:, 0], accumulate=True),
    "index_add, int32": lambda s: s.new_zeros(2, 4).index_add(0, INDEX.int() * 0, s),
    "index_add_ of one": lambda s: s.new_zeros(2).index_add_(0, INDEX * 0, s[:, 0]),
    "index_reduce": lambda s: (
        s.new_zeros(2, 4).index_reduce(0, INDEX * 0, s, "mean", include_self=False) * USES
    ),
    "segment_reduce": lambda s: torch.segment_reduce(s, "sum", lengths=torch.tensor([USES])),
    "adaptive_avg_pool3d": lambda s: F.adaptive_avg_pool3d(s.reshape(1, 1, USES, 2, 2), 2) * USES,
    "bilinear": lambda s: F.bilinear(s[:1, :1].expand(1, USES), s[:1, :1], s[:, :1].reshape(1, USES, 1)),
    "histc": lambda s: torch.histc(s[:, 0], 1, 0, 2),
    "coalesce": lambda s: torch.sparse_coo_tensor(INDEX[None] * 0, s, (2, 4)).coalesce().values(),
    "to_dense": lambda s: torch.sparse_coo_tensor(INDEX[None] * 0, s, (2, 4)).to_dense(),
    "sparse.mm": lambda s: torch.sparse.mm(
        torch.sparse_coo_tensor(torch.stack([INDEX * 0, torch.arange(USES)]), torch.ones(USES), (2, USES)), s
    ),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:Sparse invariant")
def test_sums_by_index_are_fp32(name):
    for dtype in (BF16, FP16):
        ones = torch.ones(USES, 4, dtype=dtype).requires_grad_()
        with hs.autocast("cpu", dtype):
            out = FORWARD[name](ones)
        assert out.dtype is dtype
        assert out.flatten()[0] == USES


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ["layer_norm", "embedding", "w[index]", "index_select"])
def test_what_else_autograd_does_with_them(name):
    """Checkpointing, derivatives of derivatives, function transforms, forward mode."""
    torch.manual_seed(0)
    f, shape = NORMS.get(name) or LOOK_UPS[name]
    tensors = [(torch.rand(s) + 0.5).to(BF16) for s in ([shape, (8,), (8,)] if name in NORMS else [shape])]
    run = region("O1", BF16, f)
    check(f, lambda *t: checkpoint(run, *t, use_reentrant=False), tensors)
    transformed = torch.func.grad(lambda w: run(w, *tensors[1:]).float().sum())(tensors[0].detach())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0].detach(), torch.ones_like(tensors[0]))
        run(dual, *tensors[1:])
    leaves = [t.detach().requires_grad_() for t in tensors]
    (first,) = torch.autograd.grad(run(*leaves).float().pow(2).sum(), leaves[:1], create_graph=True)
    (second,) = torch.autograd.grad(first.float().pow(2).sum(), leaves[:1])
    exact = [t.detach().double().requires_grad_() for t in leaves]
    (first,) = torch.autograd.grad(f(*exact).pow(2).sum(), exact[:1], create_graph=True)
    (right,) = torch.autograd.grad(first.pow(2).sum(), exact[:1])
    assert transformed.shape == shape
    assert name == "layer_norm" or error(second, right) < 0.02


def test_an_index_out_of_range_is_an_error():
    table = torch.rand(5, 4).to(BF16).requires_grad_()
    with hs.autocast("cpu", BF16):
        for look_up in (
            lambda i: table[i],
            lambda i: F.embedding(i, table),
            lambda i: table.index_select(0, i),
        ):
            with pytest.raises((IndexError, RuntimeError), match="out of"):
                look_up(torch.tensor([7]))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_transformer_encoder_has_its_gradients(level):
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), 1)
    x = torch.randn(8, 512, 16)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), 1)
    plain.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    amp = hs.prepare(net, optimizer, level=level, dtype="bf16")
    with amp.autocast():
        loss = net(x).float().mul(x + 1).sum()
    amp.backward(loss)
    plain(x).mul(x + 1).sum().backward()
    right = dict(plain.named_parameters())
    for name, p in net.named_parameters():
        if "norm" in name:
            assert error(p.grad, right[name].grad) < 0.03, name
