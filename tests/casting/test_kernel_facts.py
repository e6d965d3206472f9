"""What `halfstep devices` shows of kernels, from given times; whether a dtype pays."""

import pytest
import torch

import halfstep as hs
from halfstep.casting import kernel_probes
from halfstep.casting.kernel_choice import KernelTable, Row
from halfstep.casting.kernel_facts import does_not_pay, kernel_facts, shares
from halfstep.casting.kinds.kind import Choice, OpClass


def times(cls: OpClass, direction: str) -> dict[str, float | None]:
    if cls.dtype == "fp32":
        return {"native": 2.0}
    return {"native": None if direction == "weight" else 1.0, "rounded": 3.0}


def test_times_are_told_over_fp32s_own_with_the_way_taken_and_why() -> None:
    facts = list(kernel_facts(KernelTable((), times), torch.float16, times))
    linear = {f.direction: f for f in facts if (f.op, f.geometry, f.size) == ("linear", "plain", "medium")}
    assert [(f.implementation, f.native, f.taken) for f in linear.values()] == [
        ("native", 0.5, 0.5),
        ("native", 0.5, 0.5),
        ("rounded", None, 1.5),
    ]
    assert linear["weight"].why == "weight: rounded at a small part of native"
    assert {f.op for f in facts} == {"convolution", "linear", "bmm", "attention", "lstm", "gru"}


def test_a_pinned_table_is_shown_without_measuring() -> None:
    def never(cls: OpClass, direction: str) -> dict[str, float | None]:
        raise AssertionError("measured")

    table = KernelTable([Row(Choice(forward="rounded"), op="linear", why="as the file says")])
    facts = list(kernel_facts(table, torch.bfloat16, never))
    shown = [f for f in facts if f.op == "linear" and f.direction == "forward"]
    assert [(f.implementation, f.taken, f.why) for f in shown] == [("rounded", None, "as the file says")] * 2
    assert all(f.implementation == "native" for f in facts if f.op == "bmm")


# --- whether a dtype pays ---

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
