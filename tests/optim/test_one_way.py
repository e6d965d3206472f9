"""The one way to step on a CPU: with a look, with clipping, with hooks, whatever happened before it."""

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import halfstep as hs
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.gradients.decision import Decision, clip_coefficient
from halfstep.optim import SGD, AdamW, Lion
from halfstep.optim.backends import Numba
from halfstep.optim.base import OnePassOptimizer

BF16, FP32 = torch.bfloat16, torch.float32


def build(backend: str, cls: Any, options: dict[str, Any]) -> tuple[list[nn.Parameter], OnePassOptimizer]:
    g = torch.Generator().manual_seed(1)
    params = [
        nn.Parameter(torch.randn(n, generator=g).to(dtype))
        for n, dtype in ((7, BF16), (600, FP32), (130, BF16))
    ]
    return params, cls(params, backend=backend, **options)


def move(params: list[nn.Parameter], _: OnePassOptimizer) -> None:
    params[0].data = params[0].data.clone()


def drop(params: list[nn.Parameter], _: OnePassOptimizer) -> None:
    params[1].grad = None


def slower(_: list[nn.Parameter], optimizer: OnePassOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)


def more(params: list[nn.Parameter], optimizer: OnePassOptimizer) -> None:
    params.append(nn.Parameter(torch.ones(5)))
    params[-1].grad = torch.ones(5)
    optimizer.add_param_group({"params": [params[-1]]})


def reload(_: list[nn.Parameter], optimizer: OnePassOptimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def seed(params: list[nn.Parameter], optimizer: OnePassOptimizer) -> None:
    optimizer.seed_masters({params[2]: torch.linspace(-1, 1, 130)})


def strided(params: list[nn.Parameter], _: OnePassOptimizer) -> None:
    params[1].grad = torch.randn(1200, generator=torch.Generator().manual_seed(3))[::2]


EVENTS: list[Callable[[list[nn.Parameter], OnePassOptimizer], None]] = [
    move, drop, slower, more, reload, seed, strided
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (AdamW, {"lr": 1e-2}),
        (AdamW, {"lr": 1e-2, "state_dtype": "8bit", "maximize": True}),
        (SGD, {"lr": 0.1, "momentum": 0.9}),
        (SGD, {"lr": 0.1}),
        (Lion, {"lr": 1e-3, "master": "stochastic"}),
    ],
)
def test_steps_equal_the_reference_whatever_happens(cls: Any, options: dict[str, Any], event: Any):
    results = []
    for backend in ("auto", "reference"):
        params, optimizer = build(backend, cls, options)
        g = torch.Generator().manual_seed(2)
        for step in range(7):
            for p in params:
                p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
            if step == 3:
                event(params, optimizer)
            if step % 2:
                optimizer.step(inv_scale=0.5, clip_coef=0.25, found_inf=step == 5)
            else:
                optimizer.step(decision=Decision(0.5, [0.25] * len(optimizer.param_groups)), measures=True)
        results.append([p.detach().clone() for p in params] + list(optimizer.masters().values()))
    for ours, plain in zip(*results):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("options", [{}, {"backend": "reference"}, {"release_gradients": True}])
def test_looking_on_the_way_says_what_measuring_says(options: dict[str, Any]):
    params, optimizer = build(options.pop("backend", "auto"), SGD, {"lr": 0.1, **options})
    for value in (1.0, 3e-20, 1e18, float("nan")):
        for p in params:
            p.grad = torch.full_like(p, value)
        expected = optimizer.measure(0.5)
        stats = optimizer.step(decision=Decision(0.5), measures=True)
        assert [float(x) for x in stats] == pytest.approx([float(x) for x in expected], nan_ok=True)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_clipping_in_the_step_is_measuring_before_it(backend: str):
    built = [build(backend, AdamW, {"lr": 1e-2}) for _ in range(2)]
    generator = torch.Generator().manual_seed(5)
    for step in range(6):
        for pair in zip(*(params for params, _ in built)):
            grad = torch.randn(pair[0].shape, generator=generator) * (math.nan if step == 5 else 10.0**step)
            for p in pair:
                p.grad = grad.to(p.dtype)
        one, two = (optimizer for _, optimizer in built)
        norm = two.measure(0.5).norm
        one.step(inv_scale=0.5, found_inf=False, clip_norm=3.0)
        two.step(inv_scale=0.5, clip_coef=clip_coefficient(float(norm) if backend == "auto" else norm, 3.0))
    for ours, theirs in zip(*(params for params, _ in built)):
        assert torch.equal(*(p.detach().view(torch.int16) for p in (ours, theirs)))


def test_a_clipped_session_step_looks_at_gradients_once(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=1.0)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    looks: list[int] = []
    measure = Numba.measure
    monkeypatch.setattr(Numba, "measure", lambda *args: (looks.append(1), measure(*args))[1])
    for step in range(3):
        with amp.autocast():
            loss = model(torch.ones(2, 4)).square().mean()
        amp.backward(loss)
        gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
        before = torch.cat([master.flatten() for master in optimizer.masters().values()])
        outcome = amp.step(clip_norm=1e-3)
        after = torch.cat([master.flatten() for master in optimizer.masters().values()])
        assert len(looks) == step + 1
        assert float(outcome.grad_norm) == pytest.approx(float(torch.cat(gradients).norm()))
        assert float((after - before).norm()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("error", "given", "options"),
    [
        (ConfigError, {"clip_norm": -1.0}, {}),
        (ConfigError, {"clip_norm": 1.0, "clip_coef": 0.5}, {}),
        (UnsupportedError, {"clip_norm": 1.0}, {"release_gradients": True}),
    ],
)
def test_clipping_that_cannot_be_is_refused(error: Any, given: Any, options: Any):
    p = nn.Parameter(torch.ones(5))
    optimizer = SGD([p], lr=0.1, **options)
    p.grad = torch.ones(5)
    with pytest.raises(error, match="clip_norm"):
        optimizer.step(**given)
    assert torch.equal(p, torch.ones(5))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_are_gone_after_every_step_that_drops_them(level: str):
    """The first step's too, and where another head has gradients at each step."""
    torch.manual_seed(0)
    body, heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model = nn.ModuleList([body, *heads])
    amp = hs.prepare(model, hs.optim.AdamW(model.parameters()), level=level, dtype="bf16")
    for step in [0, 0, 1, 2, 0, 0, 0]:
        with amp.autocast():
            loss = heads[step](body(torch.ones(2, 4))).float().square().mean()
        amp.backward(loss)
        alive = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
        amp.step()
        gc.collect()
        assert len(alive) == 4
        assert [ref() for ref in alive] == [None] * 4


def test_masters_are_found_after_a_parameter_left_its_group():
    params = [nn.Parameter(torch.full((3,), float(n))) for n in range(3)]
    optimizer = SGD(params, lr=0.1)
    optimizer.masters()
    del optimizer.param_groups[0]["params"][0]
    assert [float(master[0]) for master in optimizer.masters().values()] == [1.0, 2.0]


def test_a_sparse_gradient_is_refused_by_name_after_other_steps_too():
    p = nn.Parameter(torch.ones(5, 2))
    optimizer = SGD([p], lr=0.1)
    p.grad = torch.ones(5, 2)
    optimizer.step()
    p.grad = torch.eye(5)[:, :2].to_sparse()
    with pytest.raises(UnsupportedError, match="dense gradients"):
        optimizer.step()


def test_hooks_and_schedulers_see_every_step():
    params, optimizer = build("auto", SGD, {"lr": 0.1})
    seen: list[str] = []
    for p in params:
        p.grad = torch.ones_like(p)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_pre_hook(lambda _, args, given: seen.append(f"{len(args)}, {given['clip_coef']}"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("global"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, where a scheduler steps before its optimizer
        optimizer.step(clip_coef=0.5)
        scheduler.step()
    handle.remove()
    assert seen == ["global", "before", "1, 0.5", "after"]


def test_a_profiler_sees_the_step():
    params, optimizer = build("auto", SGD, {"lr": 0.1})
    for p in params:
        p.grad = torch.ones_like(p)
    with torch.profiler.profile(acc_events=True) as profile:
        optimizer.step()
    assert any(event.key.startswith("Optimizer.step#SGD") for event in profile.key_averages())


def test_measuring_makes_no_states():
    params, optimizer = build("auto", AdamW, {})
    optimizer.seed_masters({params[2]: torch.linspace(-1, 1, 130)})
    for p in params:
        p.grad = torch.ones_like(p)
    before = {p: set(entry) for p, entry in optimizer.state.items()}
    optimizer.measure()
    assert {p: set(entry) for p, entry in optimizer.state.items()} == before
    optimizer.step()
    assert all("exp_avg" in optimizer.state[p] for p in params)


def test_a_session_measures_although_a_wrapper_around_the_step_returns_nothing():
    model = nn.Linear(4, 3)
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O1", dtype="bf16", kernels="native")
    step = optimizer.step

    def wrapper(*args: Any, **options: Any) -> None:
        step(*args, **options)

    optimizer.step = wrapper
    with amp.autocast():
        loss = model(torch.ones(2, 4)).square().mean()
    amp.backward(loss)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert amp.step().grad_norm == pytest.approx(float(norm))
