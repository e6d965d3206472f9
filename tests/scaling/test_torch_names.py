"""Names that public code uses on torch's GradScaler and autocast, beside torch's."""

import pytest
import torch
from torch.amp.grad_scaler import OptState

import halfstep as hs
from halfstep.compat import torch_amp
from halfstep.errors import ConfigError

SCALERS = {"torch": torch.amp.GradScaler, "halfstep": torch_amp.GradScaler}


def trained(kind, bad=False):
    """One backward of a scaled loss; the optimizer and its scaler."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = SCALERS[kind]("cpu", init_scale=4.0, growth_interval=2)
    scaler.scale((weight * torch.tensor([1.0, 2.0, torch.inf if bad else 3.0])).sum()).backward()
    return weight, optimizer, scaler


def told(kind):
    """What the private names say over two iterations, the second of them bad."""
    says = []
    for bad in (False, True):
        _weight, optimizer, scaler = trained(kind, bad)
        says.append(dict(scaler._per_optimizer_states))
        scaler.unscale_(optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]
        says.append((state["stage"], {str(d): float(f) for d, f in state["found_inf_per_device"].items()}))
        says.append({str(d): float(f) for d, f in scaler._found_inf_per_device(optimizer).items()})
        scaler.step(optimizer)
        says.append(scaler._per_optimizer_states[id(optimizer)]["stage"])
        scaler.update()
        says.append((float(scaler._scale), scaler._scale.dtype, int(scaler._growth_tracker)))
        says.append((scaler._enabled, scaler._get_growth_tracker(), float(scaler._get_scale_async())))
        says.append((scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval))
        says.append(dict(scaler._per_optimizer_states))
    return says


def test_the_names_say_what_they_say_on_torchs():
    assert told("halfstep") == told("torch")


@pytest.mark.parametrize("kind", SCALERS)
def test_before_the_first_loss_there_is_no_scale(kind):
    scaler = SCALERS[kind]("cpu")
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert scaler._enabled
    assert not SCALERS[kind]("cpu", enabled=False)._enabled
    assert scaler._per_optimizer_states[7] == {"stage": OptState.READY, "found_inf_per_device": {}}


@pytest.mark.parametrize("kind", SCALERS)
def test_gradients_are_unscaled_by_a_scale_of_ones_own(kind):
    weight, optimizer, scaler = trained(kind)
    found = torch.zeros(())
    by_device = scaler._unscale_grads_(optimizer, torch.tensor(0.25), found, False)
    assert weight.grad.tolist() == [1.0, 2.0, 3.0]
    assert {str(d): float(f) for d, f in by_device.items()} == {"cpu": 0.0}
    weight.grad[0] = torch.nan
    by_device = scaler._unscale_grads_(optimizer, torch.tensor(1.0), found, False)
    assert [float(f) for f in by_device.values()] == [1.0]


@pytest.mark.parametrize("allowed", [False, True])
def test_fp16_gradients_are_unscaled_whether_torch_allows_it_or_not(allowed):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    hs.GradScaler()._unscale_grads_(optimizer, torch.tensor(0.5), torch.zeros(()), allowed)
    assert weight.grad.tolist() == [0.5] * 3


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", SCALERS)
def test_inf_checks_alone(kind, bad):
    _weight, optimizer, scaler = trained(kind, bad)
    found = scaler._check_inf_per_device(optimizer)
    assert [float(f) for f in found.values()] == [float(bad)]
    assert [float(f) for f in scaler._found_inf_per_device(optimizer).values()] == [float(bad)]


def test_the_scale_is_set_through_its_name():
    _, _, scaler = trained("halfstep")
    scaler._scale = torch.tensor(2.0)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("arguments", [{}, {"device": "cpu"}, {"enabled": False}])
def test_it_is_torchs_class(arguments):
    assert isinstance(hs.GradScaler(**arguments), torch.amp.GradScaler)
    assert issubclass(torch_amp.GradScaler, torch.amp.GradScaler)


def test_a_disabled_scaler_is_switched_on():
    scaler = hs.GradScaler(enabled=False)
    scaler._enabled = True
    assert scaler.get_scale() == 2.0**16


def test_a_device_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="unknown device 'foo'"):
        hs.GradScaler("foo")


def test_names_of_a_region():
    ours, torchs = torch_amp.autocast("cpu", torch.bfloat16), torch.amp.autocast("cpu", torch.bfloat16)
    assert (ours.device, ours.fast_dtype) == (torchs.device, torchs.fast_dtype)
    assert (ours._enabled, torch_amp.autocast("cpu", enabled=False)._enabled) == (True, False)
    assert torch_amp.is_autocast_available("cpu") is torch.amp.is_autocast_available("cpu")
