"""What a session remembers: every state of an optimizer's gradients, and every event on it."""

import copy

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import ScalerStateError

STATES = ("empty", "scaled", "unscaled", "kept")
REFUSED = "refused"
#: (state, event) -> the state afterwards, or REFUSED, under a loss scale of 8 that gradients carry.
TABLE = {
    **{(state, "backward"): "scaled" for state in STATES},
    ("empty", "unscale"): REFUSED,
    ("scaled", "unscale"): "unscaled",
    ("unscaled", "unscale"): "unscaled",
    ("kept", "unscale"): REFUSED,
    ("empty", "step"): REFUSED,
    ("scaled", "step"): "empty",
    ("unscaled", "step"): "empty",
    ("kept", "step"): REFUSED,
    ("empty", "direct step"): "empty",
    ("scaled", "direct step"): REFUSED,
    ("unscaled", "direct step"): "unscaled",
    ("kept", "direct step"): REFUSED,
    **{(state, event): "empty" for state in STATES for event in ("load", "revert")},
}
EVENTS = {
    "backward": lambda rig: rig.backward(),
    "unscale": lambda rig: rig.amp.unscale(),
    "step": lambda rig: rig.amp.step(),
    "direct step": lambda rig: rig.optimizer.step(),
    "load": lambda rig: rig.amp.load_state_dict(rig.saved),
    "revert": lambda rig: rig.amp.revert(),
}


class Rig:
    """A model of one weight whose loss has the gradient 3, at a scale of 8."""

    def __init__(self, loss_scale=8.0, master=None):
        self.model = nn.Linear(1, 1, bias=False)
        # A one-pass optimizer leaves the gradients it keeps as they are: they still carry the scale.
        self.optimizer = hs.optim.SGD(self.model.parameters(), lr=0.0, master=master)
        self.amp = hs.prepare(self.model, self.optimizer, level="O1", dtype="bf16", loss_scale=loss_scale)
        self.saved = copy.deepcopy(self.amp.state_dict())

    def backward(self):
        self.amp.backward(3.0 * self.model.weight.sum())

    def to(self, state):
        if state != "empty":
            self.backward()
        if state == "unscaled":
            self.amp.unscale()
        if state == "kept":
            self.amp.step(zero_grad=False)
        assert self.state == state
        return self

    @property
    def state(self):
        """What is known of the gradients, from what the session would do with them."""
        scale, losses = self.amp.state.gradient_scales[0], self.amp.state.losses
        if scale is None:
            return "empty"
        return "kept" if not losses else "scaled" if losses[0].unchecked else "unscaled"


def test_the_table_is_whole():
    assert set(TABLE) == {(state, event) for state in STATES for event in EVENTS}


@pytest.mark.parametrize(("state", "event"), TABLE)
def test_every_event_on_every_state(state, event):
    rig, after = Rig().to(state), TABLE[state, event]
    before = rig.amp.state
    if after == REFUSED:
        with pytest.raises(ScalerStateError):
            EVENTS[event](rig)
        assert rig.amp.state is before
    else:
        EVENTS[event](rig)
        assert rig.state == after


@pytest.mark.parametrize(("state", "gradients"), [("empty", 1), ("scaled", 2), ("unscaled", 2), ("kept", 2)])
def test_backward_brings_older_gradients_to_the_scale(state, gradients):
    rig = Rig().to(state)
    rig.amp.loss_scale = hs.StaticLossScale(32.0)
    rig.backward()
    assert rig.model.weight.grad.item() == gradients * 3.0 * 32.0


@pytest.mark.parametrize("state", STATES)
def test_without_a_scale_nothing_is_refused_that_has_gradients(state):
    rig = Rig(loss_scale="none")
    if state == "unscaled":
        rig.backward()
        rig.amp.unscale()
        assert rig.state == "scaled"  # there is nothing to divide out
    else:
        rig.to(state)
    if state == "empty":
        rig.model.weight.grad = torch.full((1, 1), 3.0)
    rig.optimizer.step()
    assert rig.amp.step(zero_grad=False).grad_norm == 3.0
    assert rig.state == "kept"
    rig.optimizer.step()  # refused where they carry a scale


def test_the_value_is_frozen_and_comes_back():
    rig = Rig(loss_scale="dynamic")
    restore, before = rig.amp.snapshot(), rig.amp.state
    rig.backward()
    rig.model.weight.grad.fill_(float("inf"))
    rig.amp.step()
    after = rig.amp.state
    assert (after.steps, after.skips.total, after.loss_scales[0].read()) == (
        1,
        1,
        before.loss_scales[0].read() / 2,
    )
    for _ in range(2):
        restore()
        assert rig.amp.state is before
        assert not rig.amp.history
        rig.backward()
    with pytest.raises(AttributeError):
        before.steps = 3


def test_saved_as_plain_values_and_restored_without_gradients():
    rig = Rig(loss_scale="dynamic").to("scaled")
    again = Rig(loss_scale="dynamic").to("scaled")
    again.amp.load_state_dict(rig.amp.state_dict())
    assert again.amp.loss_scale == rig.amp.loss_scale
    assert again.state == "empty"
