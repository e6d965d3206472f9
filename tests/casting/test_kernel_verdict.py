"""Whether a dtype pays, told from given measurements."""

import pytest
import torch

import halfstep as hs
from halfstep.casting import kernel_probes
from halfstep.casting.kernel_verdict import does_not_pay, shares

ROWS = {
    "linear|bf16|plain|medium|1|forward": {"native": 4e-4, "rounded": 3e-4},
    "linear|fp32|plain|medium|1|forward": {"native": 2e-4},
    "convolution|bf16|2d dense|medium|1|forward": {"native": 5e-4, "rounded": None},
    "convolution|fp32|2d dense|medium|1|forward": {"native": 5e-4},
    "linear|fp16|plain|medium|1|forward": {"native": 1e-4, "rounded": 3e-4},
    "linear|bf16|plain|medium|8|forward": {"native": 1e-9},
    "overhead": {"native": 1e-6},
}


def test_shares_take_the_fastest_kernel_over_fp32() -> None:
    assert shares(ROWS, "bf16", 1) == pytest.approx({"linear": 1.5, "convolution": 1.0})


def test_where_fp32_is_unknown_rounding_around_it_stands_for_it() -> None:
    rows = {k: v for k, v in ROWS.items() if "fp32" not in k}
    assert shares(rows, "bf16", 1) == {"linear": 1.0}


def test_a_dtype_that_does_not_pay_is_told_with_its_shares() -> None:
    said = does_not_pay(ROWS, "bf16", 1)
    assert said is not None
    assert said.startswith(
        "bf16 does not pay on this machine: by its fastest kernels its ops take 1.22 of fp32's"
    )
    assert "convolution 1.00, linear 1.50" in said


def test_one_that_pays_or_is_unknown_is_not() -> None:
    assert does_not_pay(ROWS, "fp16", 1) is None
    assert does_not_pay({}, "bf16", 1) is None


def test_a_session_says_it_when_printed(monkeypatch) -> None:
    monkeypatch.setattr(kernel_probes.measurements, "_rows", ROWS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model = torch.nn.Linear(2, 2)
    amp = hs.prepare(model, None, level="O1", dtype="bf16", kernels="measured")
    assert str(amp).startswith("O1 (fp32 weights; each op runs in the precision its rule gives): ")
    assert "bf16 does not pay on this machine" in str(amp)
    assert "does not pay" not in str(hs.prepare(torch.nn.Linear(2, 2), None, level="O0"))
