"""On CUDA: the Triton step equals the reference, never waits for the device, and goes into a CUDA graph."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import UnsupportedError
from halfstep.optim import SGD, Adam, AdamW, Lion, backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 0.01}),
    "Adam": (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "Nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Lion": (Lion, {"weight_decay": 0.1}),
}
WEIGHTS = [
    (FP32, None),
    *((BF16, master) for master in ("exact", "fp32", "stochastic", None)),
    *((FP16, master) for master in ("exact", "fp32", None)),
]
STATES = ("fp32", "bf16", "8bit")
SIZES = (1, 7, (1, 511), (1, 1024), (5, 205), (40, 1000), (1, 100_003), 1025)


def bits(t: Tensor) -> Tensor:
    return t.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def assert_same(ours: Any, reference: Any) -> None:
    for p, q in zip(ours[0], reference[0], strict=True):
        assert torch.equal(bits(p), bits(q))
        for key, value in ours[1].state[p].items():
            assert torch.equal(bits(value), bits(reference[1].state[q][key])), key


def parameters(dtype: torch.dtype, sizes: tuple[Any, ...] = SIZES) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(n, device="cuda").to(dtype)) for n in sizes]


def fill(params: list[nn.Parameter], step: int) -> None:
    """Give each parameter a gradient of its own dtype, as backward would: a new tensor."""
    torch.manual_seed(100 + step)
    for p in params:
        spread = 10 ** (torch.rand(p.shape, device="cuda") * 7 - 7)
        p.grad = (torch.randn(p.shape, device="cuda") * spread).to(p.dtype)


def scalars() -> dict[str, Tensor]:
    return {
        "inv_scale": torch.full((), 0.5, device="cuda"),
        "clip_coef": torch.full((), 0.7, device="cuda"),
        "found_inf": torch.zeros((), dtype=torch.bool, device="cuda"),
    }


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_step_equals_the_reference(name: str, weights: Any, state_dtype: str):
    cls, options = ALGORITHMS[name]
    finals = []
    for backend in ("triton", "reference"):
        params = parameters(weights[0])
        optimizer = cls(params, backend=backend, master=weights[1], state_dtype=state_dtype, **options)
        for step in range(4):
            fill(params, step)
            found = torch.full((), step == 1, device="cuda")
            optimizer.step(**{**scalars(), "found_inf": found})
        finals.append((params, optimizer))
    assert_same(*finals)


def test_cuda_runs_the_kernels_by_default():
    assert backends.runner("auto", torch.device("cuda")) == "triton"


@pytest.mark.parametrize("scale", [1.0, 1e-22, 2e18])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_measure_equals_float64(dtype: torch.dtype, scale: float):
    params = parameters(dtype)
    fill(params, 0)
    for p in params:
        assert p.grad is not None
        p.grad.mul_(min(scale, 1e4) if dtype == FP16 else scale)
    optimizer = AdamW(params)
    stats = optimizer.measure(inv_scale=torch.full((), 0.5, device="cuda"))
    wide = torch.cat([p.grad for p in params if p.grad is not None]).double() * 0.5
    assert stats.norm.item() == pytest.approx(wide.norm().item(), rel=1e-6)
    assert stats.amax.item() == wide.abs().max().float().item()
    assert bool(stats.finite)
    assert stats.norm.item() == optimizer.measure(inv_scale=0.5).norm.item()
    params[5].grad[39_999] = float("nan")
    assert not bool(optimizer.measure().finite)


@pytest.mark.parametrize("state_dtype", STATES)
def test_the_steady_step_does_not_synchronise(state_dtype: str):
    params = parameters(BF16)
    optimizer = AdamW(params, state_dtype=state_dtype)
    given = scalars()
    for step in range(3):
        fill(params, step)
        optimizer.measure(given["inv_scale"])
        optimizer.step(**given)
    fill(params, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lr in (1e-3, 1e-3, 2e-3):
            optimizer.param_groups[0]["lr"] = lr
            stats = optimizer.measure(given["inv_scale"])
            optimizer.step(inv_scale=given["inv_scale"], clip_coef=0.5, found_inf=~stats.finite)
            for p in params:  # other addresses: the table is sent again, without waiting
                p.grad = p.grad.clone()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("many", [10, 300])
def test_a_step_takes_a_handful_of_launches_whatever_the_parameters(many: int):
    params = parameters(BF16, (1000,) * many)
    groups = [{"params": params[::2], "weight_decay": 0.0}, {"params": params[1::2]}]
    optimizer = AdamW(groups)
    given = scalars()
    fill(params, 0)
    for _ in range(3):
        optimizer.measure(given["inv_scale"])
        optimizer.step(**given)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.measure(given["inv_scale"])
        optimizer.step(**given)
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) <= 2 + 2 * len(groups), on_device


def six_steps(captured: bool, **options: Any) -> Any:
    """Six steps at falling learning rates, the last with an inf; three of them from a graph if `captured`."""
    params = parameters(BF16)
    rate = torch.full((), 1e-2, device="cuda")
    optimizer = AdamW(params, lr=rate, **options)
    given = scalars()
    static = [torch.zeros_like(p) for p in params]

    def work() -> None:
        for p, source in zip(params, static):
            p.grad = source * 1  # new memory each time: under capture, of the graph's own pool
        stats = optimizer.measure(given["inv_scale"])
        optimizer.step(**{**given, "found_inf": ~stats.finite})

    graph = torch.cuda.CUDAGraph()
    for step in range(6):
        fill(params, step)
        for p, target in zip(params, static):
            assert p.grad is not None
            target.copy_(p.grad)
        rate.fill_(1e-2 / (1 + step))
        if step == 5:
            static[0].fill_(float("inf"))
        if not captured or step < 3:
            work()
            continue
        if step == 3:
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                work()
        graph.replay()
    torch.cuda.synchronize()
    return params, optimizer


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"master": "stochastic"}], ids=str)
def test_a_captured_step_replays_what_eager_steps_do(options: dict[str, Any]):
    replayed, eager = six_steps(True, **options), six_steps(False, **options)
    assert_same(replayed, eager)
    assert int(replayed[1].state[replayed[0][0]]["step"]) == 5


def test_a_step_that_never_ran_outside_a_graph_is_refused_with_the_remedy():
    p = parameters(BF16, (16,))[0]
    optimizer = AdamW([p])
    p.grad = torch.zeros_like(p)
    kept = torch.zeros(16, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        kept.add_(1)  # a graph must not be empty
        with pytest.raises(UnsupportedError, match="take a few steps first"):
            optimizer.measure()
