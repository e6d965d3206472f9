"""Every implementation of a LOW op gives the policy's dtypes, and gradients within a rounding of fp32's."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from halfstep.casting import autocast
from halfstep.casting.kernel_choice import IMPLEMENTATIONS, KernelTable, Row
from halfstep.casting.kinds import KINDS
from halfstep.casting.kinds.convolution import sums_in_fp32
from halfstep.casting.kinds.kind import Choice, OpClass
from halfstep.policy.policy import Policy
from tests.torch_facts import one_graph

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Unit roundoff: half the distance of neighbouring values just above 1.
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11}


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "linear": (lambda x, w: F.linear(x, w), (5, 6, 16), (8, 16)),
    "matmul": (lambda x, w: x @ w, (12, 16), (16, 8)),
    "rows by one matrix": (lambda x, w: x @ w, (3, 4, 16), (16, 8)),
    "bmm": (lambda x, w: torch.bmm(x, w), (3, 4, 16), (3, 16, 8)),
    "broadcast": (lambda x, w: x @ w, (2, 3, 4, 16), (3, 16, 8)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), (2, 8, 12), (6, 8, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (2, 8, 7, 7), (6, 8, 3, 3)),
    "conv2d same": (lambda x, w: F.conv2d(x, w, padding="same"), (2, 8, 7, 7), (6, 8, 3, 3)),
    "strided": (lambda x, w: F.conv2d(x, w, stride=2, dilation=2), (2, 8, 9, 9), (6, 8, 3, 3)),
    "unbatched": (lambda x, w: F.conv2d(x, w), (8, 7, 7), (6, 8, 3, 3)),
    "pointwise": (lambda x, w: F.conv2d(x, w), (2, 8, 7, 7), (6, 8, 1, 1)),
    "grouped": (lambda x, w: F.conv2d(x, w, groups=2), (2, 8, 7, 7), (6, 4, 3, 3)),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=8), (2, 8, 7, 7), (8, 1, 3, 3)),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1), (2, 8, 4, 4), (8, 6, 4, 4)),
    "thin": (lambda x, w: F.linear(x, w), (3, 16), (8, 16)),
    "large bmm": (lambda x, w: torch.bmm(x, w), (2, 72, 64), (2, 64, 72)),
    "stem": (lambda x, w: F.conv2d(x, w, stride=2), (2, 3, 9, 9), (8, 3, 3, 3)),
    "wide pointwise": (lambda x, w: F.conv2d(x, w), (1, 72, 4, 4), (72, 72, 1, 1)),
    "strided depthwise": (lambda x, w: F.conv2d(x, w, None, 2, 1, 1, 8), (2, 8, 9, 9), (8, 1, 3, 3)),
    "conv1d pointwise": (lambda x, w: F.conv1d(x, w), (1, 72, 9), (72, 72, 1)),
    "conv1d depthwise": (lambda x, w: F.conv1d(x, w, groups=8), (2, 8, 9), (8, 1, 3)),
    "conv1d strided depthwise": (lambda x, w: F.conv1d(x, w, None, 2, 1, 1, 8), (2, 8, 9), (8, 1, 3)),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), (1, 8, 5, 5, 5), (6, 8, 3, 3, 3)),
    "conv3d pointwise": (lambda x, w: F.conv3d(x, w), (1, 72, 2, 3, 3), (72, 72, 1, 1, 1)),
    "conv3d strided depthwise": (
        lambda x, w: F.conv3d(x, w, None, 2, 1, 1, 8),
        (1, 8, 5, 5, 5),
        (8, 1, 3, 3, 3),
    ),
    "conv_transpose3d": (lambda x, w: F.conv_transpose3d(x, w, stride=2), (1, 8, 3, 3, 3), (8, 6, 2, 2, 2)),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w, stride=2), (2, 8, 6), (8, 6, 4)),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x, w, w), (2, 2, 9, 8), (2, 2, 9, 8)),
    "causal": (
        lambda x, w: F.scaled_dot_product_attention(x, w, x, is_causal=True),
        (2, 2, 9, 8),
        (2, 2, 9, 8),
    ),
    "masked": (
        lambda x, w: F.scaled_dot_product_attention(x, w, w, attn_mask=seeded(9, 9, seed=5)),
        (2, 2, 9, 8),
        (2, 2, 9, 8),
    ),
}
SUMS = {"causal": 24.0, "attention": 24.0, "masked": 24.0}  # their forward rounds before backward goes on


def roundings(name: str, how: str, dtype: torch.dtype) -> float:
    """Units of the dtype's roundoff that a result may be off by."""
    ours = torch.ops.mkldnn
    known = ours._is_mkldnn_bf16_supported() if dtype is BF16 else ours._is_mkldnn_fp16_supported()
    # What oneDNN does not know is torch's own, which rounds the partial sums of kernel positions: 3.2 seen.
    return max(SUMS.get(name, 1.01), 4.0 if not known and not how.startswith("rounded") else 0.0)


def table(how: str) -> KernelTable:
    return KernelTable([Row(Choice(how, how, how))])


def inputs(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Both inputs of a case; images in channels_last where the name ends so."""
    _, *shapes = CASES[name.removesuffix(" last")]
    made = [seeded(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    last = torch.channels_last if name.endswith(" last") else torch.contiguous_format
    return [t.contiguous(memory_format=last) for t in made]


def called(name: str):
    return CASES[name.removesuffix(" last")][0]


IMAGES = [
    name for name, (_, *shapes) in CASES.items() if all(len(s) == 4 for s in shapes) and "conv3d" not in name
]
LAST = [f"{name} last" for name in IMAGES if name not in (*SUMS, "broadcast")]


def run(call, x: Tensor, w: Tensor, region) -> tuple[Tensor, ...]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    with region:
        out = call(x, w)
    grad = seeded(*out.shape, seed=3).to(BF16).to(out.dtype)
    return (out, *torch.autograd.grad(out, (x, w), grad))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", [*CASES, *LAST])
def test_values_and_gradients_are_within_a_rounding_of_fp32(name: str, dtype: torch.dtype) -> None:
    call = called(name)
    x, w = inputs(name, dtype)
    exact = run(call, x.float(), w.float(), autocast("cpu", enabled=False))
    for how in IMPLEMENTATIONS:
        got = run(call, x, w, autocast("cpu", dtype, kernels=table(how)))
        assert [t.dtype for t in got] == [dtype] * 3, how
        for mine, right in zip(got, exact, strict=True):
            assert mine.shape == right.shape, how
            assert mine.is_contiguous() == right.is_contiguous(), how
            bound = ROUNDOFF[dtype] * roundings(name, how, dtype) * right.abs().max().clamp(min=1e-3)
            assert (mine.float() - right).abs().max() <= bound, (how, name)


def class_of_call(call, *tensors: Tensor) -> tuple[str, str] | None:
    """Op and geometry of the class that a call's choice is asked for."""
    asked: list[OpClass] = []

    def measure(cls: OpClass, direction: str) -> dict[str, float | None]:
        asked.append(cls)
        return {"native": 1.0}

    with autocast("cpu", BF16, kernels=KernelTable((), measure)):
        call(*tensors)
    return (asked[0].op, asked[0].geometry) if asked else None


def test_the_cases_reach_every_class_there_is() -> None:
    reached = {class_of_call(called(name), *inputs(name, FP32)) for name in (*CASES, *LAST)}
    reached |= {class_of_call(recurrent(name), *recurrent_inputs(name, FP32)) for name in GATES}
    wanted = {(op, geometry) for op, kind in KINDS.items() for geometry in kind.geometries}
    assert wanted - reached == set()


#: Rows of the weights as multiples of the width.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1}


def recurrent(name: str):
    """A layer over a sequence, as a function of input, state and weights."""

    def call(x: Tensor, state: Tensor, *weights: Tensor) -> Tensor:
        initial = (state, state.detach()) if name == "lstm" else state
        return getattr(torch, name)(x, initial, weights, True, 1, 0.0, True, False, False)[0]

    return call


def recurrent_inputs(name: str, dtype: torch.dtype) -> list[Tensor]:
    sides = ((5, 3, 8), (1, 3, 8), *[(GATES[name] * 8, 8)] * 2, *[(GATES[name] * 8,)] * 2)
    return [(seeded(*side, seed=i) / 3).to(dtype) for i, side in enumerate(sides)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", GATES)
def test_recurrent_layers_too(name: str, dtype: torch.dtype) -> None:
    """Rounded: one rounding of the whole layer. Native rounds every step's state, and the steps add up."""
    given = [t.requires_grad_() for t in recurrent_inputs(name, dtype)]
    wide = [t.detach().float().requires_grad_() for t in given]

    def results(tensors: list[Tensor], region) -> tuple[Tensor, ...]:
        with region:
            out = recurrent(name)(*tensors)
        return (out, *torch.autograd.grad(out, tensors, seeded(*out.shape, seed=9).to(BF16).to(out.dtype)))

    exact = results(wide, autocast("cpu", enabled=False))
    for how, most in (("rounded", 1.01), ("native", 16.0)):
        for mine, right in zip(results(given, autocast("cpu", dtype, kernels=how)), exact, strict=True):
            assert mine.dtype is dtype, how
            bound = ROUNDOFF[dtype] * most * right.abs().max()
            assert (mine.float() - right).abs().max() <= bound, how


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ["linear", "conv2d", "transposed"])
def test_the_bias_too(name: str, dtype: torch.dtype) -> None:
    x, w = inputs(name, dtype)
    bias = seeded(w.shape[1 if name == "transposed" else 0], seed=4).to(dtype)
    call = {"linear": F.linear, "conv2d": F.conv2d, "transposed": F.conv_transpose2d}[name]

    def gradient(region, wide: torch.dtype) -> Tensor:
        leaf = bias.to(wide).requires_grad_()
        with region:
            out = call(x.to(wide), w.to(wide), leaf)
        grad = seeded(*out.shape, seed=3).to(BF16).to(out.dtype)
        return torch.autograd.grad(out, leaf, grad)[0]

    exact = gradient(autocast("cpu", enabled=False), FP32)
    for how in IMPLEMENTATIONS:
        mine = gradient(autocast("cpu", dtype, kernels=table(how)), dtype)
        assert mine.dtype is dtype
        bound = ROUNDOFF[dtype] * roundings(name, how, dtype) * exact.abs().max()
        assert (mine.float() - exact).abs().max() <= bound, how


@pytest.mark.parametrize("name", ["linear", "bmm", "conv2d", "transposed", "attention"])
def test_fp32_weights_get_fp32_gradients_and_outputs_stay_low(name: str) -> None:
    call, *shapes = CASES[name]
    x, w = (seeded(*shape, seed=i) for i, shape in enumerate(shapes))
    for how in IMPLEMENTATIONS:
        out, *grads = run(call, x, w, autocast("cpu", BF16, kernels=table(how)))
        assert out.dtype is BF16
        assert [g.dtype for g in grads] == [FP32, FP32]


@pytest.mark.parametrize(("forward", "to_x", "to_w"), [*itertools.product(["native", "rounded"], repeat=3)])
@pytest.mark.parametrize("name", ["linear", "matmul", "conv2d"])
def test_each_direction_is_chosen_apart(name: str, forward: str, to_x: str, to_w: str) -> None:
    call, *shapes = CASES[name]
    x, w = (seeded(*shape, seed=i).to(BF16) for i, shape in enumerate(shapes))
    mixed = autocast("cpu", BF16, kernels=KernelTable([Row(Choice(forward, to_x, to_w))]))
    pure = {how: run(call, x, w, autocast("cpu", BF16, kernels=table(how))) for how in ("native", "rounded")}
    got = run(call, x, w, mixed)
    for place, how in enumerate((forward, to_x, to_w)):
        assert torch.equal(got[place], pure[how][place]), (place, how)


@pytest.mark.parametrize("name", ["linear", "matmul", "bmm", "conv2d"])
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_second_order_gradients(name: str, how: str) -> None:
    call, *shapes = CASES[name]
    leaves = [seeded(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]

    def penalty(region) -> tuple[Tensor, ...]:
        with region:
            out = call(*leaves)
        first = torch.autograd.grad(out.float().square().mean(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    exact = penalty(autocast("cpu", enabled=False))
    for mine, right in zip(penalty(autocast("cpu", BF16, kernels=table(how))), exact, strict=True):
        assert mine.dtype is FP32
        assert (mine - right).norm() <= 0.03 * right.norm()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["linear", "conv2d", "attention"])
def test_checkpointing_recomputes_by_the_same_kernels(name: str, reentrant: bool) -> None:
    call, *shapes = CASES[name]
    leaves = [seeded(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]

    def gradients(function) -> tuple[Tensor, ...]:
        with autocast("cpu", BF16, kernels=table("rounded")):
            out = function(*leaves)
        return torch.autograd.grad(out.float().square().sum(), leaves) if not reentrant else backward(out)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        for leaf in leaves:
            leaf.grad = None
        out.float().square().sum().backward()
        return tuple(leaf.grad for leaf in leaves)

    again = gradients(lambda x, w: checkpoint(call, x, w, use_reentrant=reentrant))
    for one, other in zip(gradients(call), again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("how", ["rounded", "native"])
def test_function_transforms_and_forward_mode_still_work(how: str) -> None:
    x, w = seeded(3, 4), seeded(4, 4, seed=1)
    with autocast("cpu", BF16, kernels=table(how)):
        each = torch.func.vmap(torch.func.grad(lambda w, row: (row @ w).float().sum()), in_dims=(None, 0))(
            w, x
        )
        _, tangent = torch.func.jvp(lambda w: x @ w, (w,), (w,))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(w, w)
            moved = torch.autograd.forward_ad.unpack_dual(x @ dual).tangent
    torch.testing.assert_close(each, x[:, :, None].expand(3, 4, 4), rtol=1e-2, atol=1e-2)
    assert tangent.dtype is moved.dtype is BF16


@one_graph
@pytest.mark.parametrize("how", ["rounded", "native"])
def test_compiled_code_takes_the_choice_too(how: str) -> None:
    layer = torch.nn.Conv2d(8, 8, 3)
    wide: list[bool] = []

    def backend(graph, example):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def look(module, _):
            values = [n.meta.get("val") for n in module.graph.nodes if "convolution" in str(n.target)]
            wide.extend(v.dtype is FP32 for v in values if isinstance(v, Tensor))
            return make_boxed_func(module)

        return aot_autograd(fw_compiler=look, bw_compiler=lambda m, _: make_boxed_func(m))(graph, example)

    @torch.compile(fullgraph=True, backend=backend)
    def step(x: Tensor) -> Tensor:
        with autocast("cpu", BF16, kernels=how):
            return layer(x)

    out = step(seeded(2, 8, 6, 6))
    assert out.dtype is BF16
    assert wide == [how == "rounded" or not sums_in_fp32(BF16)]
    out.float().sum().backward()
    assert layer.weight.grad.dtype is FP32


def test_empty_sparse_and_wide_inputs_go_the_common_way() -> None:
    with autocast("cpu", BF16, kernels=table("rounded")):
        assert F.linear(torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)
        assert (torch.eye(3).to_sparse() @ torch.eye(3)).shape == (3, 3)
        assert F.linear(torch.zeros(2, 4).double(), torch.zeros(3, 4)).dtype is torch.float64
        assert (
            torch.zeros(2, 2, dtype=torch.complex64) @ torch.zeros(2, 2, dtype=torch.complex64)
        ).is_complex()


@pytest.mark.parametrize("how", ["native", "rounded", "measured"])
def test_a_boolean_mask_is_taken_as_torch_takes_it(how):
    """The flash kernels themselves only add masks; a boolean one was refused in the middle of a step."""
    q, k, v = torch.randn(3, 4, 2, 6, 4).requires_grad_().unbind()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with autocast("cpu", torch.bfloat16, kernels=how):
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        got.float().sum().backward()
    torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("kernels", ["native", "rounded"])
def test_a_gradient_penalty_gives_no_gradient_where_fp32_gives_none(kernels):
    torch.manual_seed(0)
    parts = [torch.nn.Conv2d(3, 8, 3), torch.nn.Tanh(), torch.nn.Conv2d(8, 8, 3, groups=8)]
    model, found = torch.nn.Sequential(*parts, torch.nn.Conv2d(8, 1, 3)), []
    for on in (False, True):
        model.zero_grad()
        z = seeded(4, 3, 9, 9).requires_grad_()
        with autocast("cpu", "bf16", kernels=kernels, enabled=on):
            out = model(z)
        (grad,) = torch.autograd.grad(out.sum(), z, create_graph=True)
        grad.flatten(1).norm(dim=1).square().mean().backward()
        found.append({name for name, p in model.named_parameters() if p.grad is None})
    assert found[0] == found[1] == {"2.bias", "3.bias"}


@pytest.mark.parametrize("kernels", ["native", "rounded"])
@pytest.mark.parametrize("name", ["linear", "biased", "mm", "matmul"])
def test_a_product_that_gives_out_fp32_rounds_only_its_gradients(name, kernels):
    calls = {
        "linear": lambda x, w, b: F.linear(x, w),
        "biased": lambda x, w, b: F.linear(x, w, b),
        "mm": lambda x, w, b: torch.mm(x[0], w.t()),
        "matmul": lambda x, w, b: x @ w.t(),
    }
    values = [torch.randn(shape).bfloat16().float() for shape in ((2, 24, 16), (8, 16), (8,))]
    low = [v.clone().requires_grad_() for v in values]
    exact = [v.double().requires_grad_() for v in values]
    policy = Policy().with_rules(fp32_out=["linear", "mm", "matmul"])
    with autocast("cpu", torch.bfloat16, policy=policy, kernels=kernels):
        out = calls[name](*low)
    right = calls[name](*exact)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=0)
    up = torch.rand(out.shape) + 0.5
    found = torch.autograd.grad(out, low, up, allow_unused=True)
    for got, ideal in zip(found, torch.autograd.grad(right, exact, up.double(), allow_unused=True)):
        assert (got is None) == (ideal is None)
        if got is not None and ideal is not None:
            assert float((got - ideal).norm() / ideal.norm()) < 2**-7
