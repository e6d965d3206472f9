"""Autocast regions: PyTorch's own op lists, rules, errors, own functions, custom Functions, frozen
weights."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.casting import (
    active_policy,
    autocast,
    custom_bwd,
    custom_fwd,
    disabled,
    frozen_weights,
)
from halfstep.casting.functions import op as own_op
from halfstep.casting.kernel_choice import KernelTable, Row
from halfstep.casting.kinds.convolution import sums_in_fp32
from halfstep.casting.kinds.kind import Choice
from halfstep.errors import BannedOpError, ConfigError
from halfstep.policy import Policy, ops
from halfstep.policy.op_tables import CONVOLUTIONS
from halfstep.policy.ops import Rule
from tests.casting.samples import Sample, cpu_samples, cuda_samples, outcome, tensors

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SAMPLES = [*cpu_samples(), *cuda_samples()]


def named(samples: list[Sample]) -> list[object]:
    return [pytest.param(s, id=f"{i}-{s.name}") for i, s in enumerate(samples)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("sample", named(SAMPLES))
def test_policy_torch_is_bitwise_torch_autocast(sample: Sample, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        expected = outcome(sample.call)
    with autocast("cpu", dtype, policy="torch"):
        got = outcome(sample.call)
    if isinstance(expected, type):
        assert got is expected
        return
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    adds_in_16_bits = sample.op in CONVOLUTIONS.split() and not sums_in_fp32(dtype)  # law 18: ours do not
    for mine, theirs in zip(got, expected, strict=True):
        if adds_in_16_bits:
            assert (mine - theirs).abs().max() <= 0.1 * theirs.abs().max()  # torch's is off by 4 % in bf16
        else:
            assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("sample", named([s for s in SAMPLES if s.op in ops.rows("halfstep")]))
def test_each_op_follows_its_rule(sample: Sample, dtype: torch.dtype) -> None:
    row = ops.rows("halfstep")[sample.op]
    flat = itertools.chain.from_iterable(a if isinstance(a, (tuple, list)) else [a] for a in sample.args)
    given = [t.dtype for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()]
    rule = row.rule_for(dtype)
    with autocast("cpu", dtype):
        if rule is Rule.BANNED:
            with pytest.raises(BannedOpError, match="logits"):
                sample.call()
            return
        result = sample.call()
    widest = FP32 if len(set(given)) > 1 else given[0]
    expected = {Rule.LOW: dtype, Rule.FULL: FP32, Rule.KEEP: given[0], Rule.WIDEST: widest}[rule]
    assert {t.dtype for t in tensors(result) if t.is_floating_point()} == {expected}


def test_torch_autocast_keeps_its_values_after_our_regions() -> None:
    with autocast("cpu", BF16):
        F.linear(torch.randn(2, 2), torch.randn(2, 2))
    expected = {"exp": BF16, "linear": BF16, "layer_norm": BF16, "einsum": BF16, "reflection_pad1d": FP32}
    low = torch.randn(1, 4, 4).to(BF16)
    with torch.autocast("cpu", BF16):
        got = {
            "exp": low.exp(),
            "linear": F.linear(torch.randn(2, 4), torch.randn(2, 4)),
            "layer_norm": F.layer_norm(low, (4,)),
            "einsum": torch.einsum("ij,jk->ik", torch.randn(4, 4), torch.randn(4, 4)),
            "reflection_pad1d": F.pad(low, (1, 1), mode="reflect"),
        }
    assert {name: t.dtype for name, t in got.items()} == expected


@pytest.mark.parametrize("table", ["halfstep", "low"])
def test_fp64_input_takes_a_norm_to_fp64_whatever_its_weights_are(table: str) -> None:
    """A module that a plan keeps in fp64 may stand before it."""
    x = torch.rand(6, 4, 3, dtype=FP64, generator=torch.Generator().manual_seed(0))
    for dtype in (FP32, BF16):
        w, mean, var = torch.ones(4, dtype=dtype), torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
        with autocast("cpu", BF16, policy=table):
            layer = F.layer_norm(x.mT, (4,), w)
            others = F.group_norm(x, 2, w), F.batch_norm(x, mean, var, w), F.instance_norm(x, None, None, w)
        assert torch.equal(layer, F.layer_norm(x.mT, (4,), w.double()))
        assert {t.dtype for t in others} == {FP64}


def test_fp64_input_takes_a_low_op_to_fp64_and_complex_stays() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    with autocast("cpu", BF16):
        assert F.linear(x.double(), w).dtype is FP64
        assert torch.equal(F.linear(x.double(), w), x.double() @ w.double().t())
        assert F.linear(x.to(BF16), w.double()).dtype is FP64
        assert (torch.complex(x, x) @ torch.complex(w, w)).dtype is torch.complex64
        assert (
            torch.mm(torch.ones(2, 2, dtype=torch.long), torch.ones(2, 2, dtype=torch.long)).dtype
            is torch.long
        )


def test_sum_takes_fp32_by_its_dtype_argument_and_the_users_dtype_wins() -> None:
    x = torch.full((70000,), 1.0, dtype=FP16)
    with autocast("cpu", FP16):
        assert x.sum().item() == 70000.0
        assert x.sum(dtype=FP64).dtype is FP64
        assert x.sum(dtype=FP16).dtype is FP16
        assert torch.log_softmax(x[:8], 0, FP64).dtype is FP64
        assert torch.ones(3, dtype=torch.int32).sum().dtype is torch.int64


@pytest.mark.parametrize("norm", ["layer_norm", "group_norm", "batch_norm", "rms_norm"])
@pytest.mark.parametrize("given", [BF16, FP16, FP32])
@pytest.mark.parametrize("weight", [BF16, FP32])
def test_norms_run_in_the_dtype_of_their_input(norm: str, given: torch.dtype, weight: torch.dtype) -> None:
    if given is FP16 and weight is BF16:
        return
    x, w = torch.randn(4, 6, 6).to(given), torch.ones(6, dtype=weight)
    call = {
        "layer_norm": lambda: F.layer_norm(x, (6,), w, w),
        "group_norm": lambda: F.group_norm(x, 2, w, w),
        "batch_norm": lambda: F.batch_norm(x, torch.zeros(6), torch.ones(6), w, w, training=True),
        "rms_norm": lambda: F.rms_norm(x, (6,), w),
    }[norm]
    with autocast("cpu", BF16):
        assert call().dtype is given


def test_rules_are_edited_for_functions_methods_and_other_libraries() -> None:
    @torch.library.custom_op("halfstep_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    policy = Policy().with_rules(
        full=[F.linear], low=[torch.Tensor.exp, "halfstep_test::twice"], banned=["tanh"], widest=["add"]
    )
    with autocast("cpu", policy=policy):
        assert F.linear(x.to(BF16), w).dtype is FP32
        assert x.exp().dtype is BF16
        assert torch.ops.halfstep_test.twice(x).dtype is BF16
        assert (x + w.double()).dtype is FP64
        with pytest.raises(BannedOpError, match=r"tanh is banned .*with_rules\(full=\['tanh'\]\)"):
            x.tanh()
    assert torch.ops.halfstep_test.twice(x).dtype is FP32


@own_op
def scaled_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@pytest.mark.parametrize(
    ("rule", "dtypes", "expected"),
    [("low", (FP32, FP32), BF16), ("full", (BF16, FP32), FP32), ("keep", (BF16, FP32), BF16),
     ("widest", (BF16, FP32), FP32), ("low", (FP64, FP32), FP64)],
)  # fmt: skip
def test_own_functions_follow_their_rule(
    rule: str, dtypes: tuple[torch.dtype, torch.dtype], expected: torch.dtype
) -> None:
    policy = Policy().with_rules(**{rule: [scaled_product]})
    a, b = torch.randn(2, 2).to(dtypes[0]), torch.randn(2, 2).to(dtypes[1])
    with autocast("cpu", policy=policy):
        assert scaled_product(a, b=b).dtype is expected
    with autocast("cpu", policy=Policy().with_rules(banned=[scaled_product])), pytest.raises(BannedOpError):
        scaled_product(a, b)
    assert scaled_product(a.float(), b.float()).dtype is FP32


def test_own_function_without_a_rule_runs_as_written() -> None:
    with autocast("cpu", BF16):
        assert scaled_product(torch.randn(2, 2), torch.randn(2, 2)).dtype is BF16


def test_active_policy_names_the_innermost_region() -> None:
    assert active_policy() is None
    with autocast("cpu", FP16) as region:
        assert active_policy().compute_dtype is FP16
        with disabled("cpu"):
            assert active_policy() is None
        with region, autocast("cpu", policy="paper"):
            assert active_policy("cpu").table == "paper"
    assert active_policy() is None


def test_compute_dtype_of_policy_text_and_table_name() -> None:
    x = torch.randn(2, 2)
    for policy, dtype, expected in [("c=fp16", None, FP16), ("paper", None, BF16), ("paper", "fp16", FP16)]:
        with autocast("cpu", dtype, policy=policy):
            assert (x @ x).dtype is expected


PRODUCT: list[torch.dtype] = []
IN_FULL: list[torch.dtype] = []


class Product(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @custom_bwd
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        PRODUCT.append((grad @ b.t()).dtype)
        return grad @ b.t(), a.t() @ grad


class ProductInFull(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=FP32)
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        IN_FULL.append(a.dtype)
        return a @ b

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        IN_FULL.append((grad @ b.t()).dtype)
        return grad @ b.t(), a.t() @ grad


@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_custom_functions_run_backward_in_the_region_of_forward(region) -> None:
    PRODUCT.clear()
    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    with region("cpu", BF16):
        out = Product.apply(a, b)
    out.float().sum().backward()
    assert out.dtype is BF16
    assert PRODUCT == [BF16]
    assert a.grad.dtype is FP32


def test_cast_inputs_runs_forward_and_backward_in_that_dtype() -> None:
    IN_FULL.clear()
    a, b = (torch.randn(4, 4).to(BF16).requires_grad_() for _ in range(2))
    with autocast("cpu", BF16):
        out = ProductInFull.apply(a, b)
        out.sum().backward()
    assert out.dtype is FP32
    assert IN_FULL == [FP32, FP32]
    IN_FULL.clear()
    assert ProductInFull.apply(a, b).dtype is BF16
    assert IN_FULL == [BF16]


def test_custom_bwd_without_custom_fwd_is_refused() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 2

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            return grad

    with pytest.raises(ConfigError, match="needs custom_fwd"):
        Half.apply(torch.ones(2, requires_grad=True)).sum().backward()


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(3, 8)
        for step in x:
            h = self.cell(step, h)
        return h


def count_casts(fn) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as record:
        fn()
    return sum(e.count for e in record.key_averages() if e.key == "aten::_to_copy")


def test_frozen_weights_cast_once_and_give_the_same_result_and_gradients() -> None:
    torch.manual_seed(0)
    model, x = Unrolled(), torch.randn(12, 3, 8)
    results = []
    for scope in (lambda: frozen_weights(nn.Module()), lambda: frozen_weights(model)):
        with scope(), autocast("cpu", BF16):
            loss = model(x).float().square().sum()
        loss.backward()
        results.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    assert torch.equal(results[0][0], results[1][0])
    for plain, frozen in zip(results[0][1], results[1][1], strict=True):
        assert frozen.dtype is FP32
        assert torch.equal(plain, frozen)

    def run(scope) -> None:
        with torch.no_grad(), scope, autocast("cpu", BF16):
            model(x)

    weights, steps = 4, 12
    assert count_casts(lambda: run(frozen_weights(nn.Module()))) - count_casts(
        lambda: run(frozen_weights(model))
    ) == weights * (steps - 1)


def test_frozen_weights_end_with_their_scope_and_nest() -> None:
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with torch.no_grad(), autocast("cpu", BF16):
        with frozen_weights(layer):
            with frozen_weights(layer):
                before = layer(x)
            layer.weight.add_(1)
            assert torch.equal(layer(x), before)
        assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("slow_dtype", [FP16])
def test_slow_dtypes_round_inputs_output_and_gradients(slow_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    with autocast("cpu", slow_dtype):
        out = F.linear(x, w)
    grad = torch.randn(8, 4)
    out.backward(grad.to(slow_dtype))
    low_x, low_w = x.detach().to(slow_dtype).float(), w.detach().to(slow_dtype).float()
    low_grad = grad.to(slow_dtype).float()
    assert out.dtype is slow_dtype
    assert torch.equal(out, (low_x @ low_w.t()).to(slow_dtype))
    assert x.grad.dtype is FP32
    assert torch.equal(x.grad, (low_grad @ low_w).to(slow_dtype).float())
    assert torch.equal(w.grad, (low_grad.t() @ low_x).to(slow_dtype).float())


@pytest.mark.parametrize("params", [FP32, FP16])
def test_fp16_ops_agree_with_the_native_kernels(params: torch.dtype) -> None:
    torch.manual_seed(0)
    conv, mix = nn.Conv2d(3, 4, 3).to(params), nn.LSTM(8, 8).to(params)
    image, series = torch.randn(2, 3, 8, 8).to(params), torch.randn(5, 2, 8).to(params)
    q = torch.randn(2, 2, 8, 8).to(params)
    calls = [
        lambda: conv(image),
        lambda: torch.bmm(series, series.mT),
        lambda: F.scaled_dot_product_attention(q, q, q),
    ]
    for call in calls:
        with torch.autocast("cpu", FP16):
            native = call()
        with autocast("cpu", FP16):
            ours = call()
        assert ours.dtype is native.dtype is FP16
        torch.testing.assert_close(ours, native, rtol=2e-3, atol=2e-3)
    with autocast("cpu", FP16):
        assert mix(series)[0].dtype is FP16


def saved_bytes(region, call) -> tuple[int, list[torch.dtype]]:
    """Bytes that autograd saves, each memory counted once, weights aside."""
    sizes: dict[int, int] = {}
    dtypes: list[torch.dtype] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, nn.Parameter):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            dtypes.append(t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), region:
        call()
    return sum(sizes.values()), dtypes


def test_slow_dtypes_save_16_bits_for_backward() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    x = torch.randn(512, 64)
    full, _ = saved_bytes(disabled("cpu"), lambda: net(x))
    low, dtypes = saved_bytes(autocast("cpu", FP16), lambda: net(x))
    assert set(dtypes) == {FP16}
    assert low <= 0.6 * full


@pytest.mark.parametrize("name", ["linear", "conv2d", "transposed", "attention", "sliced"])
def test_slow_dtypes_give_the_gradients_of_plain_casts(name: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    calls = {
        "linear": lambda a, b: F.linear(a, b),
        "conv2d": lambda a, b: F.conv2d(a, b.expand(3, 4, 6, 6)[..., :3, :3]),
        "transposed": lambda a, b: a.mT @ b.t(),
        "attention": lambda a, b: F.scaled_dot_product_attention(a, a * b, a),
        "sliced": lambda a, b: a[:, 1:, ::2] @ b[:, ::3],
    }
    with autocast("cpu", FP16):
        out = calls[name](x, w)
    grads = torch.autograd.grad(out.float().square().sum(), (x, w))

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t.half().float()

    plain = calls[name](rounded(x), rounded(w)).half()
    expected = torch.autograd.grad(plain.float().square().sum(), (x, w))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=5e-3, atol=5e-3 * want.abs().max().item())


def test_slow_dtypes_notice_a_change_in_place() -> None:
    x, w = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    with autocast("cpu", FP16):
        hidden = F.linear(x, w)
        out = F.linear(hidden, w)
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|inplace operation"):
        out.sum().backward()


def test_slow_dtypes_under_function_transforms() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 4)

    def loss(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return (row @ w).float().sum()

    with autocast("cpu", FP16):
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    torch.testing.assert_close(each, x[:, :, None].expand(3, 4, 4), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_by_onednn_rounds_as_by_torch(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 128, bias=bias)
    x = torch.randn(4, 96, 64, requires_grad=True)
    weights = [x, *layer.parameters()]

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t.half().float()

    with autocast("cpu", FP16, kernels=KernelTable([Row(Choice("onednn", "onednn", "onednn"))])):
        out = layer(x)
    plain = F.linear(*(rounded(t) for t in weights)).half()
    assert out.dtype is FP16
    torch.testing.assert_close(out, plain, rtol=1e-3, atol=1e-4)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, weights, grad, create_graph=True)
    want = torch.autograd.grad(plain, weights, grad)
    without_graph = torch.autograd.grad(out, weights, grad, retain_graph=True)
    for ours, again, theirs in zip(got, without_graph, want, strict=True):
        assert torch.equal(ours, rounded(ours))
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-2)
        torch.testing.assert_close(again, theirs, rtol=2e-3, atol=1e-2)
    (twice,) = torch.autograd.grad(got[0].square().sum(), layer.weight)
    assert twice.abs().sum() > 0


@pytest.mark.parametrize("kernels", ["native", "rounded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_padded_transformer_evaluates_in_a_region_as_outside(dtype, kernels):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(3, 7, 16), torch.arange(7) >= torch.tensor([[7], [4], [6]])
    expected = model(x, src_key_padding_mask=padding)  # with gradients, which torch's fused path is not for
    with torch.no_grad(), autocast("cpu", dtype, kernels=kernels):
        got = model(x, src_key_padding_mask=padding)
    assert got.dtype == dtype
    assert (got.float() - expected)[~padding].abs().max() < 0.1
