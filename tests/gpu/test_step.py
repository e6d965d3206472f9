"""A step on a GPU: it never waits, takes few launches, goes into a CUDA graph, and loses no address."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, MasterRangeError, UnsupportedError
from halfstep.kernels.cuda import launch as cuda
from halfstep.optim import SGD, AdamW, Muon, compact
from tests.gpu.machine import DEVICE, Machine
from tests.gpu.test_kernels import assert_same, there

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STATES = ("fp32", "bf16", "8bit")
SIZES = (7, (3, 205), 1025)


def parameters(dtype: torch.dtype, sizes: tuple[Any, ...] = SIZES) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(n, device=DEVICE).to(dtype)) for n in sizes]


def fill(params: list[nn.Parameter], step: int) -> None:
    """Give each parameter a gradient of its own dtype, as backward would: a new tensor."""
    torch.manual_seed(100 + step)
    for p in params:
        spread = 10 ** (torch.rand(p.shape, device=DEVICE) * 7 - 7)
        p.grad = (torch.randn(p.shape, device=DEVICE) * spread).to(p.dtype)


def scalars() -> dict[str, Tensor]:
    return {"inv_scale": there(0.5), "clip_coef": there(0.7), "found_inf": there(False)}


def warmed_up(params: list[nn.Parameter], optimizer: Any, given: dict[str, Tensor]) -> None:
    for step in range(2):
        fill(params, step)
        optimizer.measure(given["inv_scale"])
        optimizer.step(**given)
    fill(params, 2)


@pytest.mark.parametrize(
    ("state_dtype", "dtype"), [("fp32", BF16), ("bf16", BF16), ("8bit", BF16), ("fp32", FP16)]
)
def test_the_steady_step_does_not_synchronise(gpu: Machine, state_dtype: str, dtype: torch.dtype):
    params = parameters(dtype)
    optimizer = AdamW(params, state_dtype=state_dtype, backend="triton")
    given = scalars()
    warmed_up(params, optimizer, given)
    with gpu.no_waiting():
        for lr in (1e-3, 1e-3, 2e-3):
            optimizer.param_groups[0]["lr"] = lr
            stats = optimizer.measure(given["inv_scale"])
            optimizer.step(inv_scale=given["inv_scale"], clip_coef=0.5, found_inf=~stats.finite)
            for p in params:  # other addresses: the table is sent again, without waiting
                p.grad = p.grad.clone()
    assert int(optimizer.state[params[0]]["step"]) == 5


@pytest.mark.parametrize("make", [Muon, partial(compact, torch.optim.NAdam)], ids=["Muon", "compact"])
def test_other_algorithms_equal_torch_s_over_fp32_weights(make: Any):
    """The scale is divided out on the device, and a step that it says to skip changes nothing."""
    peer_of = torch.optim.Muon if make is Muon else torch.optim.NAdam
    params = parameters(BF16, ((3, 205), (64, 64)))
    wide = [nn.Parameter(p.detach().float()) for p in params]
    mine, theirs = make(params, lr=0.01), peer_of(wide, lr=0.01)
    for step in range(4):
        fill(params, step)
        for p, q in zip(params, wide):
            q.grad = p.grad.float() * 0.5
        mine.step(inv_scale=there(0.5), found_inf=there(step == 2))
        if step != 2:
            theirs.step()
    assert all(torch.equal(mine.master_of(p), q) for p, q in zip(params, wide))


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_a_steady_step_of_muon_does_not_synchronise(gpu: Machine, state_dtype: str):
    params = parameters(BF16, ((3, 205), (64, 64)))
    optimizer = Muon(
        [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}], state_dtype=state_dtype
    )
    given = scalars()
    warmed_up(params, optimizer, given)
    with gpu.no_waiting():
        optimizer.step(**given)


def test_a_default_device_changes_nothing(gpu: Machine):
    """Tables and numbers are the host's wherever torch puts new tensors."""
    finals = []
    for default in ("cpu", "cuda"):
        params = parameters(BF16)
        optimizer = AdamW(params, backend="triton")
        warmed_up(params, optimizer, scalars())
        given = {"inv_scale": 0.5, "clip_coef": 0.7}
        with torch.device(default), gpu.no_waiting():
            optimizer.measure(0.5)
            optimizer.step(**given)
        finals.append((params, optimizer))
    assert_same(*finals)


def test_decay_rates_that_became_one_are_named():
    p = nn.Parameter(torch.zeros(4, device=DEVICE))
    optimizer = AdamW([p], backend="triton")
    optimizer.param_groups[0]["betas"] = (0.9, torch.tensor(0.999, dtype=BF16))
    p.grad = torch.ones_like(p)
    with pytest.raises(ConfigError, match=r"betas\[1\]"):
        optimizer.step()
    assert not p.any()


def test_waiting_is_noticed(gpu: Machine):
    x = torch.ones(2, device=DEVICE).sum()
    with gpu.no_waiting(), pytest.raises((RuntimeError, AssertionError)):
        x.item()
    assert x.item() == 2


@pytest.mark.parametrize("many", [2, 6])
def test_a_step_takes_a_handful_of_launches_whatever_the_parameters(gpu: Machine, many: int):
    params = parameters(BF16, (40,) * many)
    groups = [{"params": params[::2], "weight_decay": 0.0}, {"params": params[1::2]}]
    optimizer = AdamW(groups, backend="triton")
    given = scalars()
    warmed_up(params, optimizer, given)

    def work() -> None:
        optimizer.measure(given["inv_scale"])
        optimizer.step(**given)

    work()  # the tables of the new gradients are sent
    launched = gpu.launches(work)
    assert 1 <= len(launched) <= 2 + 2 * len(groups), launched


def six_steps(gpu: Machine, captured: bool, **options: Any) -> Any:
    """Six steps at falling learning rates, the last with an inf; three of them from a graph if `captured`."""
    params = parameters(BF16)
    rate = torch.full((), 1e-2, device=DEVICE)
    optimizer = AdamW(params, lr=rate, backend="triton", **options)
    given = scalars()
    static = [torch.zeros_like(p) for p in params]

    def work() -> None:
        for p, source in zip(params, static):
            p.grad = source * 1  # new memory each time: under capture, of the graph's own pool
        stats = optimizer.measure(given["inv_scale"])
        optimizer.step(**{**given, "found_inf": ~stats.finite})

    replay = work
    for step in range(6):
        fill(params, step)
        for p, target in zip(params, static):
            assert p.grad is not None
            target.copy_(p.grad)
        rate.fill_(1e-2 / (1 + step))
        if step == 5:
            static[0].fill_(float("inf"))
        if captured and step == 3:
            optimizer.zero_grad(set_to_none=True)
            replay = gpu.capture(work)
        replay()
    gpu.synchronize()
    return params, optimizer


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit", "master": "stochastic"}], ids=str)
def test_a_captured_step_replays_what_eager_steps_do(gpu: Machine, options: dict[str, Any]):
    replayed, eager = six_steps(gpu, True, **options), six_steps(gpu, False, **options)
    assert_same(replayed, eager)
    assert int(replayed[1].state[replayed[0][0]]["step"]) == 5


def test_a_step_that_never_ran_outside_a_graph_is_refused_with_the_remedy(gpu: Machine):
    for asked in (cuda.usable, cuda.why_not):
        asked.cache_clear()  # nobody has asked yet whether kernels run
    p = parameters(BF16, (16,))[0]
    optimizer = AdamW([p], backend="triton")
    p.grad = torch.zeros_like(p)
    kept = torch.zeros(16, device=DEVICE)

    def work() -> None:
        kept.add_(1)  # a graph must not be empty
        with pytest.raises(UnsupportedError, match="take a few steps first"):
            optimizer.measure()

    gpu.capture(work)()


@pytest.mark.parametrize("state_dtype", STATES)
def test_tensors_off_the_alignment_of_wide_loads(state_dtype: str):
    """Weights and gradients that begin anywhere in memory, as views of one buffer do."""
    finals = []
    for backend in ("triton", "reference"):
        torch.manual_seed(5)
        buffer, grads = (torch.randn(9001, device=DEVICE).to(BF16) for _ in "ab")
        spans = [(1, 3, 768), (2305, 2, 1024), (4360, 1, 2048)]  # the last one's weight is aligned
        params = [nn.Parameter(buffer[at : at + r * c].view(r, c)) for at, r, c in spans]
        optimizer = AdamW(params, state_dtype=state_dtype, backend=backend)
        for _ in range(2):
            for p, (at, r, c) in zip(params, spans):
                p.grad = grads[at + 1 : at + 1 + r * c].view(r, c)
            amax = max(float(p.grad.abs().max()) for p in params if p.grad is not None)
            assert float(optimizer.measure().amax) == amax
            optimizer.step()
        finals.append((params, optimizer))
    assert_same(*finals)


@pytest.mark.parametrize(
    ("shape", "wide"),
    [((3, 768), {True}), ((2, 2304), {True}), ((1, 1030), {True, False}), ((5, 1000), {False})],
)
@pytest.mark.parametrize("shift", [0, 1])
def test_8_bit_rows_are_read_wide_whatever_the_alignment_of_the_gradient(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], wide: set[bool], shift: int
):
    seen: list[dict[str, Any]] = []
    launch = cuda.launch

    def noted(kernel: Any, *args: Any, **constants: Any) -> None:
        seen.append(constants)
        launch(kernel, *args, **constants)

    monkeypatch.setattr(cuda, "launch", noted)
    finals = []
    for backend in ("triton", "reference"):
        torch.manual_seed(5)
        size = shape[0] * shape[1]
        buffer = torch.randn(size + 1, device=DEVICE).to(BF16)
        p = nn.Parameter(torch.randn(shape, device=DEVICE).to(BF16))
        optimizer = AdamW([p], state_dtype="8bit", backend=backend)
        for _ in range(2):
            p.grad = buffer[shift : shift + size].view(shape)
            optimizer.step()
        finals.append(([p], optimizer))
    assert_same(*finals)
    found = {(c["ALIGNED"], c["GRAD_ALIGNED"]) for c in seen if "GRAD_ALIGNED" in c}
    assert found == {(each, each and shift == 0) for each in wide}


def test_a_tensor_that_int32_cannot_count(gpu: Machine):
    p = nn.Parameter(torch.zeros(gpu.huge, dtype=BF16, device=DEVICE))
    p.grad = torch.zeros_like(p)
    ends = torch.randn(2, 5000).to(DEVICE, BF16)
    p.grad[:5000], p.grad[-5000:] = ends
    optimizer = SGD([p], lr=1.0, master=None, backend="triton")
    assert float(optimizer.measure().amax) == float(ends.abs().max())
    optimizer.step()
    assert torch.equal(p[:5000], -ends[0])
    assert torch.equal(p[-5000:], -ends[1])
    assert not p[5000:6000].any()
    p.grad[-1] = float("nan")
    assert not bool(optimizer.measure().finite)


def test_steps_on_streams_of_their_own_equal_those_on_the_default_one(gpu: Machine):
    finals = []
    for beside in (False, True):
        params = parameters(BF16)
        optimizer = AdamW(params, backend="triton")
        for step in range(4):
            fill(params, step)
            if beside and step % 2:
                with gpu.side_stream():
                    optimizer.step(found_inf=~optimizer.measure().finite)
            else:
                optimizer.step(found_inf=~optimizer.measure().finite)
        finals.append((params, optimizer))
    gpu.synchronize()
    assert_same(*finals)


def two_groups() -> tuple[list[nn.Parameter], SGD]:
    params = [nn.Parameter(torch.full((8,), 60000.0, dtype=FP16, device=DEVICE)) for _ in "ab"]
    return params, SGD([{"params": [p]} for p in params], lr=1.0, backend="triton")


def flags_alive() -> tuple[int, int]:
    """Flags (0-d, bool or integer) that Python holds, on any device, and memory blocks of the device."""
    gc.collect()
    integers = (torch.bool, torch.uint8, torch.int32, torch.int64)
    flags = sum(type(t) is Tensor and t.dim() == 0 and t.dtype in integers for t in gc.get_objects())
    return flags, torch.cuda.memory_stats()["allocation.all.current"]


def assert_no_more_flags(before: tuple[int, int], most: int = 3) -> None:
    flags, blocks = (now - then for now, then in zip(flags_alive(), before))
    assert flags <= most
    assert blocks <= most


def test_flags_of_exact_fp16_masters_do_not_pile_up(gpu: Machine):
    params, optimizer = two_groups()

    def steps(many: int) -> None:
        for _ in range(many):
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()

    steps(3)
    before = flags_alive()
    steps(gpu.steps)
    assert_no_more_flags(before)


@pytest.mark.parametrize("which", [0, 1])
def test_a_weight_that_outgrows_its_exact_fp16_master_raises_within_two_steps(which: int):
    params, optimizer = two_groups()
    for step in range(7):
        for p in params:
            p.grad = torch.zeros_like(p)
        if step == 5:
            params[which].grad = torch.full_like(p, -60000)
        optimizer.step()
    with pytest.raises(MasterRangeError, match="65504"):
        optimizer.step()


def test_with_released_gradients_it_raises_as_soon_and_flags_do_not_pile_up():
    params = [nn.Parameter(torch.full((8,), 60000.0, dtype=FP16, device=DEVICE)) for _ in range(3)]
    optimizer = SGD(params, lr=1.0, backend="triton", release_gradients=True)

    def backward(factor: float) -> None:
        torch.stack([(p * factor).float().sum() for p in params]).sum().backward()

    def steps(many: int) -> None:
        for _ in range(many):
            backward(0.0)
            optimizer.step()

    steps(3)
    before = flags_alive()
    steps(6)
    assert_no_more_flags(before)
    backward(-60000.0)
    for _ in range(2):
        optimizer.step()
    with pytest.raises(MasterRangeError, match="65504"):
        optimizer.step()
