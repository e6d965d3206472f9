"""How much of a device's memory prepare, save and load take at most, in bytes of its allocator."""

import gc
import importlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import shardfiles
from halfstep.optim import compacted, master_link, split, storage
from halfstep.session.memory import footprint
from halfstep.torch_private import pytree

WIDTH, LAYERS = 32, 12
BESIDE = WIDTH * WIDTH * 4 + 8 * 512
"""Bytes of the largest weight, and of bounded parts of it: the allocator gives 512 bytes or more."""
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda p, **o: hs.optim.AdamW(p, backend="reference", **o),
    "SGD": lambda p, **o: hs.optim.SGD(p, lr=0.1, momentum=0.9, backend="reference", **o),
    "Muon": lambda p, **o: hs.optim.Muon(p, **o),
    "compact": lambda p, **o: hs.optim.compact(torch.optim.NAdam, p, foreach=False, **o),
    "torch AdamW": torch.optim.AdamW,
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
OWN = [{"state_dtype": "fp32"}, {"state_dtype": "8bit"}, {"state_dtype": "bf16", "master": "fp32"}]
ALL = [
    *itertools.product(("O1", "O2", "O3"), ("bf16", "fp16"), ("AdamW", "SGD"), OWN),
    *itertools.product(("O2",), ("bf16",), ("Muon", "compact"), OWN),
    *itertools.product(("O1", "O2", "O3"), ("bf16", "fp16"), ("torch AdamW", "torch SGD"), [{}]),
]
DAILY = ("O2", "bf16", "AdamW", {"state_dtype": "8bit"})
ALL.remove(("O3", "fp16", "torch AdamW", {}))  # whose second moments are zero in fp16, which load refuses


def taken() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def peak_of(act: Callable[[], Any]) -> int:
    taken()
    torch.cuda.reset_peak_memory_stats()
    act()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def run(level: str, dtype: str, optimizer: str, options: dict[str, Any]) -> tuple[Any, Any, int, int]:
    """A prepared model and its session; bytes of the model, and at the peak of `prepare`."""
    torch.manual_seed(0)
    before = taken()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    held = OPTIMIZERS[optimizer](model.parameters(), **options)
    made: list[Any] = []
    size = taken() - before
    peak = peak_of(lambda: made.append(hs.prepare(model, held, level=level, dtype=dtype))) - before
    return model, made[0], size, peak


def train(model: Any, amp: Any, width: int = WIDTH, updates: bool = True) -> None:
    for _ in range(2):
        with amp.autocast():
            loss = model(torch.ones(2, width, device="cuda")).float().square().mean()
        amp.backward(loss)
        if not updates:
            return
        amp.step()


def copied_to_host(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to("cpu", copy=True), tree)


def check(level: str, dtype: str, optimizer: str, options: dict[str, Any], folder: Path) -> None:
    start = taken()
    model, amp, size, peak = run(level, dtype, optimizer, options)
    prepared = taken() - start
    assert peak <= max(size, prepared) * 1.05 + BESIDE
    train(model, amp)
    rest = taken() - start
    assert peak_of(lambda: amp.save(folder)) - start <= rest * 1.05 + BESIDE
    before = [p.detach().clone() for p in model.parameters()]
    rest = taken() - start
    assert peak_of(lambda: amp.load(folder)) - start <= rest * 1.05 + BESIDE
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    del before
    [held] = amp.optimizers
    saved = copied_to_host(held.state_dict())
    rest = taken() - start
    if optimizer.startswith("torch"):
        held.state.clear()  # else it makes all states anew before it drops the old ones
    assert peak_of(partial(held.load_state_dict, saved)) - start <= rest * 1.05 + BESIDE
    weights = [p.detach().cpu() for p in model.parameters()]
    peak = peak_of(amp.revert) - start
    assert peak <= max(rest, taken() - start) * 1.05 + BESIDE
    assert all(torch.equal(a, b.to("cpu", a.dtype)) for a, b in zip(weights, model.parameters()))
    del saved, held, amp, model
    kept, amp, *_ = run(level, dtype, optimizer, options)
    peak = peak_of(lambda: amp.load(folder)) - start
    assert peak <= (taken() - start) * 1.05 + BESIDE
    assert next(kept.parameters()).is_cuda


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch):
    """What is bounded is bounded in proportion to the model."""
    monkeypatch.setattr(split, "_AT_ONCE", 128)
    monkeypatch.setattr(shardfiles, "AT_ONCE", 1024)
    monkeypatch.setattr(master_link, "_AT_ONCE", WIDTH * WIDTH)
    monkeypatch.setattr(compacted, "BUCKET", 2 * WIDTH * WIDTH)
    monkeypatch.setattr(storage, "JOINED", 16 * WIDTH * WIDTH)
    monkeypatch.setattr(importlib.import_module("halfstep.optim.resolution"), "SAMPLE", 128)


@pytest.mark.parametrize(
    ("level", "dtype", "optimizer", "options"),
    [pytest.param(*row, marks=() if row == DAILY else pytest.mark.exhaustive) for row in ALL],
)
def test_peaks(level: str, dtype: str, optimizer: str, options: dict[str, Any], tmp_path: Path):
    check(level, dtype, optimizer, options, tmp_path / "run")


FUSED: dict[str, Callable[..., Any]] = {
    "torch AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize(
    ("level", "dtype", "optimizer", "options"),
    [pytest.param(*row, marks=() if row == DAILY else pytest.mark.exhaustive) for row in ALL],
)
def test_the_bytes_that_the_command_counts(
    level: str, dtype: str, optimizer: str, options: dict[str, Any], tmp_path: Path, monkeypatch: Any
):
    width, make = 4 * WIDTH, FUSED.get(optimizer, OPTIMIZERS[optimizer])

    def model_on(device: str) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(2 * LAYERS)))

    empty = model_on("meta")
    counted = footprint([empty], [make(empty.parameters(), **options)], level, dtype)
    monkeypatch.setattr(split, "_AT_ONCE", width * width // 16)
    start, found = taken(), dict[str, int]()
    model = model_on("cuda")
    held, made = make(model.parameters(), **options), list[Any]()
    found["prepare"] = peak_of(lambda: made.append(hs.prepare(model, held, level=level, dtype=dtype))) - start
    amp = made[0]
    train(model, amp, width)
    own = optimizer in OPTIMIZERS and optimizer not in FUSED
    # Plain torch updates by temporaries, which kernels do without; before it all gradients are there.
    found["step"] = peak_of(lambda: train(model, amp, width, not own or optimizer == "compact")) - start
    held.zero_grad()
    found["at_rest"] = taken() - start
    found["save"] = peak_of(lambda: amp.save(tmp_path / "run")) - start
    found["load"] = peak_of(lambda: amp.load(tmp_path / "run")) - start
    near = 0.1 if optimizer == "compact" else 0.05  # rounding to 8 bits takes temporaries
    assert {k: getattr(counted, k) for k in found} == {k: pytest.approx(v, near) for k, v in found.items()}


def test_gradients_that_are_widened_are_not_all_held_twice():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).bfloat16().cuda()
    masters = hs.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(2, WIDTH, device="cuda", dtype=torch.bfloat16)).sum().backward()
    before = taken()
    peak = peak_of(masters.copy_grads)
    assert taken() - before == LAYERS * WIDTH * WIDTH * 2
    assert peak <= taken() + BESIDE


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_a_step_takes_no_more_than_in_fp32_under_autocast(kind: str, foreach: bool):
    peaks = dict[str, int]()
    for level in ("O0", "O2"):
        start = taken()
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, foreach=foreach)
        amp = hs.prepare(model, optimizer, level=level)

        def step(model: Any = model, amp: Any = amp, plain: bool = level == "O0") -> None:
            region = torch.autocast("cuda", torch.bfloat16) if plain else amp.autocast()
            with region:
                loss = model(torch.ones(2, WIDTH, device="cuda")).float().square().mean()
            amp.backward(loss)
            amp.step()

        step()
        peaks[level] = peak_of(step) - start
        del model, optimizer, amp, step
    assert peaks["O2"] <= peaks["O0"]
