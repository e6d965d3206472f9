"""Plain torch steps the parameters of a group together: the bits of each alone, in launches that do not grow.

On CUDA, the false device's too, the tensors lie there; elsewhere a CPU runs what accelerators run.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import HalfstepWarning, UnsupportedError
from halfstep.gradients.decision import Clip, Decision
from halfstep.kernels.cuda import launch as cuda
from halfstep.optim import SGD, Adam, AdamW, Lion, storage
from halfstep.optim.backends import Backends
from halfstep.optim.backends.reference import by_reference
from halfstep.optim.bundles import tensor_groups_of
from tests import falsecuda

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALGORITHMS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {}),
    (Adam, {"weight_decay": 0.1, "maximize": True}),
    (AdamW, {"bias_correction": False, "lr": torch.tensor(0.01)}),
    (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (Lion, {"weight_decay": 0.1}),
    (AdamW, {"amsgrad": True}),
]
WEIGHTS = [
    *((BF16, master) for master in ("exact", "fp32", "stochastic", None)),
    *((FP16, master) for master in ("exact", "fp32", None)),
    (FP32, None),
]
STATES = ("fp32", "bf16", "8bit")
SHAPES = ((7,), (0,), (3, 33), (128,), (2, 1030), (16, 33), (1, 1000), (4, 33), (2, 16, 3, 3))
ROWS = list(product(range(len(ALGORITHMS)), range(len(WEIGHTS)), range(len(STATES))))
PAIRS = [(a, w, s) for a, w, s in ROWS if s == (a + w) % len(STATES)]  # every two of the three together


def weights(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in SHAPES]
    made[-1] = made[-1].to(memory_format=torch.channels_last)
    return {f"p{i}": nn.Parameter(t) for i, t in enumerate(made)}


def fill(params: dict[str, nn.Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(step)
    for i, p in enumerate(params.values()):
        spread = 10 ** (torch.rand(p.shape, generator=g) * 7 - 7)
        grad = (torch.randn(p.shape, generator=g) * spread).to(DEVICE, p.dtype)
        p.grad = None if i == 3 and step == 1 else torch.empty_like(p).copy_(grad)  # counts of steps differ
    if step == 3:
        params["p4"].grad.view(-1)[5] = float("nan")


def kind_for(choice: str) -> str:
    return type(Backends().of(choice, torch.device("cuda"))).__name__


def as_on_a_device(optimizer: Any, inv_scale: Any, clip: Any, skip: Tensor | bool) -> None:
    """What an accelerator runs, whatever the device is: nothing may be read."""
    decision = Decision(inv_scale, [clip] * len(optimizer.param_groups), skip)
    for bundle in tensor_groups_of(optimizer.param_groups, optimizer.algorithm):
        by_reference(bundle.collect(optimizer.state), decision, optimizer.seed)


def steps(row: tuple[int, int, int], together: bool, device_path: bool) -> list[Tensor]:
    """The bytes of weights and states after four steps, one of them skipped."""
    (cls, options), (dtype, master) = ALGORITHMS[row[0]], WEIGHTS[row[1]]
    states = "fp32" if options.get("amsgrad") else STATES[row[2]]
    params = weights(dtype)
    groups = [params] if together else [{name: p} for name, p in params.items()]
    optimizer = cls(
        [{"params": list(group.items())} for group in groups],
        backend="reference",
        master=master,
        state_dtype=states,
        **options,
    )
    for step in range(4):
        fill(params, step)
        skip = torch.full((), step == 2, device=DEVICE)
        if device_path:
            as_on_a_device(optimizer, torch.full((), 0.5, device=DEVICE), None, skip)
        else:
            optimizer.step(inv_scale=0.5, clip_coef=torch.tensor(0.7), found_inf=step == 2)
    kept = [*params.values(), *(v for p in params.values() for v in optimizer.state[p].values())]
    return [t.detach().flatten().view(torch.uint8).cpu() for t in kept if isinstance(t, Tensor)]


def same(row: tuple[int, int, int], device_path: bool) -> None:
    together, alone = steps(row, True, device_path), steps(row, False, device_path)
    assert len(together) == len(alone)
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("row", PAIRS, ids=str)
def test_parameters_together_get_the_bits_of_each_alone(row: tuple[int, int, int]):
    same(row, device_path=bool(sum(row) % 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_algorithm_weight_and_state(row: tuple[int, int, int], device_path: bool):
    same(row, device_path)


@pytest.mark.parametrize("most", [1, 100, 700])
def test_how_many_are_joined_does_not_matter(most: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "JOINED", most)
    monkeypatch.setattr(storage, "JOINED_ON_CPU", most)
    same((0, 2, 2), device_path=True)


class Launches(TorchDispatchMode):
    """Names of the ops that are launches on a GPU: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.__name__.split(".")[0]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
        if not view and not name.startswith("empty") and name not in ("lift_fresh", "detach"):
            self.names.append(name)
        return op(*args, **(kwargs or {}))


def launches(count: int, states: str, widths: tuple[int, ...] = (33,), skip: bool = True) -> list[str]:
    """Those of a step of AdamW with exact bf16 masters, by scale, clip factor and skip on the device."""
    params = [nn.Parameter(torch.ones(4, n, dtype=BF16, device=DEVICE)) for n in widths for _ in range(count)]
    optimizer = AdamW(params, backend="reference", state_dtype=states)
    half = torch.full((), 0.5, device=DEVICE)
    flag = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        with Launches() as seen:
            as_on_a_device(optimizer, half, Clip(half, 1.0), flag if skip else False)
    return seen.names


@pytest.mark.parametrize("states", STATES)
def test_forty_parameters_take_the_launches_of_two(states: str):
    assert launches(40, states) == launches(2, states)


def test_a_group_takes_few_launches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "JOINED_ON_CPU", storage.JOINED)
    assert len(launches(40, "fp32")) <= 71
    assert len(launches(40, "bf16")) <= 152
    assert len(launches(40, "8bit")) <= 230
    assert len(launches(40, "8bit", widths=(33, 64, 600))) <= 3 * 230


@pytest.mark.skipif(not falsecuda.installed(), reason="needs the false CUDA device")
@pytest.mark.parametrize("states", STATES)
def test_a_step_of_the_reference_waits_for_nothing(states: str):
    params = weights(BF16)
    optimizer = AdamW(params.items(), backend="reference", state_dtype=states)
    found = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for step in range(3):
        fill(params, 5 + step)
        with falsecuda.counted_waits() as waits:
            optimizer.step(found_inf=found, clip_norm=1.0)
    assert waits.names == []


def test_on_an_amd_gpu_the_reference_runs_and_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for cached in (cuda.usable, cuda.why_not):
        monkeypatch.setattr(cuda, cached.__name__, cached.__wrapped__)
    with pytest.warns(HalfstepWarning, match=r"plain torch.*the same numbers.*on AMD GPUs"):
        assert kind_for("auto") == "Reference"
    with pytest.raises(UnsupportedError, match="does not run on AMD GPUs"):
        kind_for("triton")
