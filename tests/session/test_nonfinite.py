"""`on_nonfinite="raise"` under every kind of loss scale, and what the counts say then."""

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import LossScaleCollapsed, NonFiniteError
from halfstep.scaling import DynamicLossScale, HeadroomLossScale, LossScale, StaticLossScale

SCALES = {
    "none": "none",
    "static": 8.0,
    "dynamic": lambda: DynamicLossScale(8.0),
    "headroom": lambda: HeadroomLossScale(limit=DynamicLossScale(8.0), bits=1),
}


def session(loss_scale, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    made = loss_scale() if callable(loss_scale) else loss_scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"on_nonfinite": "raise", **options}
    return model, hs.prepare(model, optimizer, level="O1", dtype="fp16", loss_scale=made, **options)


def bad_step(model, amp, value, loss=1.0, **kwargs):
    with amp.autocast():
        out = model(torch.ones(1, 2)).sum()
    handle = model.weight.register_hook(lambda grad: torch.tensor([[value, 1.0]]))
    amp.backward(out * loss, **kwargs)
    handle.remove()
    return amp.step()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("kind", "skipped"), [("none", 0), ("static", 0), ("dynamic", 3), ("headroom", 3)])
def test_raised_once_the_scale_cannot_be_the_cause(kind, skipped, value):
    model, amp = session(SCALES[kind])
    before = model.weight.detach().clone()
    for step in range(skipped):
        assert not bad_step(model, amp, value).taken
        assert amp.skips.in_row == step + 1
    with pytest.raises(NonFiniteError, match=rf"step {skipped + 1}: .* 1 of 2 parameters .first: weight."):
        bad_step(model, amp, value)
    assert torch.equal(model.weight, before)
    assert (amp.skips.total, amp.skips.steps, amp.steps) == (skipped + 1,) * 3


def test_the_message_says_how_low_the_scale_is():
    model, amp = session(lambda: DynamicLossScale(4.0, min=4.0))
    with pytest.raises(NonFiniteError, match="although the loss scale is down to 4"):
        bad_step(model, amp, torch.nan)


def test_a_clean_step_in_between_begins_anew():
    model, amp = session(lambda: DynamicLossScale(2.0))
    assert not bad_step(model, amp, torch.nan).taken
    assert bad_step(model, amp, 0.5).taken
    with pytest.raises(NonFiniteError):
        bad_step(model, amp, torch.nan)  # at a scale of 1


@pytest.mark.parametrize("kind", SCALES)
def test_a_loss_that_is_not_finite_raises_at_once(kind):
    model, amp = session(SCALES[kind])
    with pytest.raises(NonFiniteError, match="step 1: the loss is nan"):
        bad_step(model, amp, torch.nan, loss=torch.nan)
    assert (amp.skips.in_row, amp.skips.total, amp.steps) == (1, 1, 1)


def test_of_several_losses_the_scale_of_the_bad_one_decides():
    model, amp = session(["none", DynamicLossScale(8.0)])
    for _ in range(3):
        assert not bad_step(model, amp, torch.nan, loss_id=1).taken
    with pytest.raises(NonFiniteError, match="down to 1"):
        bad_step(model, amp, torch.nan, loss_id=1)
    with pytest.raises(NonFiniteError, match="hold inf or NaN; the step"):
        bad_step(model, amp, torch.nan, loss_id=0)


def test_a_gradient_spoiled_after_its_loss_was_judged_raises_too():
    torch.manual_seed(0)
    models = [nn.Linear(2, 1), nn.Linear(1, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    amp = hs.prepare(models, optimizers, dtype="bf16", on_nonfinite="raise")
    with amp.autocast():
        loss = models[1](models[0](torch.ones(1, 2))).sum()
    amp.backward(loss)
    assert amp.step(optimizers[0]).taken
    models[1].weight.grad.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="step 2: gradients of 1 of 2"):
        amp.step(optimizers[1])


def test_a_collapse_is_counted_too():
    model, amp = session("dynamic", on_nonfinite="skip", max_skips=2)
    bad_step(model, amp, torch.nan)
    with pytest.raises(LossScaleCollapsed, match="2 steps in a row"):
        bad_step(model, amp, torch.nan)
    assert (amp.skips.in_row, amp.skips.total, amp.skips.steps) == (2, 2, 2)


def test_skips_know_every_step():
    model, amp = session(lambda: DynamicLossScale(8.0), on_nonfinite=None)
    for value in (1.0, torch.inf, 1.0, 1.0):
        bad_step(model, amp, value)
        assert amp.skips.steps == amp.steps
    assert (amp.skips.total, amp.steps) == (1, 4)


def test_scales_say_whether_they_can_go_lower():
    class Halving(LossScale):
        def __init__(self, value):
            self.value = value

        def adjust(self, finite, amax=None):
            return self if finite else Halving(max(self.value / 2, 0.25))

    lowest = [hs.scaling.NoLossScale(), StaticLossScale(4.0), DynamicLossScale(1.0), Halving(0.25)]
    higher = [DynamicLossScale(2.0, hysteresis=2), HeadroomLossScale(), Halving(0.5)]
    assert all(scale.at_lowest for scale in lowest)
    assert not any(scale.at_lowest for scale in higher)
    LossScale._kinds.pop("Halving")


def test_none_in_a_list_of_scales_is_the_levels_own():
    _, amp = session(["dynamic", None, 4.0])
    assert [type(s).__name__ for s in amp.loss_scales] == ["DynamicLossScale"] * 2 + ["StaticLossScale"]
    model = nn.Linear(1, 1)
    bf16 = hs.prepare(model, torch.optim.SGD(model.parameters()), dtype="bf16", loss_scale=["dynamic", None])
    assert [s.read() for s in bf16.loss_scales] == [2.0**16, 1.0]


def test_an_outcome_of_several_losses_says_the_lowest_scale():
    model, amp = session([16.0, 4.0])
    with amp.autocast():
        first, second = model(torch.ones(1, 2)).sum(), model(torch.ones(1, 2)).square().sum()
    amp.backward(first, loss_id=0)
    amp.backward(second, loss_id=1)
    assert amp.step().scale == 4.0
