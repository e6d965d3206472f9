"""Loss scales as values, and the tree functions."""

import math
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import ConfigError, LossScaleCollapsed
from halfstep.scaling import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScale,
    NoLossScale,
    SkipCount,
    StaticLossScale,
)
from halfstep.session import prepare
from halfstep.trees import all_finite, select_tree

Pair = namedtuple("Pair", "a b")
SCALES = [NoLossScale(), StaticLossScale(128.0), DynamicLossScale(init=1024.0), HeadroomLossScale()]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def on_device(scale, flags, peaks=None):
    """Run adjust with tensors, as on an accelerator."""
    for i, flag in enumerate(flags):
        scale = scale.adjust(torch.tensor(flag), None if peaks is None else torch.tensor(peaks[i]))
    return scale


@pytest.mark.parametrize("scale", SCALES, ids=lambda s: type(s).__name__)
def test_scale_then_unscale_is_the_identity(scale):
    tree = {
        "x": [torch.randn(3), torch.randn(2).double()],
        "n": 3,
        "i": torch.arange(2),
        "p": Pair(torch.ones(1), "s"),
    }
    back = scale.unscale(scale.scale(tree))
    assert isinstance(back["p"], Pair)
    assert back["n"] == 3
    assert back["p"].b == "s"
    for a, b in zip([*tree["x"], tree["i"], tree["p"].a], [*back["x"], back["i"], back["p"].a]):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_16_bit_loss_does_not_overflow_by_being_scaled(dtype, shape):
    scaled = StaticLossScale(2.0**24).scale(torch.full(shape, 2.0, dtype=dtype))
    assert scaled.dtype == torch.float32
    assert (scaled == 2.0**25).all()


def test_fp16_gradients_unscale_in_fp32_although_the_scale_does_not_fit_fp16():
    scale = StaticLossScale(2.0**20)
    gradient = torch.tensor([1.0, 60000.0], dtype=torch.float16)
    own = scale.unscale([gradient])[0]
    assert own.dtype == torch.float16
    assert own.tolist() == [2.0**-20, torch.tensor(60000 * 2.0**-20).half().item()]
    assert scale.unscale([gradient], torch.float32)[0].tolist() == [2.0**-20, 60000 * 2.0**-20]


def test_unscale_of_a_sparse_gradient():
    with torch.sparse.check_sparse_tensor_invariants(True):
        sparse = torch.sparse_coo_tensor([[0, 2]], [4.0, 8.0], (3,))
        assert StaticLossScale(4.0).unscale(sparse).to_dense().tolist() == [1.0, 0.0, 2.0]


def test_no_loss_scale_hands_back_the_same_objects():
    tree = [torch.ones(2)]
    assert NoLossScale().scale(tree) is tree
    assert NoLossScale().unscale(tree) is tree
    assert NoLossScale().unscale(tree, torch.float64)[0].dtype == torch.float64
    assert NoLossScale().adjust(False) == NoLossScale()


def test_growth_after_interval_clean_steps_and_backoff_at_once():
    scale = DynamicLossScale(init=8.0, interval=3)
    values = []
    for finite in (True, True, True, True, False, True, True, True):
        scale = scale.adjust(finite)
        values.append(scale.read())
    assert values == [8, 8, 16, 16, 8, 8, 8, 16]


def test_adjust_leaves_the_old_value_alone():
    before = DynamicLossScale(init=8.0)
    before.adjust(False)
    assert before.read() == 8.0


def test_hysteresis_tolerates_k_minus_1_overflows_until_the_interval_completes():
    scale = DynamicLossScale(init=64.0, interval=2, hysteresis=3)
    values = []
    for finite in (False, True, False, False, False, True, True, False, False):
        scale = scale.adjust(finite)
        values.append(scale.read())
    #                 tolerated        backs off     refilled by growth, tolerated again
    assert values == [64, 64, 64, 32, 16, 16, 32, 32, 32]


@given(
    flags=st.lists(st.booleans(), max_size=60),
    growth=st.sampled_from([1.1, 2.0, 4.0]),
    backoff=st.sampled_from([0.3, 0.5, 0.9]),
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    start=st.sampled_from([1.0, 3.0, 2.0**16, 2.0**24]),
)
def test_device_state_equals_host_state(flags, growth, backoff, interval, hysteresis, start):
    host = DynamicLossScale(start, growth, backoff, interval, hysteresis)
    device = on_device(host, flags)
    for flag in flags:
        host = host.adjust(flag)
    if flags:
        assert isinstance(device.value, torch.Tensor)
    twin = replace(device, current=device.read(), clean=int(device.clean), overflows=int(device.overflows))
    assert (twin.current, twin.clean, twin.overflows) == (host.current, host.clean, host.overflows)
    assert host.adjust(False) == twin.adjust(False)


@given(
    flags=st.lists(st.booleans(), max_size=80),
    start=st.sampled_from([2.0**-3, 1.0, 2.0**15]),
    growth=st.sampled_from([1.5, 2.0]),
)
def test_equals_torchs_scale_update_inside_the_bounds(flags, start, growth):
    ours = DynamicLossScale(start, growth, 0.5, 3, min=2.0**-100, max=2.0**100)
    scale, tracker = torch.tensor(start), torch.tensor(0, dtype=torch.int32)
    for finite in flags:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(not finite)), growth, 0.5, 3)
        ours = ours.adjust(finite)
        assert (ours.current, ours.clean) == (scale.item(), tracker.item())


@pytest.mark.parametrize("scale", SCALES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    "adjust", [lambda s: s, lambda s: s.adjust(False, 2.0), lambda s: on_device(s, [True], [2.0])]
)
def test_state_round_trip(scale, adjust):
    scale = adjust(scale)
    back = LossScale.from_state(scale.state_dict())
    assert type(back) is type(scale)
    assert back.read() == scale.read()
    assert back.state_dict() == scale.state_dict()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: StaticLossScale(0.0), "0.0"),
        (lambda: StaticLossScale(math.inf), "inf"),
        (lambda: StaticLossScale("128"), "'128'"),
        (lambda: DynamicLossScale(init=0.5), "0.5"),
        (lambda: DynamicLossScale(growth=0.9), "growth"),
        (lambda: DynamicLossScale(backoff=1.1), "backoff"),
        (lambda: DynamicLossScale(interval=0), "interval"),
        (lambda: DynamicLossScale(interval=2.0), "2.0"),
        (lambda: DynamicLossScale(hysteresis=0), "hysteresis"),
        (lambda: DynamicLossScale(min=4.0, max=2.0), "min=4.0"),
        (lambda: HeadroomLossScale(window=0), "window"),
        (lambda: HeadroomLossScale().adjust(True), "amax"),
        (lambda: NoLossScale().with_value(2.0), "NoLossScale"),
        (lambda: LossScale.from_state({"kind": "Magic"}), "Magic"),
        (lambda: LossScale.from_state({"kind": "StaticLossScale", "volume": 11}), "volume"),
        (lambda: SkipCount(limit=0), "max_skips"),
        (lambda: select_tree(torch.tensor(True), [1], [2]), "without reading"),
        (lambda: select_tree(torch.tensor(True), [torch.ones(1)], torch.ones(1)), "one shape"),
    ],
)
def test_bad_input_is_one_clear_error(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_growth_of_one_and_an_interval_without_end_leave_the_scale_alone():
    still = DynamicLossScale(init=8.0, growth=1.0, backoff=1.0, interval=2**63 - 1)
    for finite in (True, False, True):
        assert still.adjust(finite).read() == 8.0
        assert still.adjust(torch.tensor(finite)).read() == 8.0
    endless = DynamicLossScale(init=8.0, interval=2**63 - 1)
    assert endless.adjust(torch.tensor(True)).read() == 8.0


def test_with_value_sets_and_clamps_without_reading():
    scale = DynamicLossScale(init=8.0, max=64.0)
    assert scale.with_value(32.0).read() == 32.0
    mine = torch.tensor([128.0])
    set_by_tensor = scale.with_value(mine)
    mine.fill_(3.0)
    assert set_by_tensor.read() == 64.0
    assert StaticLossScale(2.0).with_value(4.0) == StaticLossScale(4.0)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_all_finite_sees_any_bad_value(dtype, bad):
    good = torch.ones(300, dtype=dtype)
    spoiled = good.clone()
    spoiled[137] = bad
    assert bool(all_finite({"a": good, "i": torch.arange(3), "empty": torch.empty(0), "none": None}))
    assert not bool(all_finite([good, (spoiled,)]))


def test_all_finite_of_nothing_and_of_sparse():
    assert bool(all_finite([]))
    with torch.sparse.check_sparse_tensor_invariants(True):
        pile = torch.sparse_coo_tensor([[1, 1]], torch.tensor([60000.0, 60000.0], dtype=torch.float16), (3,))
        assert not bool(all_finite([pile]))


def test_largest_finite_values_are_finite():
    assert bool(
        all_finite([torch.full((3,), torch.finfo(d).max, dtype=d) for d in (torch.float16, torch.float32)])
    )


@pytest.mark.parametrize("pred", [True, False])
def test_select_tree(pred):
    a, b = {"w": torch.ones(2), "n": 1}, {"w": torch.zeros(2), "n": 1}
    assert select_tree(pred, a, b) is (a if pred else b)
    chosen = select_tree(torch.tensor(pred), a, b)
    assert torch.equal(chosen["w"], (a if pred else b)["w"])
    assert chosen["n"] == 1


def test_skip_count_counts():
    count = SkipCount(limit=3)
    for taken in (True, False, False, True, False):
        count = count.after(taken)
    assert (count.in_row, count.total, count.steps) == (1, 3, 5)


def test_skip_count_names_the_scale():
    count = SkipCount(limit=2).after(False)
    with pytest.raises(LossScaleCollapsed, match=r"2 steps in a row.*0\.25"):
        count.after(False, scale=0.25)


def skips(scale, peaks):
    """Count overflows of an fp16 gradient whose unscaled largest magnitude follows `peaks`."""
    skipped = 0
    for peak in peaks:
        finite = scale.read() * peak <= 65504.0
        skipped += not finite
        scale = scale.adjust(finite, peak)
    return skipped, scale


magnitudes = st.integers(-60, 60).map(lambda k: 2.0 ** (k / 4))


@given(
    peaks=st.lists(
        st.lists(magnitudes, min_size=1, max_size=3).flatmap(lambda p: st.just(p * 5)), max_size=30
    ),
    interval=st.integers(1, 8),
    window=st.integers(1, 6),
    bits=st.integers(1, 4),
    hysteresis=st.integers(1, 2),
)
def test_headroom_never_skips_more_than_blind_growth(peaks, interval, window, bits, hysteresis):
    blind = DynamicLossScale(interval=interval, hysteresis=hysteresis)
    sequence = [p for run in peaks for p in run]
    informed = HeadroomLossScale(bits, window, blind)
    assert skips(informed, sequence)[0] <= skips(blind, sequence)[0]


def test_headroom_skips_at_most_half_while_gradients_shrink_by_2_to_the_12():
    noise = torch.rand(2000, generator=torch.Generator().manual_seed(0)) + 0.5
    peaks = [2.0 ** (2 - 12 * i / 2000) * float(x) for i, x in enumerate(noise)]
    blind = DynamicLossScale(interval=20)
    (ours, end), (theirs, blind_end) = skips(HeadroomLossScale(limit=blind), peaks), skips(blind, peaks)
    assert theirs >= 20
    assert ours <= theirs / 2
    assert end.read() >= blind_end.read() / 8  # and it followed them down


def test_headroom_keeps_bits_to_spare_and_is_a_power_of_two():
    scale = HeadroomLossScale(bits=3, limit=DynamicLossScale(max=2.0**24, init=2.0**24))
    for peak in (0.3, 0.7, 0.1):
        scale = scale.adjust(True, peak)
    assert math.frexp(scale.read())[0] == 0.5
    assert scale.read() * 0.7 * 8 <= 65504 < scale.read() * 0.7 * 16


def test_headroom_forgets_after_its_window():
    scale = HeadroomLossScale(bits=1, window=3, limit=DynamicLossScale(init=2.0**24))
    values = []
    for peak in (1.0, 0.25, 0.25, 0.25, 0.0, 0.0, 0.0):
        scale = scale.adjust(True, peak)
        values.append(scale.read())
    assert values == [2**14, 2**14, 2**14, 2**16, 2**16, 2**16, 2**20]  # the limit has learned, too


def test_headroom_backs_off_when_an_inf_comes_from_inside():
    scale = HeadroomLossScale(bits=2).adjust(True, 0.5)
    before = scale.read()
    assert scale.adjust(False, math.nan).read() <= before / 4


@given(st.lists(st.tuples(st.booleans(), magnitudes), min_size=1, max_size=40), st.integers(1, 4))
def test_headroom_device_state_equals_host_state(steps, interval):
    host = HeadroomLossScale(window=3, limit=DynamicLossScale(interval=interval))
    device = host
    for finite, peak in steps:
        peak = torch.tensor(peak).item()
        host = host.adjust(finite, peak if finite else math.inf)
        device = device.adjust(torch.tensor(finite), torch.tensor(peak if finite else math.inf))
        assert device.read() == host.read()
    assert isinstance(device.value, torch.Tensor)


def test_a_scale_that_checkpoints_cannot_keep_is_refused():
    class Halved(LossScale):
        value = 8.0

    told = r"the loss scale Halved is no dataclass.*write @dataclass\(frozen=True\) above class Halved"
    try:
        with pytest.raises(ConfigError, match=told):
            Halved().state_dict()
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ConfigError, match=told):
            prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="fp16", loss_scale=Halved())
    finally:
        LossScale._kinds.pop("Halved")
