"""The resolution check: which masters would freeze, before training and during it."""

import warnings

import pytest
import torch
from torch import nn

from halfstep.errors import HalfstepWarning
from halfstep.optim import SGD, AdamW, lost_updates, resolution

BF16 = torch.bfloat16


def weights(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((1000,), value, dtype=dtype)) for value in (1.0, 1e-5)]


def test_bf16_alone_freezes_and_the_remedy_is_named():
    with pytest.warns(HalfstepWarning, match="1 of 2 tensors would freeze.*master='exact'"):
        large, small = resolution(AdamW(weights(), lr=1e-4, master=None))
    assert large.freezes
    assert large.ulp == 2.0**-7
    assert large.step == pytest.approx(1e-4)
    assert not small.freezes


@pytest.mark.parametrize("master", ["exact", "fp32", "stochastic"])
def test_masters_do_not_freeze(master: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(r.freezes for r in resolution(AdamW(weights(), lr=1e-6, master=master)))


def test_sgd_needs_a_gradient_to_judge():
    params = weights(torch.float16)
    optimizer = SGD(params, lr=1e-3, master=None)
    assert resolution(optimizer) == []
    params[0].grad = torch.full_like(params[0], 1e-2)
    with pytest.warns(HalfstepWarning, match="group 0, parameter 0"):
        assert resolution(optimizer)[0].frozen == 1.0


@pytest.mark.parametrize(("master", "expected"), [("exact", 0.0), ("stochastic", 0.0), (None, 0.5)])
def test_lost_updates_are_counted(master: str | None, expected: float):
    params = weights()
    optimizer = AdamW(params, lr=1e-4, weight_decay=0.0, master=master, backend="reference")
    for p in params:
        p.grad = torch.ones_like(p)
    with lost_updates(optimizer) as lost:
        optimizer.step()
    assert lost.total == expected
    assert lost.shares[params[0]] == 2 * expected
    assert lost.shares[params[1]] == 0.0
