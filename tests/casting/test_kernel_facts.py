"""What `halfstep devices` shows of kernels, from given times."""

import torch

from halfstep.casting.kernel_choice import Choice, KernelTable, OpClass, Row
from halfstep.casting.kernel_facts import kernel_facts


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
