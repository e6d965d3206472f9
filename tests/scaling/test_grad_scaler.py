"""GradScaler against torch's own, call by call, and where it is better on purpose."""

import copy
import gc
import math
import pickle
import weakref
from collections import namedtuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep.errors import (
    CheckpointError,
    ConfigError,
    HalfstepWarning,
    LossScaleCollapsed,
    ScalerStateError,
    UnsupportedError,
)
from halfstep.gradients.stats import measure
from halfstep.scaling import DynamicLossScale, HeadroomLossScale, NoLossScale, StaticLossScale
from halfstep.scaling.grad_scaler import GradScaler

Pair = namedtuple("Pair", "a b")
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Rig:
    """Two small networks with an optimizer each, one loss over both, and a scaler."""

    def __init__(self, scaler, kinds):
        torch.manual_seed(0)
        self.scaler = scaler
        self.nets = [nn.Linear(3, 2) for _ in kinds]
        self.optimizers = [OPTIMIZERS[kind](net.parameters()) for kind, net in zip(kinds, self.nets)]
        self.data = torch.randn(4, 3)

    def iterate(self, accumulate, clip, bad, new_scale):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for micro in range(accumulate):
            losses = [net(self.data + micro).square().mean() for net in self.nets]
            for loss in self.scaler.scale(losses):
                loss.backward()
        for net, value in zip(self.nets, bad):
            if value is not None:
                net.weight.grad[0, 1] = value
        for net, optimizer, clips in zip(self.nets, self.optimizers, clip):
            if clips:
                self.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            self.scaler.step(optimizer)
        self.scaler.update(new_scale)

    def weights(self):
        return [p for net in self.nets for p in net.parameters()]


iterations = st.tuples(
    st.integers(1, 2),
    st.tuples(st.booleans(), st.booleans()),
    st.tuples(*[st.sampled_from([None, None, None, math.inf, -math.inf, math.nan])] * 2),
    st.sampled_from([None, None, None, None, 512.0, "tensor"]),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    kinds=st.tuples(*[st.sampled_from(list(OPTIMIZERS))] * 2),
    script=st.lists(iterations, min_size=1, max_size=10),
    growth=st.sampled_from([2.0, 1.7]),
    interval=st.integers(1, 4),
)
def test_same_calls_same_scales_skips_and_bits_as_torch(kinds, script, growth, interval):
    arguments = {
        "init_scale": 256.0,
        "growth_factor": growth,
        "backoff_factor": 0.5,
        "growth_interval": interval,
    }
    ours = Rig(GradScaler("cpu", **arguments), kinds)
    torchs = Rig(torch.amp.GradScaler("cpu", **arguments), kinds)
    for accumulate, clip, bad, new_scale in script:
        new_scale = torch.tensor(64.0) if new_scale == "tensor" else new_scale
        ours.iterate(accumulate, clip, bad, new_scale)
        torchs.iterate(accumulate, clip, bad, new_scale)
        assert ours.scaler.state_dict() | {"halfstep": 0} == torchs.scaler.state_dict() | {"halfstep": 0}
        for a, b in zip(ours.weights(), torchs.weights()):
            assert torch.equal(a, b)


def one(scaler=None, kind="sgd", dtype=torch.float32):
    """A net with gradients of a scaled loss, its optimizer and scaler."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2).to(dtype)
    optimizer = OPTIMIZERS[kind](net.parameters())
    scaler = GradScaler(init_scale=128.0) if scaler is None else scaler
    scaler.scale(net(torch.ones(1, 3, dtype=dtype)).float().sum()).backward()
    return net, optimizer, scaler


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_step_tells_what_it_did(kind):
    net, optimizer, scaler = one(kind=kind)
    norm = measure([p.grad for p in net.parameters()], 1 / 128.0).norm.item()
    outcome = scaler.step(optimizer)
    assert (outcome.taken, outcome.finite, outcome.scale, outcome.grad_norm) == (True, True, 128.0, norm)
    scaler.update()
    net.weight.grad[0, 0] = math.inf
    before = net.weight.detach().clone()
    outcome = scaler.step(optimizer)
    assert not outcome
    assert outcome.reason == "skipped: gradients hold inf or NaN"
    assert torch.equal(net.weight, before)


def test_outcome_carries_the_optimizers_own_result():
    class Talkative(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            return 17

    net, _, scaler = one()
    assert scaler.step(Talkative(net.parameters(), lr=0.1)).result == 17


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_unscaled_in_fp32(dtype):
    net, optimizer, scaler = one(GradScaler(init_scale=2.0**17), dtype=dtype)  # does not fit fp16
    for p in net.parameters():
        p.grad = torch.full_like(p, 4096.0)
    scaler.unscale_(optimizer)
    assert {p.grad.dtype for p in net.parameters()} == {dtype}
    assert all((p.grad == 2.0**-5).all() for p in net.parameters())
    assert scaler.step(optimizer)


def test_an_fp16_gradient_lifted_over_the_top_by_a_scale_below_one_is_found():
    net, optimizer, scaler = one(GradScaler(init_scale=0.5), dtype=torch.float16)
    net.weight.grad.fill_(60000.0)
    assert not scaler.step(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sparse_gradients(dtype):
    table = nn.Embedding(5, 2, sparse=True).to(dtype)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    before = table.weight.detach().clone()
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(table(torch.tensor([1, 1, 3])).float().sum()).backward()
    assert scaler.step(optimizer)
    moved = (before - table.weight.detach()).float().round()
    assert moved[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]
    scaler.update()
    table.weight.grad = None
    scaler.scale(table(torch.tensor([1, 1])).float().sum() * 50000).backward()
    big = dtype == torch.float16  # 8 * 50000 overflows fp16 in the gradient
    assert bool(scaler.step(optimizer)) is not big


def test_sparse_duplicates_whose_sum_overflows_are_found():
    table = nn.Embedding(3, 1, sparse=True).half()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = GradScaler(init_scale=1.0)
    scaler.scale(table(torch.tensor([1, 1])).float().sum() * 40000).backward()
    assert not scaler.step(optimizer)


def test_scale_takes_tensors_nests_and_iterables():
    scaler, x = GradScaler(init_scale=4.0), torch.ones(2)
    assert scaler.scale(x).tolist() == [4.0, 4.0]
    assert scaler.scale({"a": [x, (x,)]})["a"][1][0].tolist() == [4.0, 4.0]
    assert isinstance(scaler.scale(Pair(x, x)), Pair)
    assert [t.tolist() for t in scaler.scale(t for t in (x, x))] == [[4.0, 4.0]] * 2
    with pytest.raises(ConfigError, match="iterable of Tensors"):
        scaler.scale(3.0)
    with pytest.raises(ConfigError, match="iterable of Tensors"):
        scaler.scale("loss")


def test_gradient_penalty():
    """Torch's pattern: scaled gradients by autograd.grad, unscaled by hand, back into the loss."""
    results = []
    for scaler in (GradScaler("cpu", init_scale=64.0), torch.amp.GradScaler("cpu", init_scale=64.0)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss = net(torch.ones(2, 3)).square().mean()
        grads = torch.autograd.grad(scaler.scale(loss), list(net.parameters()), create_graph=True)
        penalty = sum((g / scaler.get_scale()).square().sum() for g in grads).sqrt()
        scaler.scale(loss + penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def used(stage):
    net, optimizer, scaler = one()
    if stage == "unscaled":
        scaler.unscale_(optimizer)
    if stage == "stepped":
        scaler.step(optimizer)
    return net, optimizer, scaler


@pytest.mark.parametrize(
    ("stage", "call", "says"),
    [
        ("unscaled", lambda s, o: s.unscale_(o), r"unscale_\(\) has already been called on this optimizer"),
        ("stepped", lambda s, o: s.unscale_(o), r"unscale_\(\) is being called after step\(\)"),
        ("stepped", lambda s, o: s.step(o), r"step\(\) has already been called since the last update"),
        ("fresh", lambda s, o: s.update(), "No inf checks were recorded prior to update"),
        ("fresh", lambda s, o: s.load_state_dict({}), "source state dict is empty"),
        ("stepped", lambda s, o: pickle.dumps(s), "may only be pickled at the beginning of an iteration"),
    ],
)
def test_out_of_turn(stage, call, says):
    _, optimizer, scaler = used(stage)
    with pytest.raises(ScalerStateError, match=says):
        call(scaler, optimizer)


@pytest.mark.parametrize(
    "call", [lambda s, o: s.unscale_(o), lambda s, o: s.step(o), lambda s, o: s.update()]
)
def test_before_any_loss_was_scaled(call):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(ScalerStateError, match=r"did not use scaler\.scale\(loss or outputs\)"):
        call(GradScaler(), optimizer)


def test_an_optimizer_without_gradients_is_an_error():
    _, optimizer, scaler = one()
    optimizer.zero_grad()
    with pytest.raises(ScalerStateError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_closures_are_refused_and_none_is_not_one(how):
    _, optimizer, scaler = one()
    args, kwargs = ((lambda: 0,), {}) if how == "positional" else ((), {"closure": lambda: 0})
    with pytest.raises(UnsupportedError, match="Closure use is not currently supported"):
        scaler.step(optimizer, *args, **kwargs)
    assert scaler.step(optimizer, closure=None)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: GradScaler(1024.0), "1024.0"),
        (lambda: GradScaler(growth_factor=0.5), "growth"),
        (lambda: GradScaler(backoff_factor=2.0), "backoff"),
        (lambda: GradScaler(init_scale=0.0), "0.0"),
        (lambda: one()[2].update(torch.ones(2)), "1-element"),
        (lambda: one()[2].update(torch.ones(1, requires_grad=True)), "requires_grad"),
        (lambda: one()[2].update("big"), "big"),
    ],
)
def test_bad_arguments(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


def test_getters_and_setters():
    scaler = GradScaler(init_scale=8.0)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(3)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        4.0,
        0.25,
        3,
    )
    assert (scaler.get_scale(), scaler.is_enabled()) == (8.0, True)
    constant = GradScaler(loss_scale=StaticLossScale(2.0))
    assert (constant.get_growth_factor(), constant.get_backoff_factor()) == (1.0, 1.0)


STATE = {
    "scale": 32.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": 5,
}


def test_torch_checkpoints_load_both_ways():
    ours, torchs = GradScaler(), torch.amp.GradScaler("cpu")
    ours.load_state_dict(STATE)
    torchs.load_state_dict(ours.state_dict())
    assert ours.state_dict() == torchs.state_dict() == STATE


@pytest.mark.parametrize("missing", STATE)
def test_a_state_that_is_none_is_refused(missing):
    with pytest.raises(CheckpointError, match=missing):
        GradScaler().load_state_dict({k: v for k, v in STATE.items() if k != missing})


@pytest.mark.parametrize(
    "loss_scale",
    [
        HeadroomLossScale(),
        StaticLossScale(64.0),
        DynamicLossScale(hysteresis=2),
        DynamicLossScale(max=2.0**17),
    ],
    ids=lambda s: type(s).__name__,
)
def test_state_says_what_torchs_five_entries_cannot(loss_scale):
    net, optimizer, scaler = one(GradScaler(loss_scale=loss_scale))
    net.weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    back = GradScaler()
    back.load_state_dict(scaler.state_dict())
    assert back.loss_scale == scaler.loss_scale
    assert back.skips.in_row == 1
    if not isinstance(loss_scale, StaticLossScale):
        torchs = torch.amp.GradScaler("cpu")
        torchs.load_state_dict(scaler.state_dict())
        assert torchs.get_scale() == scaler.get_scale()


def test_pickle_keeps_the_state():
    _, optimizer, scaler = one()
    scaler.step(optimizer)
    scaler.update()
    twin = pickle.loads(pickle.dumps(scaler))
    assert twin.state_dict() == scaler.state_dict()


def test_deepcopy_in_the_middle_of_an_iteration_follows_the_copied_optimizer():
    _, optimizer, scaler = one()
    scaler.unscale_(optimizer)
    twin_optimizer, twin = copy.deepcopy((optimizer, scaler))
    assert twin.step(twin_optimizer)
    with pytest.raises(ScalerStateError, match="already been called"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nothing_is_left_on_the_optimizer_and_it_is_let_go_by_update(kind):
    net, optimizer, scaler = one(kind=kind)
    attributes = set(vars(optimizer))
    scaler.step(optimizer)
    assert set(vars(optimizer)) == attributes
    alive = weakref.ref(optimizer)
    del optimizer
    fresh = OPTIMIZERS[kind](net.parameters())  # within an iteration none gets the address of another
    assert scaler.step(fresh)
    scaler.update()
    gc.collect()
    assert alive() is None


def test_one_of_two_optimizers_skips_and_the_scale_backs_off_once():
    rig = Rig(GradScaler(init_scale=256.0), ("sgd", "adamw-foreach"))
    before = [p.detach().clone() for p in rig.weights()]
    rig.iterate(1, (False, False), (math.inf, None), None)
    moved = [not torch.equal(a, b) for a, b in zip(before, rig.weights())]
    assert moved == [False, False, True, True]
    assert rig.scaler.get_scale() == 128.0
    assert rig.scaler.skips.total == 1


def test_update_to_a_value_copies_a_tensor():
    _, optimizer, scaler = one()
    scaler.step(optimizer)
    mine = torch.tensor([512.0])
    scaler.update(mine)
    mine.zero_()
    assert scaler.get_scale() == 512.0
    scaler.update(64)
    assert scaler.get_scale() == 64.0


class OnePass(torch.optim.SGD):
    """The smallest optimizer with the one-pass interface."""

    one_pass = True

    def measure(self, inv_scale=None):
        return measure([p.grad for g in self.param_groups for p in g["params"]], inv_scale)

    def step(self, closure=None, *, inv_scale=None, clip_coef=None, found_inf=None):
        self.seen = (inv_scale, found_inf)
        if not bool(found_inf):
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad, alpha=float(1.0 if inv_scale is None else inv_scale))


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_one_pass_optimizer_unscales_and_skips_itself(unscale_first):
    net, _, scaler = one()
    optimizer = OnePass(net.parameters(), lr=1.0)
    scaled, before = net.weight.grad.clone(), net.weight.detach().clone()
    if unscale_first:
        scaler.unscale_(optimizer)
    outcome = scaler.step(optimizer)
    assert outcome.taken
    torch.testing.assert_close(before - net.weight.detach(), scaled / 128)
    assert torch.equal(net.weight.grad, scaled) is not unscale_first
    assert (optimizer.seen[0] is None) is unscale_first
    scaler.update()
    net.weight.grad[0, 0] = math.nan
    assert not scaler.step(optimizer)


@pytest.mark.parametrize("arguments", [{"enabled": False}, {"loss_scale": NoLossScale()}])
def test_disabled_is_torchs_no_op_but_tells(arguments):
    net, optimizer, scaler = one(GradScaler(**arguments))
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.state_dict()) == (1.0, False, {})
    scaler.load_state_dict(STATE)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer)
    scaler.update()
    net.weight.grad[0, 0] = math.inf
    with pytest.warns(HalfstepWarning, match="inf or NaN and the step was taken"):
        outcome = scaler.step(optimizer)
    scaler.step(optimizer)  # a second warning would be an error
    assert outcome.taken
    assert not outcome.finite


def test_disabled_takes_closures():
    net, _, scaler = one(GradScaler(enabled=False))
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    outcome = scaler.step(optimizer, closure)
    assert outcome.taken
    assert outcome.result > 0


def test_headroom_in_the_scaler_sees_unscaled_magnitudes():
    limit = DynamicLossScale(init=2.0**20)
    net, optimizer, scaler = one(GradScaler(loss_scale=HeadroomLossScale(bits=1, limit=limit)))
    net.weight.grad.fill_(2.0**20 * 8)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**11  # 65504 / (8 * 2), a power of two


def test_a_collapsing_scale_is_an_error():
    net, optimizer, scaler = one(GradScaler(init_scale=128.0, max_skips=3))
    with pytest.raises(LossScaleCollapsed, match=r"3 steps in a row.*32"):
        for _ in range(3):
            net.weight.grad.fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()


def test_halfsteps_own_optimizer_in_one_pass():
    from halfstep.optim import AdamW

    torch.manual_seed(0)
    net = nn.Linear(8, 4).bfloat16()
    optimizer, scaler = AdamW(net.parameters(), lr=0.01), GradScaler(init_scale=256.0)
    taken = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(3, 8).bfloat16()).float().square().mean()).backward()
        scaled = net.weight.grad.clone()
        if step == 1:
            net.weight.grad[0, 0] = math.inf
        before = net.weight.detach().clone()
        outcome = scaler.step(optimizer)
        scaler.update()
        taken.append(outcome.taken)
        assert torch.equal(before, net.weight) is not outcome.taken
        if outcome.taken:
            assert torch.equal(net.weight.grad, scaled)  # gradients are read, never written
            assert outcome.amax > 0
    assert taken == [True, False, True]


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_host_sees_a_skip_by_step_not_being_called(unscale_first):
    """accelerate puts a `step` there that notes its call, and moves its scheduler where it was called."""
    from halfstep.optim import AdamW

    net, rates, called, said = nn.Linear(8, 4).bfloat16(), [], [], []
    optimizer, scaler = AdamW(net.parameters(), lr=0.01), GradScaler(init_scale=256.0)
    schedule, own = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), optimizer.step

    def noting(*args, **kwargs):
        called.append(True)
        return own(*args, **kwargs)

    for step in range(3):
        scaler.scale(net(torch.ones(3, 8).bfloat16()).float().square().mean()).backward()
        if step == 1:
            net.weight.grad[0, 0] = math.inf
        if unscale_first:
            scaler.unscale_(optimizer)
        called.clear()
        optimizer.step = noting
        said.append(scaler.step(optimizer) is optimizer.outcome)
        optimizer.step = own
        scaler.update()
        if called:
            schedule.step()
        rates.append(schedule.get_last_lr()[0])
        optimizer.zero_grad()
    assert rates == [0.005, 0.005, 0.0025]
    assert all(said)
    assert optimizer.state[net.weight]["step"] == 2


def test_masters_around_torchs_optimizer():
    from halfstep.optim import MasterWeights

    net = nn.Linear(8, 4).half()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), GradScaler(init_scale=2.0**10)
    masters = MasterWeights(optimizer, net)
    before = [p.detach().clone() for p in masters.params()]
    scaler.scale(net(torch.ones(1, 8).half()).float().sum()).backward()
    scaler.unscale_(optimizer)
    assert {p.grad.dtype for p in masters.params()} == {torch.float32}
    assert scaler.step(optimizer)
    for old, new in zip(before, masters.params()):
        torch.testing.assert_close(old - 1e-3, new.detach())
