"""The probe sees what a region does, and says so where that is not the rule."""

from contextlib import nullcontext

import pytest
import torch

from halfstep.casting import autocast
from halfstep.conformance.probe import NOT_IN_TORCH, groups, probe_casting
from halfstep.policy import Policy
from halfstep.policy.ops import TABLES, OpRow, Rule

BF16 = torch.bfloat16


def rows(**rules: Rule) -> dict[str, OpRow]:
    return {name: OpRow(name, rule, "") for name, rule in rules.items()}


def probe(region, **rules: Rule):
    return probe_casting("cpu", BF16, rows(**rules), region)


@pytest.mark.parametrize("rule", [Rule.LOW, Rule.FULL])
def test_without_a_region_nothing_is_cast(rule):
    seen = probe(nullcontext, mm=rule, exp=rule, linear=rule)
    assert {o.verdict for o in seen.values()} == {"differs"}
    assert seen["mm"].compute == seen["mm"].given == ((torch.float32,) if rule is Rule.LOW else (BF16,))


def test_torch_autocast_is_seen_as_it_is():
    region = lambda: torch.autocast("cpu", BF16)  # noqa: E731
    seen = probe(
        region, linear=Rule.LOW, matmul=Rule.LOW, mse_loss=Rule.FULL, softmax=Rule.KEEP, stack=Rule.WIDEST
    )
    assert {o.verdict for o in seen.values()} == {"agrees"}
    assert (seen["linear"].given, seen["linear"].compute) == ((torch.float32,), (BF16,))
    assert seen["mse_loss"].output is torch.float32
    assert seen["stack"].given == (BF16, torch.float32)
    wrong = probe(region, linear=Rule.FULL, mse_loss=Rule.LOW, softmax=Rule.FULL, mm=Rule.BANNED)
    assert {o.verdict for o in wrong.values()} == {"differs"}
    assert wrong["mm"].note == "ran although it is banned"


def test_ops_without_a_kernel_or_a_sample_are_told_apart():
    seen = probe(nullcontext, _thnn_fused_gru_cell=Rule.LOW, no_such_op=Rule.LOW)
    assert [o.verdict for o in seen.values()] == ["absent", "unsampled"]


def test_an_op_that_this_torch_does_not_have_is_absent_and_said_so(monkeypatch):
    class Older:
        def __getattr__(self, name):
            if name == "exp":
                raise AttributeError(name)
            return getattr(aten, name)

    aten = torch.ops.aten
    monkeypatch.setattr(torch.ops, "aten", Older())
    seen = probe(nullcontext, exp=Rule.FULL, tan=Rule.KEEP)
    assert (seen["exp"].verdict, seen["exp"].note) == ("absent", NOT_IN_TORCH)
    assert seen["tan"].verdict == "agrees"
    assert [(o.note, names) for o, names in groups(seen.values()) if o.verdict == "absent"] == [
        (NOT_IN_TORCH, ["exp"])
    ]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("table", sorted(set(TABLES) - {"torch"}))
def test_our_region_does_what_every_table_says(table, dtype):
    policy = Policy(compute_dtype=dtype, table=table)
    seen = probe_casting("cpu", dtype, policy.rows("cpu"), lambda: autocast("cpu", policy=policy))
    assert [(o.op, o.note) for o in seen.values() if o.verdict in ("differs", "unsampled")] == []
    assert sum(o.verdict == "agrees" for o in seen.values()) > 0.9 * len(seen)


def test_a_rule_that_a_region_does_not_follow_is_named():
    policy = Policy()
    broken = autocast("cpu", policy=policy.with_rules(low=["exp"]))
    seen = probe_casting("cpu", BF16, policy.rows("cpu"), lambda: broken)
    assert [o.op for o in seen.values() if o.verdict == "differs"] == ["exp"]


def test_groups_hold_every_op_once():
    policy = Policy()
    seen = probe_casting("cpu", BF16, policy.rows("cpu"), lambda: autocast("cpu", policy=policy))
    names = [name for _, each in groups(seen.values()) for name in each]
    assert sorted(names) == sorted(policy.rows("cpu"))
