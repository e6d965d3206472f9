"""What precision each op and module gets, as data: op tables, policies, levels, plans."""

from halfstep.policy.levels import LEVELS, LOW_DTYPES, Level, level_of
from halfstep.policy.op_names import canonical_op
from halfstep.policy.ops import TABLES, OpRow, Rule, rows
from halfstep.policy.plan import Plan, PlanRule
from halfstep.policy.policy import Policy

__all__ = [
    "LEVELS",
    "LOW_DTYPES",
    "TABLES",
    "Level",
    "OpRow",
    "Plan",
    "PlanRule",
    "Policy",
    "Rule",
    "canonical_op",
    "level_of",
    "rows",
]
