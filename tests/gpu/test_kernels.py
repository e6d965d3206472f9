"""What the Triton kernels must do: equal the reference bit for bit, on a GPU or in Triton's interpreter."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import MasterRangeError, UnsupportedError
from halfstep.gradients.decision import Clip
from halfstep.optim import SGD, Adam, AdamW, Lion
from halfstep.optim.backends import Backends
from halfstep.optim.backends import triton as cuda
from tests.gpu.machine import DEVICE, Machine

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KEPT: dict[str, list[tuple[torch.dtype, str | None]]] = {
    "fp32": [(FP32, None)],
    "bf16": [(BF16, "exact"), (BF16, "fp32"), (BF16, "stochastic"), (BF16, None)],
    "fp16": [(FP16, "exact"), (FP16, "fp32"), (FP16, None)],
}
WEIGHTS = [row for rows in KEPT.values() for row in rows]
ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 0.01}),
    "Adam": (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "Nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Lion": (Lion, {"weight_decay": 0.1}),
}
STATES = ("fp32", "bf16", "8bit")


def rows() -> Iterator[Any]:
    """Every combination: a third, in which every pair meets, in the long run, half of those in the fast."""
    for a, w, s in itertools.product(range(len(ALGORITHMS)), range(len(WEIGHTS)), range(len(STATES))):
        name, weights, state = list(ALGORITHMS)[a], WEIGHTS[w], STATES[s]
        met = (a + w + s) % 3 == 0
        marks = () if met and a // 3 == (w + s) % 2 else pytest.mark.long if met else pytest.mark.exhaustive
        label = f"{name}-{weights[0]}-{weights[1]}-{state}".replace("torch.", "")
        yield pytest.param(name, weights, state, marks=marks, id=label)


@pytest.fixture(autouse=True)
def _tiles_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """The false device makes them as large as items."""
    monkeypatch.setattr(cuda, "TILE", 1024)


def there(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=DEVICE)


def bits(t: Tensor) -> Tensor:
    return t.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, any NaN being as good as another."""
    if a.is_floating_point() and bool(a.isnan().any()):
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(bits(a)[~a.isnan()], bits(b)[~b.isnan()])
    return torch.equal(bits(a), bits(b))


def assert_same(ours: Any, reference: Any) -> None:
    for p, q in zip(ours[0], reference[0], strict=True):
        assert same(p, q)
        mine, theirs = ours[1].state[p], reference[1].state[q]
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert same(value, theirs[key]), key


def random_grads(sizes: tuple[Any, ...], dtype: torch.dtype, steps: int) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [
        [
            (torch.randn(n, generator=g) * 10 ** (torch.rand(n, generator=g) * 7 - 7)).to(DEVICE, dtype)
            for n in sizes
        ]
        for _ in range(steps)
    ]


def run(backend: str, name: str, values: list[Tensor], grads: list[list[Tensor]], **options: Any) -> Any:
    """Take a step for each set of gradients, the second one skipped; parameters and optimizer."""
    cls, given = ALGORITHMS[name]
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = cls(params, backend=backend, **{**given, **options})
    for step, now in enumerate(grads):
        for p, g in zip(params, now):
            p.grad_dtype, p.grad = None, g.clone()
        optimizer.step(inv_scale=0.5, clip_coef=there(0.7), found_inf=there(step == 1))
    return params, optimizer


def values_of(sizes: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=g).to(DEVICE, dtype) for n in sizes]


@pytest.mark.parametrize(("name", "weights", "state_dtype"), list(rows()))
def test_update_equals_reference(gpu: Machine, name: str, weights: Any, state_dtype: str):
    dtype, master = weights
    few = gpu.sizes if name == "AdamW" and master == "exact" else ((2, 513), 1026)
    values, grads = values_of(few, dtype), random_grads(few, dtype, 3)
    options = {"master": master, "state_dtype": state_dtype}
    assert_same(*(run(backend, name, values, grads, **options) for backend in ("triton", "reference")))


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_update_without_bias_correction_equals_reference(name: str):
    values, grads = values_of((1026,), BF16), random_grads((1026,), BF16, 3)
    results = [run(b, name, values, grads, bias_correction=False) for b in ("triton", "reference")]
    assert_same(*results)
    assert not same(results[0][0][0], run("triton", name, values, grads)[0][0])


def awkward() -> Tensor:
    """fp32 values at ties, ends of formats, subnormals, zeros, infinities and NaN."""
    patterns = [
        0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF,
        0x7F7F8000, 0x7F800000, 0x7FC00000, 0x00000000, 0x33000000, 0x33000001, 0x387FE000, 0x37800000,
        0x38802000, 0x477FE000, 0x3A83126F, 0x3F801000, 0x3F803000, 0x00018000, 0x2B8CBCCC, 0x36B16000,
        0x7FFFFFFF, 0x7FFF8000,
    ]  # fmt: skip
    positive = there(patterns, torch.int64)
    return torch.cat([positive, positive - 2**31]).to(torch.int32).view(FP32)


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_awkward_values_equal_reference(weights: Any, state_dtype: str):
    dtype, master = weights
    special = awkward()
    if dtype == FP16 and master == "exact":
        special = special[special.abs() < 6e4]
    values = [special.to(dtype), special.to(dtype).view(1, -1)]
    grads = [[special.flip(0), special.roll(3).view(1, -1)]] * 2
    options = {"lr": 2.0**-12, "master": master, "state_dtype": state_dtype}
    assert_same(*(run(backend, "AdamW", values, grads, **options) for backend in ("triton", "reference")))


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_weights_that_land_on_ties_and_ends_are_stored_as_the_reference_stores_them(weights: Any):
    dtype, master = weights
    goal = awkward()
    goal = goal[goal.isfinite() & (goal.abs() < (6e4 if dtype == FP16 else 3.3e38))]
    finals = []
    for backend in ("triton", "reference"):
        p = nn.Parameter(goal.to(dtype))
        optimizer = SGD([p], lr=1.0, master=master, backend=backend)
        p.grad_dtype, p.grad = None, p.detach().float() - goal  # exact: the two are close
        optimizer.step()
        finals.append(([p], optimizer))
        if master == "fp32" or (master == "exact" and dtype == BF16):
            assert torch.equal(optimizer.master_of(p), goal)
    assert_same(*finals)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_16_bit_pattern_is_read_and_written_as_it_was(dtype: torch.dtype):
    pattern = torch.arange(-32768, 32768, dtype=torch.int32, device=DEVICE).to(torch.int16).view(dtype)
    options = {"lr": 0.0, "weight_decay": 0.0, "maximize": False, "master": None}
    params, _ = run("triton", "SGD", [pattern], [[torch.zeros_like(pattern)]], **options)
    finite = pattern.isfinite()
    assert torch.equal(params[0].isfinite(), finite)
    assert same(params[0][finite], pattern[finite])


def test_a_weight_beyond_fp16_is_held_and_said_two_steps_late():
    p = nn.Parameter(there([1.0, 65000.0, -65000.0], FP16))
    optimizer = SGD([p], lr=1.0, backend="triton")
    p.grad = there([0.0, -2000.0, 2000.0], FP16)
    optimizer.step()
    assert p.tolist() == [1.0, 65504.0, -65504.0]
    p.grad = torch.zeros_like(p)
    optimizer.step()
    with pytest.raises(MasterRangeError, match="65504"):
        optimizer.step()
    optimizer.step()


def test_groups_mixed_gradients_and_a_learning_rate_on_the_device():
    values, grads = values_of(((1, 57), 40, 3000, 5), BF16), random_grads(((1, 57), 40, 3000, 5), FP32, 4)
    finals = []
    for backend in ("triton", "reference"):
        params = [nn.Parameter(v.clone()) for v in values[:3]] + [nn.Parameter(values[3].float())]
        groups = [
            {"params": [params[0], params[3]], "weight_decay": 0.0, "state_dtype": "8bit"},
            {"params": params[1:3], "lr": there(0.003)},
        ]
        optimizer = AdamW(groups, lr=0.01, backend=backend)
        for step, now in enumerate(grads):
            for i, (p, g) in enumerate(zip(params, now)):
                p.grad_dtype = None
                p.grad = None if (i + step) % 3 == 0 else g.to(BF16 if i == 1 else FP32)
            optimizer.step(clip_coef=0.5)
            optimizer.param_groups[1]["lr"].mul_(0.9)
            optimizer.param_groups[0]["lr"] *= 0.8
        finals.append((params, optimizer))
    assert_same(*finals)


def test_gradients_that_are_not_aligned_are_read_all_the_same():
    values, whole = values_of((2048, 100), BF16), random_grads((4097,), BF16, 1)[0][0]
    finals = []
    for backend in ("triton", "reference"):
        params = [nn.Parameter(v.clone()) for v in values]
        optimizer = AdamW(params, backend=backend)
        params[0].grad, params[1].grad = whole[1:2049], whole[2049:2149]
        assert float(optimizer.measure().amax) == float(whole[1:2149].abs().max())
        optimizer.step()
        finals.append((params, optimizer))
    assert_same(*finals)


def test_tables_are_kept_while_addresses_stay(monkeypatch: pytest.MonkeyPatch):
    sent: list[int] = []
    upload = cuda.upload
    monkeypatch.setattr(cuda, "upload", lambda *a: sent.append(len(a[0])) or upload(*a))
    p = nn.Parameter(torch.zeros(10, dtype=BF16, device=DEVICE))
    first, second = torch.ones_like(p), torch.ones_like(p)
    optimizer = AdamW([p], backend="triton")
    p.grad = first
    for _ in range(3):
        optimizer.measure()
        optimizer.step()
    assert len(sent) == 5  # items and gradients to measure; table, items, gradients with settings to update
    p.grad = second
    optimizer.measure()
    optimizer.step()
    assert sent[5:] == [1, 7]
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert sent[7:] == [7]


def test_a_graph_keeps_its_tables_and_eager_steps_keep_theirs(monkeypatch: pytest.MonkeyPatch):
    """What capture does to the tables, with a flag in place of a capturing stream."""
    values, grads = values_of((40, 5), FP32), random_grads((40, 5), FP32, 3)
    moved = [g.clone() for g in grads[0]]
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = SGD(params, lr=1.0, backend="triton")
    plans = optimizer._backends.triton.plans
    monkeypatch.setattr(cuda, "capturing", lambda device: True)
    params[0].grad, params[1].grad = grads[0]
    with pytest.raises(UnsupportedError, match="take a few steps first"):
        optimizer.step()
    monkeypatch.setattr(cuda, "capturing", lambda device: False)
    optimizer.step()
    assert plans._captured == []
    monkeypatch.setattr(cuda, "capturing", lambda device: True)
    params[0].grad, params[1].grad = moved
    for _ in range(2):  # the second finds no pinned memory kept for it
        optimizer.step()
    places = [g.data_ptr() for g in moved]
    tables = [t for t in plans._captured if isinstance(t, Tensor) and t.tolist()[:2] == places]
    assert len(tables) == 4  # twice the pinned side and the device's
    monkeypatch.setattr(cuda, "capturing", lambda device: False)
    params[0].grad, params[1].grad = grads[0]
    optimizer.step()
    for p, v, g in zip(params, values, grads[0]):
        assert torch.equal(p, v - g - g - g - g)
    assert all(t.tolist()[:2] == places for t in tables)


# ---- the measurement ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-22, 2e18, 1e-42])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_measure_equals_float64(dtype: torch.dtype, scale: float):
    g = torch.Generator().manual_seed(5)
    scale = min(scale, 1e4) if dtype == FP16 else scale
    grads = [(torch.randn(n, generator=g) * scale).to(DEVICE, dtype) for n in (1, 7, 1024, 34_000)]
    plans = cuda.Plans()
    stats = plans.measure(grads, 0.5)
    wide = torch.cat(grads).double() * 0.5
    assert stats.norm.item() == pytest.approx(wide.norm().item(), rel=1e-6, abs=2.0**-149)
    assert stats.amax.item() == pytest.approx(wide.abs().max().item(), rel=1e-7, abs=2.0**-149)
    assert stats.finite.dtype == torch.bool
    assert bool(stats.finite)
    again = plans.measure([t.clone() for t in grads], there(0.5))
    assert same(again.norm, stats.norm)


def test_measure_of_mixed_dtypes():
    grads = [torch.full((3,), 2.0, dtype=dtype, device=DEVICE) for dtype in (BF16, FP16, FP32)]
    stats = cuda.Plans().measure(grads, None)
    assert stats.norm.item() == 6.0
    assert stats.amax.item() == 2.0


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 1023, 1500])
def test_measure_sees_one_bad_value(dtype: torch.dtype, bad: float, place: int):
    good, grad = (torch.ones(n, dtype=dtype, device=DEVICE) for n in (10, 1501))
    grad[place] = bad
    stats = cuda.Plans().measure([good, grad, good.float()], 1.0)
    assert not bool(stats.finite)
    assert not torch.isfinite(stats.amax)
    assert not torch.isfinite(stats.norm)


# ---- the loss scale -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale",
    [
        hs.DynamicLossScale(init=2.0**15, interval=2),
        hs.DynamicLossScale(3.0, growth=1.1, backoff=0.3, interval=3, hysteresis=2, min=2.0**-20),
        hs.DynamicLossScale(2.0**126, growth=1e30, interval=1, min=2.0**-126, max=2.0**127),
        hs.DynamicLossScale(1.0, backoff=0.7, interval=2**40, hysteresis=3),
    ],
    ids=str,
)
def test_the_loss_scale_on_the_device_is_the_one_of_the_host(gpu: Machine, scale: hs.DynamicLossScale):
    g = torch.Generator().manual_seed(9)
    host = device = scale
    device = device.adjust(there(True))
    host = host.adjust(True)
    for finite in (torch.rand(120, generator=g) < 0.7).tolist():
        host, flag = host.adjust(finite), there(finite)
        with gpu.no_waiting():
            device = device.adjust(flag)
        assert (device.read(), int(device.clean), int(device.overflows)) == (
            host.read(), host.clean, host.overflows,
        )  # fmt: skip
        assert same(device.inverse(), host.inverse(DEVICE))
        assert hs.LossScale.from_state(device.state_dict()) == host


def test_the_next_loss_scale_is_one_launch(gpu: Machine):
    scale, flag = hs.DynamicLossScale().adjust(there(True)), there(False)
    assert gpu.launches(lambda: scale.adjust(flag).inverse()) == ["adjusted"]


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 7.1, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("limit", [1, 0.37])
def test_a_clipped_step_equals_the_reference(norm: float, limit: float):
    grads = random_grads((1030,), BF16, 1)[0][0]
    finals = []
    for backend in ("triton", "reference"):
        p = nn.Parameter(values_of((1030,), FP32)[0])
        optimizer = SGD([p], lr=1.0, backend=backend)
        p.grad_dtype, p.grad = None, grads
        optimizer.step(inv_scale=there(0.25), clip_coef=Clip(there(norm), limit))
        finals.append(p.detach())
    assert same(*finals)


# ---- whole runs -----------------------------------------------------------------------------------------


def trained(backend: str, steps: int, **options: Any) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.LayerNorm(20, bias=False), nn.Linear(20, 3, bias=False)).to(
        DEVICE
    )
    optimizer = AdamW(net.parameters(), lr=1e-2, backend=backend, **options)
    dtype = "fp16" if "master" in options else "bf16"
    session = hs.prepare(net, optimizer, level="O2", dtype=dtype, skip_nonfinite=True)
    x, y = torch.randn(16, 6).to(DEVICE), torch.randint(0, 3, (16,)).to(DEVICE)
    losses = []
    for step in range(steps):
        with session.autocast():
            loss = nn.functional.cross_entropy(net(x), y)
        session.backward(loss * (float("inf") if step == 3 else 1.0))
        session.step()
        losses.append(float(loss.detach()))
    return losses, (list(net.parameters()), optimizer)


@pytest.mark.parametrize("steps", [7, pytest.param(20, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "options", [{}, {"state_dtype": "8bit"}, {"release_gradients": True}, {"master": "fp32"}], ids=str
)
def test_training_steps_equal_the_reference(options: dict[str, Any], steps: int):
    mine, theirs = trained("triton", steps, **options), trained("reference", steps, **options)
    assert mine[0] == theirs[0]
    assert_same(mine[1], theirs[1])


def test_exact_masters_equal_fp32_masters():
    values, grads = values_of((1030,), BF16), random_grads((1030,), BF16, 4)
    exact, wide = (run("triton", "AdamW", values, grads, master=m) for m in ("exact", "fp32"))
    assert same(exact[0][0], wide[0][0])
    assert same(exact[1].master_of(exact[0][0]), wide[1].master_of(wide[0][0]))


def kind_for(choice: str, device: torch.device) -> str:
    return type(Backends().of(choice, device)).__name__


def test_what_runs_by_default():
    on_cuda = DEVICE.type == "cuda"
    assert kind_for("auto", DEVICE) == ("Triton" if on_cuda else "Numba")
    assert kind_for("auto", torch.device("cpu")) == "Numba"
    assert kind_for("triton", DEVICE) == "Triton"
