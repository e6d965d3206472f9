"""The session: order of operations, several optimizers and losses, accumulation, schedulers, bad input."""

import copy
import warnings

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import (
    CheckpointError,
    ConfigError,
    HalfstepWarning,
    LossScaleCollapsed,
    ScalerStateError,
)


def mlp(width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 3))


def batch(n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randn(n, 8), torch.randint(0, 3, (n,))


def loss_of(session: hs.Session, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with session.autocast():
        return nn.functional.cross_entropy(model(x), y)


def poison(model: nn.Module) -> None:
    next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")


LEVELS = [("O0", None), ("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_every_level_trains(level, dtype):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype)
    x, y = batch()
    losses = []
    for _ in range(30):
        loss = loss_of(amp, model, x, y)
        amp.backward(loss)
        outcome = amp.step(clip_norm=1.0)
        losses.append(float(loss.detach()))
        assert outcome.taken
        assert outcome.finite
        assert outcome.grad_norm > 0
    assert losses[-1] < 0.6 * losses[0]
    assert amp.steps == 30
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_o0_equals_plain_pytorch_bit_for_bit(kind, clip):
    ours, plain = mlp(), mlp()
    a, b = kind(ours.parameters(), lr=0.01), kind(plain.parameters(), lr=0.01)
    amp = hs.prepare(ours, a, level="O0")
    x, y = batch()
    for _ in range(5):
        amp.backward(loss_of(amp, ours, x, y))
        norm = amp.step(clip_norm=clip).grad_norm
        b.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip if clip else float("inf"))
        b.step()
        assert norm == pytest.approx(float(want))
    for p, q in zip(ours.parameters(), plain.parameters()):
        assert torch.equal(p, q)


def test_accumulation_equals_one_large_batch():
    whole, parts = mlp(), mlp()
    amps = [
        hs.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1), level="O1", dtype="fp16")
        for m in (whole, parts)
    ]
    x, y = batch()
    amps[0].backward(loss_of(amps[0], whole, x, y))
    for half in (slice(0, 6), slice(6, 12)):
        amps[1].backward(loss_of(amps[1], parts, x[half], y[half]) / 2)
    assert amps[0].step().grad_norm == pytest.approx(amps[1].step().grad_norm, rel=1e-2)
    for p, q in zip(whole.parameters(), parts.parameters()):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=1e-2)


def test_a_skipped_step_is_told_and_changes_nothing_but_the_scale():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O2", dtype="fp16", loss_scale=hs.DynamicLossScale(init=1024.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    x, y = batch()
    before = copy.deepcopy(model.state_dict())
    amp.backward(loss_of(amp, model, x, y))
    poison(model)
    outcome = amp.step(scheduler=scheduler)
    assert not outcome
    assert not outcome.finite
    assert outcome.scale == 1024.0
    assert amp.loss_scale.read() == 512.0
    assert "inf or NaN" in outcome.reason
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert amp.skips.total == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    amp.backward(loss_of(amp, model, x, y))
    assert amp.step(scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.05


def two_heads():
    torch.manual_seed(3)
    body, head = nn.Linear(8, 4), nn.Linear(4, 3)
    return body, head, torch.optim.SGD(body.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)


def test_an_inf_in_one_optimizer_skips_all_of_the_same_loss():
    body, head, a, b = two_heads()
    amp = hs.prepare([body, head], [a, b], level="O1", dtype="fp16")
    scale = amp.loss_scale.read()
    x, y = batch()
    amp.backward(loss_of(amp, nn.Sequential(body, head), x, y))
    poison(head)
    assert not amp.step(a)
    assert not amp.step(b)
    assert amp.loss_scale.read() == scale / 2  # one overflow, one backoff


def test_an_inf_in_one_loss_leaves_the_other_alone():
    body, head, a, b = two_heads()
    amp = hs.prepare([body, head], [a, b], level="O1", dtype="fp16", loss_scale="1024")
    with amp.autocast():
        first, second = body(torch.randn(2, 8)).sum(), head(torch.randn(2, 4)).sum()
    amp.backward(first, a)
    amp.backward(second, b)
    poison(body)
    assert not amp.step(a)
    assert amp.step(b)


def test_gradients_that_wait_keep_their_own_scale():
    body, head, a, b = two_heads()
    amp = hs.prepare(
        [body, head], [a, b], level="O1", dtype="fp16", loss_scale=hs.DynamicLossScale(init=64.0, interval=1)
    )
    x = torch.randn(5, 4)
    with amp.autocast():
        first, second, third = head(x).sum(), body(torch.randn(2, 8)).sum(), head(x).sum()
    amp.backward(first, b)
    once = head.weight.grad / 64.0
    amp.backward(second, a)
    amp.step(a)  # the scale grows to 128 while b's gradients carry 64
    assert amp.loss_scale.read() == 128.0
    amp.backward(third, b)
    start = head.weight.detach().clone()
    amp.step(b)
    torch.testing.assert_close(head.weight.detach(), start - 0.1 * 2 * once)


def test_no_loss_scale_takes_every_step_and_warns_once():
    model = mlp()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1", dtype="bf16")
    x, y = batch()
    amp.backward(loss_of(amp, model, x, y))
    poison(model)
    with pytest.warns(HalfstepWarning, match="on_nonfinite"):
        outcome = amp.step()
    assert outcome.taken
    assert not outcome.finite
    amp.backward(loss_of(amp, model, x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.step()


def test_skip_nonfinite_opts_in_without_a_scale():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O1", dtype="bf16", skip_nonfinite=True)
    x, y = batch()
    amp.backward(loss_of(amp, model, x, y))
    poison(model)
    assert not amp.step()


def test_a_collapsing_scale_is_an_error():
    model = mlp()
    amp = hs.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1", dtype="fp16", max_skips=4
    )
    x, y = batch()
    with pytest.raises(LossScaleCollapsed, match="4 steps in a row"):
        for _ in range(5):
            amp.backward(loss_of(amp, model, x, y))
            poison(model)
            amp.step()


def test_state_round_trip_and_mismatch():
    model = mlp()
    make = lambda level: hs.prepare(mlp(), level=level, dtype="fp16")  # noqa: E731
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1", dtype="fp16")
    x, y = batch()
    amp.backward(loss_of(amp, model, x, y))
    poison(model)
    amp.step()
    other = make("O1")
    other.load_state_dict(amp.state_dict())
    assert other.state_dict() == amp.state_dict()
    with pytest.raises(CheckpointError, match="level O1"):
        make("O2").load_state_dict(amp.state_dict())
    with pytest.raises(CheckpointError, match="format 1"):
        make("O1").load_state_dict({"scale": 2.0})


def test_evaluating_computes_with_the_masters_and_puts_everything_back():
    model = mlp()
    want = copy.deepcopy(model)
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2", dtype="bf16")
    x, _ = batch()
    with amp.evaluating():
        assert not model.training
        assert torch.equal(model(x), want(x))
    assert model.training
    assert model[0].weight.dtype == torch.bfloat16


def test_revert_leaves_no_trace():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    keys = set(vars(model)), set(vars(optimizer))
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    amp.revert()
    assert (set(vars(model)), set(vars(optimizer))) == keys
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    for name, p in model.named_parameters():
        assert torch.equal(p, start[name])
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


def trained_with_exact_masters(steps: int = 3):
    model = mlp()
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01, master="exact")
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    x, y = batch()
    for _ in range(steps):
        amp.backward(loss_of(amp, model, x, y))
        assert amp.step(clip_norm=1.0)
    return model, optimizer, amp


def test_one_pass_optimizers_evaluate_and_revert_with_their_exact_masters():
    model, optimizer, amp = trained_with_exact_masters()
    exact = [optimizer.master_of(p) for p in model.parameters()]
    assert any(not torch.equal(e, p.float()) for e, p in zip(exact, model.parameters()))
    with amp.evaluating():
        assert all(torch.equal(p, e) for p, e in zip(model.parameters(), exact))
    assert model[0].weight.dtype == torch.bfloat16
    amp.revert()
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), exact))
    x, y = batch()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, exact[0])


def released(dtype: str = "bf16", **options):
    model = mlp()
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01, release_gradients=True)
    return model, hs.prepare(model, optimizer, level="O2", dtype=dtype, **options)


def kept(dtype: str = "bf16", **options):
    model = mlp()
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01)
    return model, hs.prepare(model, optimizer, level="O2", dtype=dtype, **options)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_released_gradients_train_as_kept_ones_do(dtype):
    x, y = batch()
    weights = []
    for model, amp in (released(dtype), kept(dtype)):
        for _ in range(5):
            amp.backward(loss_of(amp, model, x[:6], y[:6]), more=True)
            amp.backward(loss_of(amp, model, x[6:], y[6:]))
            assert amp.step().taken
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


def test_released_gradients_refuse_what_would_apply_twice_and_tell_a_partial_skip():
    model, amp = released("fp16")
    x, y = batch()
    amp.backward(loss_of(amp, model, x, y))
    with pytest.raises(ScalerStateError, match="more=True"):
        amp.backward(loss_of(amp, model, x, y))
    amp.step()
    scale = amp.loss_scale.read()
    amp.backward(loss_of(amp, model, x, y) * float("inf"))
    outcome = amp.step()
    assert not outcome.taken
    assert "released before" in outcome.reason
    assert amp.loss_scale.read() == scale / 2
    assert all(torch.isfinite(p).all() for p in model.parameters())


def _another_model():
    return hs.prepare(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1))


BAD = {
    "unknown level": (lambda: hs.prepare(mlp(), level="O4"), ConfigError, "unknown level 'O4'"),
    "unknown dtype": (lambda: hs.prepare(mlp(), dtype="fp17"), ConfigError, "fp17"),
    "no parameters": (lambda: hs.prepare(nn.ReLU()), ConfigError, "without parameters"),
    "another model": (_another_model, ConfigError, "not the model's"),
    "not an optimizer": (lambda: hs.prepare(mlp(), object()), ConfigError, "got object as an optimizer"),
    "unknown scale": (lambda: hs.prepare(mlp(), loss_scale="much"), ConfigError, "unknown loss scale"),
    "two dtypes": (lambda: hs.prepare(mlp(), level="bf16-mixed", dtype="fp16"), ConfigError, "drop one"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_error(case):
    make, error, message = BAD[case]
    with pytest.raises(error, match=message):
        make()


def test_steps_out_of_order_are_errors():
    model = mlp()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1", dtype="fp16")
    with pytest.raises(ScalerStateError, match="no gradients"):
        amp.step()
    x, y = batch()
    loss_of(amp, model, x, y).backward()
    with pytest.raises(ScalerStateError, match="not scaled"):
        amp.step()
    with pytest.raises(ConfigError, match="requires_grad"):
        amp.backward(torch.tensor(1.0))


def test_several_losses_at_once_are_differentiated_in_one_pass():
    def gradients(losses_of):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), level="O2", dtype="bf16")
        with amp.autocast():
            y = model(torch.ones(4, 3))
            one, two = y.float().square().mean(), y.float().abs().sum()
        losses_of(amp, one, two)
        found = amp.step(zero_grad=False)
        assert found.taken
        return [p.grad.clone() for p in amp.masters[0].params()]

    together = gradients(lambda amp, one, two: amp.backward([one, two]))
    summed = gradients(lambda amp, one, two: amp.backward(one + two))
    assert all(torch.equal(a, b) for a, b in zip(together, summed, strict=True))
    model = nn.Linear(3, 2)
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1", dtype="bf16")
    with pytest.raises(hs.ConfigError, match=r"got 2 losses, those at \[1\] are no scalar tensors"):
        amp.backward([torch.ones(()), "loss"])


def test_a_session_that_is_not_enabled_trains_in_fp32_whatever_else_is_given():
    model, plain = mlp(), mlp()
    plan = hs.Plan((hs.PlanRule("*", dtype="fp16"),))
    amp = hs.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "auto", dtype="fp16", plan=plan, policy="apex",
        loss_scale=8.0, kernels="rounded", layout="channels_last", enabled=False,
    )  # fmt: skip
    reference = hs.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), "O0")
    for session, net in ((amp, model), (reference, plain)):
        session.backward(loss_of(session, net, *batch()))
        session.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert str(amp.level) == str(reference.level)


def test_masters_of_another_optimizer_are_named_where_they_are_asked_for():
    model = mlp()
    amp = hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), "O2", dtype="bf16")
    with pytest.raises(ConfigError, match=r"optimizer 0 has no MasterWeights.*optimizer\.masters\(\)"):
        amp.masters[0]
    assert amp.masters.get(0) is None


def test_revert_keeps_masters_that_an_optimizer_has_at_o3():
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    optimizer = hs.optim.SGD(model.parameters(), lr=1e-4)
    amp = hs.prepare(model, optimizer, level="O3", dtype="bf16")
    for _ in range(20):
        amp.backward(model(torch.ones(4, 8)).float().mean())
        amp.step()
    master = optimizer.master_of(model.weight)
    assert not torch.equal(master, torch.ones(8, 8))
    amp.revert()
    assert torch.equal(model.weight, master)


def test_an_evaluation_at_o3_takes_fp32_inputs_in_any_module():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))

        def forward(self, x):
            return torch.nn.functional.linear(x * 0.5, self.weight)

    model = Own()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O3", dtype="bf16")
    with amp.evaluating():
        assert torch.equal(model(torch.ones(2, 4)).float(), torch.full((2, 3), 2.0))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_is_wrapped_may_replace_gradients(level, clip_norm):
    class Halving(hs.optim.SGD):
        def step(self, *args, **more):
            for p in self.param_groups[0]["params"]:
                p.grad = p.grad * 0.5
            return super().step(*args, **more)

    ends = []
    for kind, lr in ((Halving, 0.5), (hs.optim.SGD, 0.25)):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = kind(model.parameters(), lr=lr)
        amp = hs.prepare(model, optimizer, level=level, dtype="bf16")
        for _ in range(3):
            with amp.autocast():
                loss = model(torch.ones(4, 6)).float().square().mean()
            amp.backward(loss)
            amp.step(clip_norm=clip_norm)
        ends.append(torch.cat([t.flatten() for t in optimizer.masters().values()]))
    assert torch.equal(*ends)
