"""Law 2: a decision that names nothing, or two that contradict, is an error that names the thing."""

import pytest
import torch
from torch import nn

from halfstep.errors import ConfigError, PlanError
from halfstep.policy import Policy, ops
from halfstep.policy.levels import level_of
from halfstep.policy.plan import Plan, PlanRule

MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("pattern", ["head", "type:Conv2d", "0.**.deep"])
def test_plan_rule_that_matches_nothing(pattern: str) -> None:
    plan = Plan.for_level("O2", "bf16").with_rules(PlanRule(pattern, dtype=torch.float32))
    with pytest.raises(PlanError, match="matches no module") as caught:
        plan.resolve(MODEL)
    assert repr(pattern) in str(caught.value)


def test_plan_rules_of_equal_rank() -> None:
    plan = Plan((PlanRule("[0]", dtype=torch.float32), PlanRule("?", dtype=torch.bfloat16)))
    with pytest.raises(PlanError, match="equally closely"):
        plan.resolve(MODEL)


@pytest.mark.parametrize("op", ["layernorm", "torch.expp", len])
def test_rule_for_an_op_that_does_not_exist(op: object) -> None:
    with pytest.raises(ConfigError, match=r"unknown op|not a torch op"):
        Policy().with_rules(full=[op])  # type: ignore[list-item]


@pytest.mark.parametrize("text", ["c=bf16,quick=yes", "table=none", "p=f32,p=f16"])
def test_policy_text_with_words_it_does_not_know(text: str) -> None:
    with pytest.raises(ConfigError):
        Policy.parse(text)


@pytest.mark.parametrize(("level", "dtype"), [("O1", "fp32"), ("O0", "bf16"), ("O2", "e5m2")])
def test_level_in_a_dtype_it_does_not_run_in(level: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"level {level}"):
        level_of(level)[0].policy(dtype)


def test_a_banned_op_has_a_remedy() -> None:
    banned = {
        name for table in ops.TABLES.values() for name, row in table.items() if row.rule is ops.Rule.BANNED
    }
    in_place = {name for name in banned if name.endswith("_")}  # Apex: refused in place alone
    assert banned - in_place == {"binary_cross_entropy"}
    assert "binary_cross_entropy_with_logits" in ops.REMEDIES["binary_cross_entropy"]
