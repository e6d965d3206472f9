"""Law 2, nothing is silent: what autocast cannot do is an error that names the thing and the remedy."""

import pytest
import torch
import torch.nn.functional as F

from halfstep.casting import autocast, regions
from halfstep.devices import capabilities
from halfstep.errors import BannedOpError, ConfigError, HalfstepError, UnsupportedError
from halfstep.policy import Policy


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dtype": "bf17"}, ConfigError, "bf17"),
        ({"dtype": torch.int8}, ConfigError, "int8"),
        ({"dtype": torch.float64}, UnsupportedError, "fp64.*bf16, fp16, or fp32"),
        ({"dtype": torch.float8_e4m3fn}, UnsupportedError, "e4m3fn.*bf16, fp16, or fp32"),
        ({"policy": "halfstop"}, ConfigError, "halfstop"),
        ({"policy": "c=bf16,table=halfstop"}, ConfigError, "halfstop.*halfstep"),
        ({"policy": 3}, ConfigError, "Policy.*int"),
        ({"device_type": "gpu"}, ConfigError, "gpu"),
        ({"device_type": "xpu"}, UnsupportedError, "xpu"),
        ({"device_type": "meta"}, UnsupportedError, "meta"),
    ],
)
def test_bad_arguments_are_errors_and_change_nothing(arguments, error, words) -> None:
    with pytest.raises(error, match=words) as caught:
        autocast(**({"device_type": "cpu"} | arguments))
    assert isinstance(caught.value, HalfstepError)
    assert not torch.is_autocast_enabled("cpu")


def test_a_dtype_the_device_lacks_is_an_error(monkeypatch) -> None:
    absent = capabilities.Capability("cpu", torch.float16, "absent", "no kernels")
    monkeypatch.setitem(capabilities._known, ("cpu", torch.float16), absent)
    regions.forget()
    with pytest.raises(UnsupportedError, match=r"fp16 does not work on cpu: no kernels; use bf16.*Policy \("):
        autocast("cpu", "fp16")
    regions.forget()


def test_a_banned_op_raises_with_its_remedy_and_the_region_goes_on() -> None:
    p = torch.rand(3)
    with autocast("cpu", torch.float16):
        with pytest.raises(BannedOpError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(p, p)
        assert F.binary_cross_entropy_with_logits(p, p).dtype is torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16
    with autocast("cpu", torch.bfloat16):
        assert F.binary_cross_entropy(p.bfloat16(), p).dtype is torch.float32


def test_unknown_op_in_a_policy_suggests_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown op 'laer_norm'.*layer_norm"):
        Policy().with_rules(full=["laer_norm"])


def test_only_functions_are_decorated() -> None:
    with pytest.raises(ConfigError, match="use `with`"):
        autocast("cpu")(3)


def test_release_inside_a_region_is_refused() -> None:
    with autocast("cpu"), pytest.raises(ConfigError, match="inside an autocast region"):
        regions.release()
