"""A CPU optimizer's plan of an earlier step: used while it holds, forgotten when anything moved."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.errors import UnsupportedError
from halfstep.optim import SGD, AdamW, Lion
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
def test_steps_by_plan_equal_the_reference_whatever_happens(cls: Any, options: dict[str, Any], event: Any):
    results = []
    for backend in ("auto", "reference"):
        params, optimizer = build(backend, cls, options)
        g = torch.Generator().manual_seed(2)
        planned = []
        for step in range(7):
            for p in params:
                p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
            if step == 3:
                event(params, optimizer)
            planned.append(optimizer.planned)
            optimizer.step(inv_scale=0.5, clip_coef=0.25, found_inf=step == 5, look=step % 2 == 0)
        assert any(planned) == (backend == "auto")
        results.append([p.detach().clone() for p in params] + list(optimizer.masters().values()))
    for ours, plain in zip(*results):
        assert torch.equal(ours, plain)


def test_looking_on_the_way_says_what_measuring_says():
    params, optimizer = build("auto", SGD, {"lr": 0.1})
    for value in (1.0, 3e-20, 1e18, float("nan")):
        for p in params:
            p.grad = torch.full_like(p, value)
        expected = optimizer.measure_on_host(0.5)
        optimizer.step(inv_scale=0.5, look=True)
        if value == 1.0:  # nothing planned yet
            assert optimizer.looked is None
        else:
            assert expected is not None
            assert str(optimizer.looked) == str(expected)


def test_a_sparse_gradient_is_refused_by_name_after_planned_steps_too():
    p = nn.Parameter(torch.ones(5, 2))
    optimizer = SGD([p], lr=0.1)
    p.grad = torch.ones(5, 2)
    optimizer.step()
    assert optimizer.planned
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
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert any(event.key.startswith("Optimizer.step#SGD") for event in profile.key_averages())
