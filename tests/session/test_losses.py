"""A loss scale for each loss: `prepare(loss_scale=[...])` and `backward(loss, loss_id=...)`."""

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import CheckpointError, ConfigError, ScalerStateError, UnsupportedError
from halfstep.scaling import HeadroomLossScale

OPTIMIZERS = {
    "torch": lambda p: torch.optim.SGD(p, lr=1.0),
    "hs": lambda p: hs.optim.SGD(p, lr=1.0),
}
WAYS = [(level, kind) for level in ("O1", "O2") for kind in OPTIMIZERS]


class Rig:
    """Two weights; loss 0 has the gradient `first` with both, loss 1 `second` with those named."""

    def __init__(self, kind="torch", level="O2", loss_scale=("dynamic", "dynamic"), apart=False):
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        groups = (
            [[*self.a.parameters()], [*self.b.parameters()]]
            if apart
            else [[*self.a.parameters(), *self.b.parameters()]]
        )
        self.optimizers = [OPTIMIZERS[kind](group) for group in groups]
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(0.0)
        models = [self.a, self.b]
        self.amp = hs.prepare(models, self.optimizers, level=level, dtype="fp16", loss_scale=list(loss_scale))

    @property
    def weights(self):
        return [self.a.weight, self.b.weight]

    @property
    def scales(self):
        return [scale.read() for scale in self.amp.loss_scales]

    def loss(self, *gradients):
        return sum(g * w.sum() for g, w in zip(gradients, self.weights) if g)

    def values(self):
        with self.amp.evaluating():
            return [w.item() for w in self.weights]


@pytest.mark.parametrize(("level", "kind"), WAYS)
def test_each_loss_is_scaled_by_its_own_and_gradients_add_up(level, kind):
    rig = Rig(kind, level, (2.0, 1024.0))
    rig.amp.backward(rig.loss(3.0, 5.0), loss_id=0)
    assert rig.a.weight.grad.item() == 6.0
    rig.amp.backward(rig.loss(0.25, None), loss_id=1)
    rig.amp.backward(rig.loss(None, 7.0), loss_id=0)
    outcome = rig.amp.step()
    assert outcome.taken
    assert outcome.scale == 2.0  # the lowest
    assert rig.values() == [-3.25, -12.0]


@pytest.mark.parametrize(("level", "kind"), WAYS)
@pytest.mark.parametrize("bad", [0, 1])
def test_an_inf_of_one_loss_skips_the_step_and_lowers_its_scale_alone(level, kind, bad):
    rig = Rig(kind, level, [hs.DynamicLossScale(256.0, interval=2), hs.DynamicLossScale(64.0, interval=2)])
    for loss in (0, 1):
        rig.amp.backward(rig.loss(1.0, float("inf") if loss == bad else 1.0), loss_id=loss)
    assert not rig.amp.step().taken
    assert rig.values() == [0.0, 0.0]
    assert rig.scales == ([128.0, 64.0] if bad == 0 else [256.0, 32.0])
    for loss in (0, 1):
        rig.amp.backward(rig.loss(1.0, 1.0), loss_id=loss)
    assert rig.amp.step().taken
    assert rig.values() == [-2.0, -2.0]
    assert rig.scales == ([128.0, 128.0] if bad == 0 else [512.0, 32.0])  # the other's second clean step


def test_a_gradient_that_only_its_own_scale_saves():
    tiny = 2.0**-26
    rig = Rig("torch", "O2", (1.0, 2.0**12))
    rig.amp.backward(rig.loss(tiny, tiny), loss_id=0)  # nothing is left of them in fp16
    rig.amp.backward(rig.loss(None, tiny), loss_id=1)
    rig.amp.step()
    assert rig.values() == [0.0, -tiny]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_inf_in_one_optimizer_skips_the_others_of_that_loss_and_adjusts_once(kind):
    rig = Rig(kind, "O2", (256.0, hs.DynamicLossScale(64.0)), apart=True)
    first, second = rig.optimizers
    rig.amp.backward(rig.loss(1.0, None), first, loss_id=0)
    rig.amp.backward(rig.loss(1.0, float("inf")), loss_id=1)
    assert [rig.amp.step(first).taken, rig.amp.step(second).taken] == [False, False]
    assert rig.scales == [256.0, 32.0]
    rig.amp.backward(rig.loss(1.0, None), first, loss_id=0)
    rig.amp.backward(rig.loss(None, float("inf")), second, loss_id=1)
    assert [rig.amp.step(first).taken, rig.amp.step(second).taken] == [True, False]
    assert rig.scales == [256.0, 16.0]


def test_a_loss_that_reaches_one_of_two_optimizers_needs_no_names():
    rig = Rig("torch", "O2", (8.0, 2.0), apart=True)
    rig.amp.backward(rig.loss(1.0, None), loss_id=0)
    rig.amp.backward(rig.loss(None, 4.0), loss_id=1)
    for optimizer in rig.optimizers:
        assert rig.amp.step(optimizer).taken
    assert rig.values() == [-1.0, -4.0]


def test_unscaled_by_hand_between_and_clipped_at_the_end():
    rig = Rig("hs", "O2", (8.0, 2.0))
    rig.amp.backward(rig.loss(3.0, None), loss_id=0)
    rig.amp.unscale()
    assert rig.a.weight.grad.item() == 3.0
    rig.amp.backward(rig.loss(None, 4.0), loss_id=1)
    rig.amp.unscale()
    assert rig.b.weight.grad.item() == 4.0
    assert rig.amp.step(clip_norm=2.5).grad_norm == 5.0
    assert rig.values() == pytest.approx([-1.5, -2.0], rel=1e-5)


def test_one_loss_unscaled_and_the_other_by_headroom():
    rig = Rig("torch", "O2", ("none", HeadroomLossScale(limit=hs.DynamicLossScale(256.0))))
    rig.amp.backward(rig.loss(3.0, 1.0), loss_id=0)
    rig.amp.backward(rig.loss(0.5, 0.25), loss_id=1)
    assert rig.amp.step().taken
    assert rig.values() == [-3.5, -1.25]
    assert rig.amp.loss_scales[1].history[-1] == 0.5  # its own gradients', not those of the sum


def test_an_error_in_backward_clears_what_was_there():
    rig = Rig("torch", "O2", (8.0, 2.0))
    rig.amp.backward(rig.loss(3.0, None), loss_id=0)
    with pytest.raises(RuntimeError, match="out of memory"), torch.autograd.graph.save_on_cpu():
        broken = rig.loss(None, 1.0)
        broken.register_hook(_fail)
        rig.amp.backward(broken, loss_id=1)
    with pytest.raises(ScalerStateError, match="found no gradients"):
        rig.amp.step()
    rig.amp.backward(rig.loss(3.0, None), loss_id=0)
    assert rig.amp.step().taken
    assert rig.values() == [-3.0, 0.0]


def _fail(_):
    raise RuntimeError("out of memory")


def test_the_scales_are_saved_and_come_back():
    rig, again = Rig(), Rig()
    rig.amp.backward(rig.loss(1.0, float("inf")), loss_id=1)
    rig.amp.step()
    again.amp.load_state_dict(rig.amp.state_dict())
    assert again.scales == rig.scales == [2.0**16, 2.0**15]
    with pytest.raises(CheckpointError, match="saved with 2 loss scales, the session has 1"):
        Rig(loss_scale=("dynamic",)).amp.load_state_dict(rig.amp.state_dict())


def test_a_session_of_one_scale_saves_what_it_always_saved():
    assert "more_loss_scales" not in Rig(loss_scale=("dynamic",)).amp.state_dict()


@pytest.mark.parametrize("wrong", [2, -1, True, "1", None])
def test_a_loss_without_a_scale_is_an_error(wrong):
    rig = Rig()
    with pytest.raises(ConfigError, match="this session has 2 loss scales"):
        rig.amp.backward(rig.loss(1.0, 1.0), loss_id=wrong)


def test_wrong_lists_are_errors():
    with pytest.raises(ConfigError, match="one loss scale for each loss"):
        Rig(loss_scale=())
    with pytest.raises(ConfigError, match="unknown loss scale 'much'"):
        Rig(loss_scale=("dynamic", "much"))


def test_a_direct_step_and_a_rank_without_batches_are_refused():
    rig = Rig("torch", "O2", ("none", 8.0))
    rig.amp.backward(rig.loss(1.0, None), loss_id=1)
    with pytest.raises(ScalerStateError, match="carry the session's loss scale 8"):
        rig.optimizers[0].step()
    with pytest.raises(UnsupportedError, match="several losses"):
        rig.amp.step_without_batch()


def test_the_session_names_every_scale():
    rig = Rig(loss_scale=(8.0, 2.0))
    assert "loss scale 8, 2" in str(rig.amp)
