"""Law 5, one policy, every device: the same dtypes everywhere, and backward in the dtype of forward."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.casting import autocast, disabled, regions
from halfstep.devices import capabilities
from halfstep.policy import Policy, ops
from tests.casting.samples import Sample, cuda_samples, outcome
from tests.torch_facts import one_graph

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def pretended_cuda(monkeypatch):
    """CUDA without CUDA: fake tensors dispatch to torch's own CUDA autocast kernels and compute nothing."""
    resolve = capabilities.resolve
    monkeypatch.setattr(
        capabilities, "resolve", lambda d=None: torch.device(d) if str(d) == "cuda" else resolve(d)
    )
    capabilities.declare("cuda", (BF16, FP16))
    regions.forget()
    yield
    capabilities._declared.pop("cuda")
    regions.forget()


def on_cuda(value):
    if isinstance(value, torch.Tensor):
        return value.to("cuda")
    return type(value)(on_cuda(v) for v in value) if isinstance(value, (list, tuple)) else value


# Kernels that fake tensors cannot run for CUDA in a CPU build.
NOT_FAKED = {"_convolution", "convolution", "gru_cell", "lstm_cell"}


@pytest.mark.parametrize("table", ["halfstep", "apex", "mindspore", "mlu", "paper"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_cpu_and_cuda_give_the_same_dtypes(table: str, dtype: torch.dtype, pretended_cuda) -> None:
    policy = Policy(compute_dtype=dtype, table=table)
    here = [s for s in cuda_samples() if s.op not in NOT_FAKED]
    seen: dict[int, list[torch.dtype] | type] = {}
    for i, sample in enumerate(here):
        with autocast("cpu", policy=policy):
            seen[i] = dtypes_or_error(sample)
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = [s for s in cuda_samples("cuda") if s.op not in NOT_FAKED]
        compared = 0
        for i, sample in enumerate(there):
            with autocast("cuda", policy=policy):
                got = dtypes_or_error(sample)
            row = ops.rows(table).get(sample.op)
            if row is not None and not isinstance(got, type) and not isinstance(seen[i], type):
                assert got == seen[i], (sample.name, row)
                compared += 1
    assert compared > 20 or table == "mindspore"


def dtypes_or_error(sample: Sample) -> list[torch.dtype] | type:
    result = outcome(sample.call)
    return result if isinstance(result, type) else [t.dtype for t in result]


class Backwards(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.products.append(out.dtype)
        return out


CASES = {
    "low in a region": (lambda: autocast("cpu", BF16), None, BF16),
    "full by an edit": (
        lambda: autocast("cpu", policy=Policy().with_rules(full=["matmul", "mm"])),
        None,
        FP32,
    ),
    "off inside a region": (lambda: disabled("cpu"), lambda: autocast("cpu", BF16), FP32),
    "fp16 rounded around fp32": (lambda: autocast("cpu", FP16, kernels="rounded"), None, FP32),
}


@pytest.mark.parametrize("around", ["outside", "same region", "another dtype", "no grad mode change"])
@pytest.mark.parametrize("case", CASES)
def test_backward_runs_in_the_dtype_of_forward(case: str, around: str) -> None:
    forward, outer, expected = CASES[case]
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    seen = Backwards()
    with (outer or forward)():
        with forward():
            y = x @ w
        if around == "same region":
            with seen:
                torch.autograd.grad(y, (x, w), torch.ones_like(y))
        elif around == "no grad mode change":
            with seen:
                torch.autograd.grad(y, (x, w), torch.ones_like(y), create_graph=True)
    if around == "outside":
        with seen:
            torch.autograd.grad(y, (x, w), torch.ones_like(y))
    elif around == "another dtype":
        with autocast("cpu", FP16 if expected is BF16 else BF16), seen:
            torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert seen.products == [expected, expected]


def test_backward_of_an_op_rounded_as_a_whole_runs_in_fp32() -> None:
    x, w = (torch.randn(2, 4, 4, requires_grad=True) for _ in range(2))
    with autocast("cpu", FP16, kernels="rounded"):
        y = torch.baddbmm(x, x, w)
    with Backwards() as seen:
        torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert seen.products == [FP32, FP32]


@pytest.mark.parametrize("inside", [pytest.param(True, marks=one_graph), False])
def test_compiled_backward_runs_in_the_dtype_of_forward(inside: bool) -> None:
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    policy = Policy().with_rules(full=["linear"])

    def step(x, w):
        return F.linear(x, w), x @ w

    def region_inside(x, w):
        with autocast("cpu", policy=policy):
            return step(x, w)

    grads = []
    for compiled in (False, True):
        fn = region_inside if inside else step
        fn = torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
        with torch.enable_grad(), disabled("cpu") if inside else autocast("cpu", policy=policy):
            full, low = fn(x, w)
        assert (full.dtype, low.dtype) == (FP32, BF16)
        grads.append(torch.autograd.grad((full.sum() + low.float().sum()), (x, w)))
    for eager, compiled in zip(*grads, strict=True):
        assert torch.equal(eager, compiled)
    torch._dynamo.reset()
