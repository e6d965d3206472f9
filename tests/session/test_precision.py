"""What level, dtype, policy and device come to, before any model is looked at."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from halfstep.errors import HalfstepError
from halfstep.scaling import DynamicLossScale, NoLossScale, StaticLossScale
from halfstep.session.precision import lower

CPU = torch.device("cpu")


def test_one_frozen_value():
    found = lower("O2", "fp16", None, None, CPU)
    assert found == lower("O2", torch.float16, None, None, CPU)
    assert (found.level.masters, str(found.policy), found.scaled) == (True, "p=fp16,c=fp16,o=fp32", True)
    assert found.scales == (DynamicLossScale(),)
    with pytest.raises(FrozenInstanceError):
        found.plan = None


@pytest.mark.parametrize(
    ("level", "dtype", "policy", "given", "scales", "output"),
    [
        ("bf16-mixed", None, None, None, (NoLossScale(),), "as computed"),
        (
            "O1",
            "fp16",
            "p=fp32,c=fp16,o=fp32",
            [8.0, None],
            (StaticLossScale(8.0), DynamicLossScale()),
            "full",
        ),
        ("O3", "bf16", None, "none", (NoLossScale(),), "as computed"),
        ("O0", None, None, None, (NoLossScale(),), "as computed"),
    ],
)
def test_what_words_come_to(level, dtype, policy, given, scales, output):
    found = lower(level, dtype, policy, None, CPU, given)
    assert found.scales == scales
    assert found.level.output_role == output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("O0", None, "c=bf16"), "level O0 is fp32 throughout, yet policy=c=bf16 was given: drop it"),
        (("bf16-mixed", "fp16", None), "the level names torch.bfloat16 but dtype=torch.float16 was given"),
        (("O1", "bf16", "p=bf16,c=bf16"), "the policy stores parameters in bf16, level O1 in fp32"),
        (("O2", "bf16", "c=bf16,r=bf16"), "unknown key 'r' in policy 'c=bf16,r=bf16'"),
        (("O1", "bf16", "c=bf16,o=fp16"), "the policy gives outputs in fp16: expected fp32 or the compute"),
    ],
)
def test_what_is_refused(arguments, says):
    with pytest.raises(HalfstepError, match=says):
        lower(*arguments, None, CPU)
