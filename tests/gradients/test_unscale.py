"""Unscaling in place: the plain implementation equals torch's kernel, a vendor's kernels take their place."""

import math

import pytest
import torch

from halfstep import devices
from halfstep.devices import Accelerator
from halfstep.gradients import unscale
from halfstep.scaling import DynamicLossScale
from halfstep.scaling.grad_scaler import GradScaler

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def registered(monkeypatch):
    calls = []

    def check_and_unscale(grads, found_inf, inv_scale):
        calls.append(len(grads))
        unscale.plain_check_and_unscale(grads, found_inf, inv_scale)

    def update_scale(scale, tracker, found_inf, growth, backoff, interval):
        calls.append("update")
        torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)

    kernels = Accelerator("cpu", finite_check=check_and_unscale, update_scale=update_scale)
    monkeypatch.setattr(devices, "declared", {"cpu": kernels}.get)
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_plain_equals_torchs_kernel(dtype, bad):
    ours = [torch.randn(9).to(dtype), torch.randn(2, 3).to(dtype)]
    if bad is not None:
        ours[1][0, 0] = bad
    theirs = [g.clone() for g in ours]
    found = [torch.zeros(()), torch.zeros(())]
    inverse = torch.tensor(1 / 3)
    unscale.plain_check_and_unscale(ours, found[0], inverse)
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, found[1], inverse)
    assert torch.equal(*found)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, theirs))


def test_a_device_without_torchs_kernel_runs_the_plain_one(monkeypatch):
    def absent(*args):
        raise NotImplementedError

    monkeypatch.setattr(unscale, "_torch_kernel", absent)
    grads = [torch.tensor([4.0, math.nan]), torch.tensor([8.0])]
    assert bool(unscale.unscale_(grads, torch.tensor(0.25)))
    assert [g[0].item() for g in grads] == [1.0, 2.0]


def test_mixed_dtypes_sparse_and_none():
    with torch.sparse.check_sparse_tensor_invariants(True):
        sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, 4.0], (3,))
    grads = [torch.tensor([2.0]), None, torch.tensor([4.0], dtype=torch.float16), sparse]
    assert not bool(unscale.unscale_(grads, torch.tensor(0.5)))
    assert (grads[0].item(), grads[2].item(), sparse.to_dense().tolist()) == (1.0, 2.0, [0.0, 3.0, 0.0])


def test_a_vendors_kernels_are_used(registered):
    net = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), GradScaler(init_scale=4.0)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    assert scaler.step(optimizer)
    assert registered == [2]


def test_a_vendors_scale_update_stays_in_the_bounds(registered):
    update = devices.declared("cpu").update_scale
    scale = DynamicLossScale(init=4.0, interval=1, max=4.0, min=4.0)
    for found in (0.0, 1.0):
        scale = scale.adjust_by_kernel(update, torch.tensor(found))
        assert scale.read() == 4.0
    patient = DynamicLossScale(init=4.0, hysteresis=2)
    assert patient.adjust_by_kernel(update, torch.tensor(1.0)).read() == 4.0
    assert registered == ["update"] * 2
