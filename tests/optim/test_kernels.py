"""The compiled CPU kernels equal the plain torch reference bit for bit, random rounding included."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import HalfstepWarning
from halfstep.kernels.cpu import run as compiled
from halfstep.optim import SGD, Adam, AdamW, Lion
from halfstep.optim.bundles import TensorGroup

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = ((0,), (1,), (7,), (128,), (1, 1000), (2049,), (1, 70001), (3, 33), (90, 1030), (70, 16))
ROWS: list[tuple[Any, dict[str, Any], torch.dtype, str | None, torch.dtype, str]] = [
    (AdamW, {}, BF16, "exact", BF16, "fp32"),
    (AdamW, {}, BF16, "exact", BF16, "bf16"),
    (AdamW, {"maximize": True}, BF16, "exact", BF16, "8bit"),
    (AdamW, {}, BF16, "fp32", BF16, "fp32"),
    (AdamW, {}, BF16, None, FP32, "fp32"),
    (AdamW, {}, BF16, "stochastic", BF16, "8bit"),
    (AdamW, {}, FP16, "exact", FP16, "fp32"),
    (AdamW, {}, FP32, None, FP32, "fp32"),
    (Adam, {"weight_decay": 0.1}, FP16, None, FP16, "bf16"),
    (SGD, {"lr": 0.1, "weight_decay": 0.1}, BF16, "exact", BF16, "8bit"),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, BF16, "exact", BF16, "8bit"),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, FP16, "fp32", FP16, "fp32"),
    (Lion, {"weight_decay": 0.1}, BF16, "exact", BF16, "8bit"),
]


def bits(t: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return t.detach().view(kinds[t.element_size()])


def run(backend: str, cls: Any, options: dict[str, Any], dtype: torch.dtype, grad_dtype: torch.dtype) -> Any:
    g = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(n, generator=g).to(dtype)) for n in SHAPES]
    optimizer = cls(params, backend=backend, **options)
    for step in range(4):
        for p in params:
            p.grad_dtype = None
            spread = 10 ** (torch.rand(p.shape, generator=g) * 7 - 7)
            p.grad = (torch.randn(p.shape, generator=g) * spread).to(grad_dtype)
        optimizer.step(inv_scale=0.5, clip_coef=torch.tensor(0.7), found_inf=step == 2)
    return params, optimizer


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda r: f"{r[0].__name__}-{r[2]}-{r[3]}-{r[5]}".replace("torch.", "")
)
def test_kernels_equal_reference(row: Any):
    cls, options, dtype, master, grad_dtype, state_dtype = row
    options = {**options, "master": master, "state_dtype": state_dtype}
    ours, optimizer = run("auto", cls, options, dtype, grad_dtype)
    plain, reference = run("reference", cls, options, dtype, grad_dtype)
    for p, q in zip(ours, plain):
        assert torch.equal(bits(p), bits(q))
        assert optimizer.state[p].keys() == reference.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert torch.equal(bits(value), bits(reference.state[q][key])), key


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {}),
    (AdamW, {"master": "stochastic"}),
    (Adam, {"weight_decay": 0.1}),
    (SGD, {"momentum": 0.9}),
    (SGD, {}),
    (Lion, {}),
    (Lion, {"master": None}),
]


def stepped(
    backend: str, shape: Any, seed: int, cls: Any, options: dict[str, Any], state: str, awkward: bool
):
    """A weight and its state after a step from random bits: any weight, lacking bits, gradient and state."""
    g = torch.Generator().manual_seed(seed)

    def any_bits(like: Tensor) -> Tensor:
        few = torch.randint(-1 << 15, 1 << 15, like.shape, generator=g).to(torch.int16)
        tame = torch.randn(like.shape, generator=g).bfloat16().view(torch.int16)
        return few if awkward else torch.where(torch.rand(like.shape, generator=g) < 1e-3, few, tame)

    p = nn.Parameter(torch.zeros(shape, dtype=BF16))
    optimizer = cls([p], lr=2.0**-9, state_dtype=state, backend=backend, **options)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    p.detach().view(torch.int16).copy_(any_bits(p))
    p.grad.view(torch.int16).copy_(any_bits(p))
    for key, value in optimizer.state[p].items():
        if key == "lacking" or value.dtype == BF16:
            value.view(torch.int16).copy_(any_bits(value))
        elif key.endswith("_exponents"):
            value.copy_(
                torch.randint(40 if awkward else 100, 256 if awkward else 140, value.shape, generator=g)
            )
        elif value.dtype == torch.uint8:
            value.copy_(torch.randint(0, 256, value.shape, generator=g))
        if key == "exp_avg_sq":
            value.abs_()
    optimizer.step(inv_scale=1.0 if awkward else 0.37)
    return {"weight": p.detach(), **optimizer.state[p]}


def assert_same_bits(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for key, value in ours.items():
        nan = value.isnan() & plain[key].isnan()
        assert torch.equal(bits(value).masked_fill(nan, 0), bits(plain[key]).masked_fill(nan, 0)), key


@pytest.mark.parametrize("state", ["bf16", "8bit"])
@pytest.mark.parametrize(("cls", "options"), KINDS, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("awkward", [True, False], ids=["awkward", "tame"])
def test_any_bits_are_stepped_as_by_the_reference(
    cls: Any, options: dict[str, Any], state: str, awkward: bool
):
    """Weights, gradients, codes and exponents: NaN, inf, numbers below the normal, alone among good ones."""
    for seed, shape in enumerate([(64, 1024), (5, 1030)]):
        args = (shape, seed, cls, options, state, awkward)
        assert_same_bits(stepped("auto", *args), stepped("reference", *args))


@pytest.mark.exhaustive
@pytest.mark.parametrize("state", ["bf16", "8bit"])
@pytest.mark.parametrize(("cls", "options"), KINDS, ids=lambda x: getattr(x, "__name__", ""))
def test_ten_million_of_any_bits_are_stepped_as_by_the_reference(
    cls: Any, options: dict[str, Any], state: str
):
    for seed in range(160):
        args = ((64, 1024), seed, cls, options, state, seed % 2 == 0)
        assert_same_bits(stepped("auto", *args), stepped("reference", *args))


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_rows_of_every_length_are_stepped_as_by_the_reference(state: str):
    """Around the panels of 64 and the blocks of 512, and parts of one by themselves."""
    lengths = [*range(16, 200, 3), *range(505, 520), 575, 577, 1087]
    kept: list[list[Tensor]] = []
    for backend in ("auto", "reference"):
        g = torch.Generator().manual_seed(2)
        params = [nn.Parameter(torch.randn(3, n, generator=g).bfloat16()) for n in lengths]
        optimizer = AdamW(params, state_dtype=state, backend=backend)
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).bfloat16()
        optimizer.step()
        kept.append([t for p in params for t in (p, *optimizer.state[p].values())])
    assert all(torch.equal(bits(ours), bits(plain)) for ours, plain in zip(*kept))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("state", "shape", "part"),
    [("bf16", (1000,), (37, 701)), ("bf16", (1000,), (64, 90)), ("8bit", (6, 1030), (2, 5))],
)
def test_a_part_has_the_random_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, backend: str, state: str, shape: tuple[int, ...], part: tuple[int, int]
):
    g = torch.Generator().manual_seed(4)
    weight, grad = (torch.randn(shape, generator=g).bfloat16() for _ in range(2))
    found: list[dict[str, Tensor]] = []
    for first, last in ((0, shape[0]), part):
        p = nn.Parameter(weight[first:last].clone())
        at = first * weight[0].numel()
        monkeypatch.setattr(TensorGroup, "origins", lambda _, at=at: [at])
        optimizer = AdamW([p], lr=0.1, state_dtype=state, backend=backend)
        for _ in range(2):
            p.grad = grad[first:last].clone()
            optimizer.step()
        found.append({"weight": p.detach(), **optimizer.state[p]})
    whole, own = found
    for key, value in own.items():
        assert torch.equal(bits(value), bits(whole[key] if key == "step" else whole[key][slice(*part)])), key


def stats_of(grads: list[Tensor], inv_scale: float) -> tuple[float, ...]:
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads):
        p.grad = g
    return tuple(map(float, SGD(params).measure(inv_scale)))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_measure_equals_float64(dtype: torch.dtype):
    g = torch.Generator().manual_seed(5)
    grads = [(torch.randn(n, generator=g) * 3e-3).to(dtype) for n in (1, 63, 64, 1000, 200_003)]
    finite, norm, amax = stats_of(grads, 0.5)
    wide = torch.cat(grads).double() * 0.5
    assert norm == pytest.approx(wide.norm().item(), rel=1e-6)
    assert amax == pytest.approx(wide.abs().max().item(), rel=1e-7)
    assert finite


@pytest.mark.parametrize("small", [0.0, 1e-40, 2.0**-126, 1e-20, 2.0**-33, 2.0**-32, 1.0])
@pytest.mark.parametrize("large", [0.0, 2.0**-32, 3e-3, 1e30])
def test_squares_of_bf16_are_added_in_float64_whatever_their_size(small: float, large: float):
    # 4099: whole words of four and three more, in two runs of which the second holds nothing large
    grad = torch.full((4099,), small).to(BF16) * (torch.arange(4099) % 3 - 1)
    grad[:1024:5] = large
    items = compiled.WorkItems((4099,))
    table = np.zeros((3, 1), np.int64)
    table[2] = grad.data_ptr()
    kernel = compiled.kernels().measurer(compiled.GRADS[BF16], compiled.kernels().WIDE)
    kernel(0, len(items.sizes), items.items, table, items.found)
    squares, peaks, _ = items.found
    assert squares.sum() == pytest.approx(grad.double().square().sum().item(), rel=1e-14, abs=0)
    assert peaks.max() == grad.abs().max().item()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 64, 999])
def test_measure_sees_one_bad_value(dtype: torch.dtype, bad: float, place: int):
    good, grad = torch.ones(70_000, dtype=dtype), torch.ones(1000, dtype=dtype)
    grad[place] = bad
    finite, _, amax = stats_of([good, grad], 1.0)
    assert not finite
    assert not math.isfinite(amax)


def test_half_conversions_equal_torch_for_every_pattern():
    # Through a weight with lr 0: reading, computing and writing back must give the same 16 bits.
    pattern = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for dtype in (BF16, FP16):
        p = nn.Parameter(pattern.view(dtype).clone())
        optimizer = SGD([p], lr=0.0, master=None)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        finite, nan = pattern.view(dtype).isfinite(), pattern.view(dtype).isnan()
        assert torch.equal(bits(p)[finite], pattern[finite])
        assert bool(p[nan].isnan().all())


def test_threads_share_the_work_and_agree(monkeypatch: pytest.MonkeyPatch):
    row = ROWS[2]
    options = {**row[1], "master": row[3], "state_dtype": row[5]}
    alone, _ = run("auto", row[0], options, row[2], row[4])
    calls: list[int] = []
    submit = compiled.ThreadPoolExecutor.submit

    def count(self: Any, *args: Any) -> Any:
        calls.append(1)
        return submit(self, *args)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiled.ThreadPoolExecutor, "submit", count)
    shared, _ = run("auto", row[0], options, row[2], row[4])
    assert calls
    for p, q in zip(alone, shared):
        assert torch.equal(bits(p), bits(q))


def test_without_numba_the_reference_runs_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    expected, _ = run("reference", AdamW, {}, BF16, BF16)
    monkeypatch.setitem(sys.modules, "halfstep.kernels.cpu.models", None)
    monkeypatch.delattr("halfstep.kernels.cpu.models", raising=False)  # loaded only where a kernel ran
    compiled.kernels.cache_clear()
    try:
        with pytest.warns(HalfstepWarning, match="pip install numba") as said:
            params, _ = run("auto", AdamW, {}, BF16, BF16)
        assert len(said) == 1
    finally:
        compiled.kernels.cache_clear()
    for p, q in zip(params, expected):
        assert torch.equal(bits(p), bits(q))


def test_who_waits_for_the_compiler_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from halfstep.kernels.cpu import bits as kernels

    monkeypatch.setattr(kernels, "PATIENCE", -1.0)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    for expected in ("halfstep: compiled a kernel in 0 s; the next run finds it on disk\n", ""):
        twice = kernels.compiled("int64(int64)", "twice")(lambda x: 2 * x)
        assert twice(21) == 42
        assert capsys.readouterr().err == expected


@pytest.mark.long
def test_a_second_process_compiles_nothing(tmp_path: Path):
    """The next finds on disk what one compiled: updates with a look and without, looks."""
    script = (
        "import torch, halfstep as hs\n"
        "from halfstep.gradients.decision import Decision\n"
        "p = torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16))\n"
        "p.grad = torch.ones_like(p)\n"
        "optimizer = hs.optim.SGD([p])\n"
        "optimizer.step(); optimizer.step(decision=Decision(), measures=True); optimizer.measure()\n"
    )
    said: list[str] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_DEBUG_CACHE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout)
    assert said[0].count("data saved") > 2
    assert said[1].count("data loaded") == said[0].count("data saved")
    assert "saved" not in said[1]
