"""Law 2 for devices: what a device cannot do is an error that names it, never a quiet fall-back to fp32."""

import pytest
import torch

from halfstep.devices import capabilities
from halfstep.errors import ConfigError, UnsupportedError


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(capabilities, "_known", {})
    monkeypatch.setattr(capabilities, "_declared", {})


def test_a_dtype_without_kernels_is_refused_with_the_reason(monkeypatch) -> None:
    monkeypatch.setattr(capabilities, "_measure", lambda device, dtype: (None, "no kernel for it"))
    with pytest.raises(UnsupportedError, match=r"bf16 does not work on cpu: no kernel for it; use fp32"):
        capabilities.check_dtype("cpu", "bf16")


def test_a_device_that_is_not_here_is_not_replaced_by_another() -> None:
    absent = next(kind for kind in ("cuda", "xpu", "mps", "hpu") if kind not in capabilities.available())
    with pytest.raises(UnsupportedError, match=f"'{absent}' is not usable here"):
        capabilities.resolve(absent)
    with pytest.raises(ConfigError, match="unknown device 'quick'"):
        capabilities.resolve("quick")


def test_no_16_bit_dtype_is_an_error_and_not_fp32() -> None:
    capabilities.declare("meta", (torch.float32,))
    with pytest.raises(UnsupportedError, match="neither bf16 nor fp16"):
        capabilities.default_dtype("meta")


def test_a_slow_dtype_is_told(monkeypatch) -> None:
    monkeypatch.setattr(capabilities, "_measure", lambda device, dtype: (30.0, ""))
    assert capabilities.capability("cpu", "fp16").status == "slow"
    assert capabilities.is_slow("cpu", "fp16")


def test_what_a_vendor_did_not_declare_is_absent() -> None:
    capabilities.declare("meta", (torch.bfloat16,))
    with pytest.raises(UnsupportedError, match="its vendor declares no fp16"):
        capabilities.check_dtype("meta", "fp16")
