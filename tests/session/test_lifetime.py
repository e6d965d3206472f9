"""What was prepared ends with its last name: weights, states, sessions, without the cycle collector."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.policy.ops import Rule
from halfstep.trainer import Trainer

CPU = torch.device("cpu")
Refs = dict[str, list[weakref.ref[Any]]]


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    torch.optim.AdamW(nn.Linear(1, 1).parameters()).step()  # torch's first step leaves a cycle of imports
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def net(device: torch.device = CPU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).to(device)


def refs_of(session: Any, *models: nn.Module, optimizers: Any) -> Refs:
    states = [v for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor)]
    parts = {
        "weights": [p for model in models for p in model.parameters()],
        "modules": [module for model in models for module in model.modules()],
        "states": [state for state in states if state.dim()],
        "optimizers": optimizers,
        "sessions": [session],
    }
    return {name: [weakref.ref(one) for one in those] for name, those in parts.items()}


def alive(refs: Refs) -> dict[str, int]:
    counts = {name: sum(ref() is not None for ref in those) for name, those in refs.items()}
    return {name: count for name, count in counts.items() if count}


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": torch.optim.AdamW,
    "ours": hs.optim.AdamW,
    "8-bit": lambda params: hs.optim.AdamW(params, state_dtype="8bit"),
    "fp32 master": lambda params: hs.optim.AdamW(params, master="fp32"),
    "accumulates": lambda params: hs.optim.AdamW(params, accumulate="fp32"),
    "releases": lambda params: hs.optim.AdamW(params, release_gradients=True),
}
LEVELS = ["O0", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16"]


def train(
    level: str,
    kind: str = "ours",
    device: torch.device = CPU,
    steps: int = 3,
    then: Callable[..., Any] | None = None,
    **options: Any,
) -> Refs:
    model, x = net(device), torch.randn(8, 16).to(device)
    optimizer = KINDS[kind](model.parameters())
    level, dtype = (*level.split(), None)[:2]
    amp = hs.prepare(model, optimizer, level, dtype=dtype, kernels="native", **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step() -> None:
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step(clip_norm=None if kind == "releases" else 1.0, scheduler=scheduler)

    for _ in range(steps):
        step()
    refs = refs_of(amp, model, optimizers=[optimizer])
    if then is not None:
        then(amp, model, optimizer, step)
    del step
    return refs


@pytest.mark.filterwarnings("ignore:.*too coarse for a step")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_alive_after_training(level, kind):
    assert alive(train(level, kind)) == {}


def plan(level: str) -> hs.Plan:
    return hs.Plan(
        [hs.PlanRule("0", dtype="fp32") if level == "O2 bf16" else hs.PlanRule("0", rule=Rule.FULL)]
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "raises": {"on_nonfinite": "raise"},
    "skips": {"skip_nonfinite": True},
    "one step": {"steps": 1},
    "copied": {"then": lambda amp, model, *_: copy.deepcopy(model)},
    "reverted": {"then": lambda amp, *_: amp.revert()},
    "reverted by the model": {"then": lambda amp, model, *_: hs.revert(model)},
    "prepared twice": {"then": lambda amp, model, optimizer, _: (amp.revert(), hs.prepare(model, optimizer))},
    "saved": {"then": lambda amp, *_: amp.load_state_dict(amp.state_dict())},
}


@pytest.mark.parametrize("level", ["O2 bf16", "O3 bf16"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_nothing_is_alive_after_training_with(level, option, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hs.HalfstepWarning)
        assert alive(train(level, kind, **OPTIONS[option])) == {}


@pytest.mark.parametrize("level", ["O1 bf16", "O2 bf16"])
def test_nothing_is_alive_after_training_by_a_plan(level):
    assert alive(train(level, plan=plan(level))) == {}


def test_nothing_is_alive_after_further_options():
    assert alive(train("O2 fp16", loss_scale="headroom")) == {}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("trace", [False, True])
def test_nothing_is_alive_after_a_trainer(level, trace):
    def run() -> Refs:
        model = net()
        optimizer = hs.optim.AdamW(model.parameters())
        loader = [(torch.randn(8, 16), torch.arange(8) % 4)] * 2
        trainer = Trainer(
            model, optimizer, lambda out, y: F.cross_entropy(out.float(), y), level=level, dtype="bf16",
            progress=False, trace=trace, kernels="native",
        )  # fmt: skip
        trainer.fit(loader, epochs=2)
        return refs_of(trainer.amp, model, optimizers=[optimizer])

    assert alive(run()) == {}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_is_alive_of_two_networks(level):
    def run() -> Refs:
        a, b, x = net(), net(), torch.randn(8, 16)
        optimizers = [torch.optim.AdamW(a.parameters()), hs.optim.AdamW(b.parameters())]
        amp = hs.prepare([a, b], optimizers, level, dtype="fp16", loss_scale=[8.0, 16.0], kernels="native")
        for number, (model, optimizer) in enumerate(zip((a, b), optimizers)):
            with amp.autocast():
                loss = model(x).float().square().mean()
            amp.backward(loss, optimizer, loss_id=number)
            amp.step(optimizer)
        return refs_of(amp, a, b, optimizers=optimizers)

    assert alive(run()) == {}


def test_nothing_is_alive_of_masters_and_conversions_alone():
    def run() -> Refs:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        conversion = hs.convert(model, "O2", "bf16")
        masters = hs.MasterWeights(optimizer, model, initial=conversion.originals)
        model(torch.randn(8, 16)).mean().backward()
        optimizer.step()
        return refs_of(masters, model, optimizers=[optimizer])

    assert alive(run()) == {}


@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("watching", ["watch", "watch, unkept", "replayable", "replayed"])
def test_nothing_is_alive_that_was_watched(watching, kind):
    def then(amp: hs.Session, model: nn.Module, optimizer: Any, step: Callable[[], None]) -> None:
        if watching == "watch":
            seen = hs.watch(model, amp, every=1)
            step(), step()
            assert len(seen.notes) == 2
        elif watching == "watch, unkept":
            hs.watch(model, amp)
            assert not amp.listeners
            assert not model[0]._forward_hooks
        elif watching == "replayable":
            amp.replayable(step)
        else:
            with torch.no_grad():
                model[0].bias.fill_(float("nan"))
            with pytest.warns(hs.HalfstepWarning, match="not finite|NaN"):
                amp.replayable(step)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hs.HalfstepWarning)
        refs = train("O2 bf16", kind, then=then)
    assert alive(refs) == {}


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_a_converted_model_can_be_undone_after_its_session(kind):
    """What undoes it is the model's, with the optimizer and its masters, and the session is gone."""
    model, x = net(), torch.randn(8, 16)
    optimizer = KINDS[kind](model.parameters())
    amp = hs.prepare(model, optimizer, "O2", dtype="bf16", kernels="native")
    with amp.autocast():
        loss = model(x).float().square().mean()
    amp.backward(loss)
    amp.step()
    expected, session = hs.optim.fp32_state_dict(model, optimizer), weakref.ref(amp)
    copied = copy.deepcopy(model).state_dict()
    del amp, optimizer
    assert session() is None
    assert all(torch.equal(copied[name], value) for name, value in expected.items())
    copied = copy.deepcopy(model).state_dict()
    hs.revert(model)
    after = model.state_dict()
    for name, value in expected.items():
        assert torch.equal(after[name], value)
        assert torch.equal(copied[name], value)
