"""Law 4: a loss scale stays inside [min, max]; k skips in a row raise LossScaleCollapsed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep.errors import LossScaleCollapsed
from halfstep.scaling import DynamicLossScale, HeadroomLossScale, SkipCount
from halfstep.scaling.grad_scaler import GradScaler

flags = st.lists(st.booleans(), max_size=60)
bounds = st.sampled_from([(1.0, 2.0**24), (4.0, 4.0), (0.3, 700.0), (2.0**-126, 2.0**127)])
factors = st.tuples(st.sampled_from([2.0, 3.7, 1e6]), st.sampled_from([0.5, 0.27, 1e-6]))


@given(flags, bounds, factors, st.integers(1, 3), st.booleans())
def test_dynamic(sequence, limits, factor, interval, on_device):
    low, high = limits
    start = min(max(256.0, low), high)
    scale = DynamicLossScale(start, *factor, interval, min=low, max=high)
    low, high = torch.tensor(limits).tolist()  # as float32 has them
    for finite in sequence:
        scale = scale.adjust(torch.tensor(finite) if on_device else finite)
        assert low <= scale.read() <= high
        assert math.isfinite(scale.read())


@given(flags, bounds, st.sampled_from([0.0, 1e-30, 1.0, 3e38]), st.booleans())
def test_headroom(sequence, limits, peak, on_device):
    low, high = limits
    start = min(max(256.0, low), high)
    scale = HeadroomLossScale(limit=DynamicLossScale(start, interval=1, min=low, max=high), window=2)
    low, high = torch.tensor(limits).tolist()
    for finite in sequence:
        seen = peak if finite else math.inf
        arguments = (torch.tensor(finite), torch.tensor(seen)) if on_device else (finite, seen)
        scale = scale.adjust(*arguments)
        assert low <= scale.read() <= high


@pytest.mark.parametrize("new", [1e-3, 1e30])
def test_a_scale_set_by_hand(new):
    scale = DynamicLossScale().with_value(torch.tensor(new))
    assert 1.0 <= scale.read() <= 2.0**24


def test_growth_in_the_scaler_never_reaches_inf():
    net = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=2.0**125, growth_interval=1)
    for _ in range(5):
        net.zero_grad()
        scaler.scale(net(torch.ones(1, 1).double()).sum() * 1e-30).backward()
        assert scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**127


def overflow(scaler, net, optimizer, times):
    for _ in range(times):
        net.zero_grad()
        scaler.scale(net(torch.ones(1, 1)).sum() * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(("arguments", "limit"), [({}, 50), ({"max_skips": 3}, 3)])
def test_k_skips_in_a_row_raise(arguments, limit):
    net = nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), GradScaler(**arguments)
    overflow(scaler, net, optimizer, limit - 1)
    assert scaler.skips.in_row == limit - 1
    with pytest.raises(LossScaleCollapsed, match=f"{limit} steps in a row"):
        overflow(scaler, net, optimizer, 1)


def test_one_taken_step_begins_the_count_anew():
    count = SkipCount()
    for taken in [*[False] * 49, True, *[False] * 49]:
        count = count.after(taken)
    assert count.in_row == 49
    with pytest.raises(LossScaleCollapsed, match="50 steps in a row"):
        count.after(False)
