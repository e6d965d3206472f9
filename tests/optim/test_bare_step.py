"""A bare `optimizer.step()`, as frameworks call it: clipping, skipping and outcome are the optimizer's."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import ConfigError, HalfstepWarning
from halfstep.optim import SGD, Adam, AdamW, Lion

BF16 = torch.bfloat16
KINDS = [AdamW, Adam, SGD, Lion]
KEPT = [
    {"master": "exact"},
    {"master": "fp32"},
    {"master": "stochastic"},
    {"master": "exact", "state_dtype": "8bit"},
    {"master": "exact", "accumulate": "fp32"},
    {"master": "exact", "backend": "reference"},
]


def net(dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)).to(
        dtype
    )


def backward(model: nn.Module, seed: int = 0, times: float = 1.0, scaler=None) -> None:
    g = torch.Generator().manual_seed(seed)
    p = next(model.parameters())
    loss = model(torch.randn(8, 16, generator=g).to(p.dtype)).float().square().mean() * times
    (loss if scaler is None else scaler.scale(loss)).backward()


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All numbers of an optimizer, copied."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in params for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in [*params, *states]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("options", KEPT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_what_is_not_finite_changes_nothing(kind, options, bad):
    model = net()
    optimizer = kind(model.parameters(), lr=1e-2, skip_nonfinite=True, **options)
    backward(model)
    optimizer.step()
    assert optimizer.outcome.taken
    assert optimizer.outcome.finite
    before = held(optimizer)
    model[2].weight.grad[3, 5] = bad
    with pytest.warns(HalfstepWarning, match=f"a step of {kind.__name__} had gradients"):
        optimizer.step()
    assert same(held(optimizer), before)
    assert (optimizer.outcome.taken, optimizer.outcome.finite) == (False, False)
    assert "skipped" in optimizer.outcome.reason
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert optimizer.outcome.taken
    assert not same(held(optimizer), before)


def test_a_first_step_that_is_skipped_is_no_step():
    """The states that it makes are those of the start."""
    results = []
    for skips_first in (True, False):
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2, skip_nonfinite=True)
        if skips_first:
            backward(model, times=float("inf"))
            with pytest.warns(HalfstepWarning):
                optimizer.step()
            optimizer.zero_grad()
        backward(model)
        optimizer.step()
        results.append(held(optimizer))
    assert same(*results)


@pytest.mark.parametrize("options", KEPT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_step_clips_as_an_asked_one(kind, options):
    results, norms = [], []
    for bare in (True, False):
        model = net()
        optimizer = kind(model.parameters(), lr=1e-2, clip_norm=0.01 if bare else None, **options)
        for seed in range(3):
            backward(model, seed)
            measured = float(optimizer.measure().norm)
            optimizer.step(**({} if bare else {"clip_norm": 0.01}))
            assert optimizer.outcome.grad_norm == pytest.approx(measured, rel=1e-6)
            norms.append(measured)
            optimizer.zero_grad()
        results.append(held(optimizer))
    assert same(*results)
    assert min(norms) > 0.01


def test_clipping_is_that_of_torch():
    weights = []
    for ours in (True, False):
        model = net(torch.float32)
        # two groups, as frameworks make them, are clipped by one norm
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        if ours:
            optimizer = AdamW(groups, lr=1e-2, eps=1e-3, clip_norm=0.01)
        else:
            optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=True)
        for seed in range(3):
            backward(model, seed)
            if not ours:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(*weights))


def test_a_group_has_its_own_limit_and_one_that_skips_is_enough():
    model = net()
    groups = [
        {"params": model[0].parameters(), "clip_norm": 0.01},
        {"params": model[2].parameters(), "skip_nonfinite": True},
        {"params": model[4].parameters()},
    ]
    optimizer = SGD(groups, lr=1.0, master="fp32")
    before = optimizer.masters()
    backward(model)
    norm = float(optimizer.measure().norm)
    optimizer.step()
    factors = [0.01 / (norm + 1e-6), 1.0, 1.0]
    for factor, group in zip(factors, optimizer.param_groups):
        for p in group["params"]:
            moved = before[p] - optimizer.master_of(p)
            assert torch.allclose(moved, p.grad.float() * factor, rtol=1e-5, atol=1e-7)
    kept = held(optimizer)
    model[4].bias.grad[0] = float("nan")
    with pytest.warns(HalfstepWarning, match="was skipped"):
        optimizer.step()
    assert same(held(optimizer), kept)


def test_a_group_may_be_edited_and_a_call_goes_before_it():
    results = []
    for how in ("group", "call", "factor"):
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2, clip_norm=5.0, skip_nonfinite=True)
        backward(model)
        if how == "group":
            optimizer.param_groups[0]["clip_norm"] = 0.01
            optimizer.step()
        elif how == "call":
            optimizer.step(clip_norm=0.01)
        else:
            norm = optimizer.measure().norm
            optimizer.step(clip_coef=0.01 / (norm + 1e-6), found_inf=False)
            assert optimizer.outcome is None  # who gave the flag knows
        results.append(held(optimizer))
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    optimizer.param_groups[0]["clip_norm"] = -1.0
    with pytest.raises(ConfigError, match=r"clip_norm=-1\.0"):
        optimizer.step()


def test_options_are_saved_with_the_groups():
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2, clip_norm=0.5, skip_nonfinite=True, state_dtype="8bit")
    backward(model)
    optimizer.step()
    twin = net()
    twin.load_state_dict(model.state_dict())
    other = AdamW(twin.parameters(), state_dtype="8bit")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["clip_norm"] == 0.5
    before = held(other)
    backward(twin, times=float("nan"))
    with pytest.warns(HalfstepWarning):
        other.step()
    assert same(held(other), before)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:  # a file from before these options
        del group["clip_norm"], group["skip_nonfinite"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["skip_nonfinite"] is True
    assert copy.deepcopy(optimizer).param_groups[0]["clip_norm"] == 0.5


def test_off_is_no_outcome_and_the_same_numbers():
    results = []
    for options in ({}, {"clip_norm": 1e9, "skip_nonfinite": True}):
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2, **options)
        for seed in range(3):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        results.append(held(optimizer))
        assert (optimizer.outcome is None) == (not options)
    assert same(*results)
    optimizer.param_groups[0].update(clip_norm=None, skip_nonfinite=False)
    backward(model)
    optimizer.step()
    assert optimizer.outcome is None


def test_clipping_alone_warns_of_what_it_could_not_clip():
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2, clip_norm=1.0)
    backward(model, times=float("inf"))
    with pytest.warns(HalfstepWarning, match="skip_nonfinite=True"):
        optimizer.step()
    assert (optimizer.outcome.taken, optimizer.outcome.finite) == (True, False)


def test_released_gradients_are_skipped_by_tensor_and_clipped_by_the_norm_before():
    model, plain = net(), net()
    optimizer = SGD(model.parameters(), lr=0.1, clip_norm=0.01, skip_nonfinite=True, release_gradients=True)
    reference = SGD(plain.parameters(), lr=0.1)
    last = None
    for seed in range(3):
        backward(model, seed)
        with pytest.warns(HalfstepWarning, match="not clipped") if last is None else nullcontext():
            optimizer.step()
        backward(plain, seed)
        now = reference.measure().norm
        reference.step(clip_coef=None if last is None else torch.clamp(0.01 / (last + 1e-6), max=1.0))
        reference.zero_grad()
        assert optimizer.outcome.grad_norm == pytest.approx(now.item(), rel=1e-5)
        last = now
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    handle = model[0].weight.register_hook(lambda g: g * float("inf"))
    before = model[0].weight.detach().clone()
    backward(model)
    with pytest.warns(HalfstepWarning, match="was skipped"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert "released" in optimizer.outcome.reason
    handle.remove()


def test_a_closure_s_loss_is_returned():
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2, clip_norm=0.1, skip_nonfinite=True)

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        return 3.5

    assert optimizer.step(closure) == 3.5
    assert optimizer.outcome.taken


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip_norm": 0}, "clip_norm=0"),
        ({"clip_norm": True}, "clip_norm=True"),
        ({"clip_norm": "1"}, "clip_norm='1'"),
        ({"skip_nonfinite": 1}, "skip_nonfinite=1: expected True or False"),
    ],
)
def test_wrong_values_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        AdamW(net().parameters(), **options)


def test_a_session_clips_and_skips_by_itself():
    for options in ({"clip_norm": 1.0}, {"skip_nonfinite": True}):
        model = net(torch.float32)
        optimizer = AdamW(model.parameters(), **options)
        with pytest.raises(ConfigError, match=f"has {next(iter(options))}, for loops"):
            hs.prepare(model, optimizer, level="O2", dtype="bf16")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_clips_once_and_says_what_happened(enabled):
    results = []
    for scaled in (True, False):
        model = net(torch.float32)
        optimizer = AdamW(model.parameters(), lr=1e-2, clip_norm=0.01, skip_nonfinite=True)
        scaler = hs.GradScaler(init_scale=1024.0, enabled=scaled and enabled)
        for seed in range(2):
            backward(model, seed, scaler=scaler)
            outcome = scaler.step(optimizer) if scaled else optimizer.step()
            scaler.update()
            optimizer.zero_grad()
        results.append(held(optimizer))
        before = held(optimizer)
        backward(model, times=float("inf"), scaler=scaler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = scaler.step(optimizer) if scaled else optimizer.step()
        assert same(held(optimizer), before)
        assert outcome is None or not outcome.taken
    assert same(*results)
