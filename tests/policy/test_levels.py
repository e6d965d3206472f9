"""Levels: the four rows, the words that name them, and what they refuse."""

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.policy.levels import LEVELS, level_of

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("level", "dtype", "roles"),
    [
        ("O0", None, (FP32, FP32, None)),
        ("O1", BF16, (FP32, BF16, None)),
        ("O2", FP16, (FP16, FP16, FP32)),
        ("O3", BF16, (BF16, BF16, None)),
    ],
)
def test_policy_of_each_level(level: str, dtype: torch.dtype | None, roles: tuple[torch.dtype, ...]) -> None:
    policy = LEVELS[level].policy(dtype)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == roles
    assert policy.table == ("low" if level == "O3" else "halfstep")
    assert level == "O3" or LEVELS[level].policy(dtype, table="apex").table == "apex"


def test_what_each_level_does() -> None:
    assert [row.cast_ops for row in LEVELS.values()] == [False, True, True, False]
    assert [row.masters for row in LEVELS.values()] == [False, False, True, False]
    assert [row.norm_fp32 for row in LEVELS.values()] == [False, False, True, False]


@pytest.mark.parametrize(
    ("level", "dtype", "needed"),
    [("O0", None, False), ("O1", FP16, True), ("O1", BF16, False), ("O2", FP16, True), ("O3", FP16, False)],
)
def test_fp16_implies_a_loss_scale_at_o1_and_o2(level: str, dtype: torch.dtype | None, needed: bool) -> None:
    assert LEVELS[level].needs_scale(dtype) is needed


@pytest.mark.parametrize(
    ("word", "level", "dtype"),
    [
        ("O2", "O2", None),
        ("o1", "O1", None),
        ("bf16-mixed", "O1", BF16),
        ("16-mixed", "O1", FP16),
        ("bf16-true", "O3", BF16),
        ("16-true", "O3", FP16),
        ("32-true", "O0", None),
        (32, "O0", None),
        (16, "O1", FP16),
        ("bf16", "O1", BF16),
        ("no", "O0", None),
        (LEVELS["O2"], "O2", None),
    ],
)
def test_words(word: object, level: str, dtype: torch.dtype | None) -> None:
    assert level_of(word) == (LEVELS[level], dtype)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("O4", "unknown level 'O4': expected one of O0, O1, O2, O3"),
        ("01", "begins with the letter O"),
        ("bf16-mix", "did you mean bf16-mixed"),
        ("", "unknown level ''"),
        (None, "level=None: expected one of O0, O1, O2, O3; leave it out for O1"),
        (2, "unknown level 2: did you mean 'O2'"),
        ("2", "unknown level '2': did you mean 'O2'"),
        (4, "unknown level '4': expected one of O0"),
        (True, "unknown level 'True': expected one of O0"),
        ("atuo", r"a word such as bf16-mixed, or 'auto' where the choice can be measured"),
    ],
)
def test_unknown_levels(word: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        level_of(word)


@pytest.mark.parametrize(
    ("level", "dtype", "message"),
    [
        ("O1", None, "needs a 16-bit dtype"),
        ("O2", "fp32", "runs in fp16 or bf16, given fp32"),
        ("O3", "e4m3fn", "given e4m3fn"),
        ("O0", "bf16", "fp32 throughout, given bf16"),
        ("O1", "bf17", "unknown number format 'bf17' as dtype=: .*did you mean bf16"),
        (
            "O2",
            "half16",
            "unknown number format 'half16' as dtype=: a level computes in fp16 or bf16, O0 in fp32",
        ),
    ],
)
def test_dtypes_a_level_cannot_run_in(level: str, dtype: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LEVELS[level].policy(dtype)
