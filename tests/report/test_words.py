"""What a step's time goes into, told from given times."""

import pytest

from halfstep.recipes.measure import costliest
from halfstep.report.comparison import OpCost, SettingRow
from halfstep.report.words import costs, remedy
from halfstep.tuning.op_times import CAST, OpTime, StepTimes

FULL = StepTimes(
    (OpTime("blocks.0", "linear", "backward", 4e-3), OpTime("", "gelu", "forward", 1e-3)), seconds=10e-3
)
LOW = StepTimes(
    (
        OpTime("blocks.0", "linear", "backward", 5e-3),
        OpTime("blocks.0", CAST, "forward", 2e-3),
        OpTime("", "gelu", "forward", 1e-4),
    ),
    seconds=10e-3,
)


def row(times: StepTimes, dtype: str, count: int) -> SettingRow:
    """A row of which nothing is known but where its step's time goes."""
    ops = costliest(times, FULL, count)
    return SettingRow(label=dtype, level="O1", dtype=dtype, ops=ops, profiled=times.seconds)


def test_the_costliest_ops_carry_their_fp32_time() -> None:
    ops = costliest(LOW, FULL, count=2)
    assert [(op.op, op.module, op.seconds, op.fp32) for op in ops] == [
        ("linear", "blocks.0", 5e-3, 4e-3),
        (CAST, "blocks.0", 2e-3, None),
    ]


def test_the_sentence_names_op_direction_module_times_and_what_helps() -> None:
    told = costs(row(LOW, "bf16", 5))
    assert told.startswith(
        "The 3 ops that cost most are 71 % of a step: linear backward in blocks.0 5 ms (fp32 4 ms)"
    )
    assert "slower than in fp32; a plan rule full for blocks.0, or level auto" in told
    assert "cast forward in blocks.0 2 ms: casts; O2 or neighbours in one dtype need fewer" in told
    assert "gelu forward 100 µs" in told or "gelu forward 0.1 ms" in told


def test_in_fp32_no_second_time_is_told() -> None:
    told = costs(row(FULL, "fp32", 1))
    assert told == (
        "The op that costs most is 40 % of a step: linear backward in blocks.0 4 ms: 16 bits may shorten it "
        "(O1 or O2)."
    )


def test_nothing_measured_nothing_told() -> None:
    assert costs(SettingRow(label="O1 bf16", level="O1", dtype="bf16")) == ""


@pytest.mark.parametrize(
    ("op", "fp32", "dtype", "said"),
    [
        ("accumulate gradients", None, "bf16", "larger batches"),
        ("linear", 9.0, "bf16", "faster matrix arithmetic"),
        ("gelu", 9.0, "bf16", "bound by memory"),
        ("gelu", 9.0, "fp32", "16 bits may shorten it (O2)"),
        ("conv2d", 0.5, "fp16", "slower than in fp32"),
    ],
)
def test_what_would_shorten_an_op(op: str, fp32: float | None, dtype: str, said: str) -> None:
    assert said in remedy(OpCost("m", op, "forward", 1.0, fp32), dtype)
