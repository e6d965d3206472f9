"""Policies: their text form, their edits, and what they refuse."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from halfstep.casting.context import autocast
from halfstep.casting.functions import op
from halfstep.errors import ConfigError
from halfstep.policy import Policy, op_names
from halfstep.policy.ops import TABLES, Rule

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])
EDITS = st.dictionaries(st.sampled_from(sorted(TABLES["halfstep"])), st.sampled_from(list(Rule)), max_size=5)
POLICIES = st.builds(
    Policy,
    param_dtype=DTYPES,
    compute_dtype=DTYPES,
    output_dtype=st.none() | DTYPES,
    table=st.sampled_from(sorted(TABLES)),
    edits=EDITS,
)


@given(POLICIES)
def test_text_form_round_trips(policy: Policy) -> None:
    read = Policy.parse(str(policy))
    assert read == policy
    assert hash(read) == hash(policy)


@given(POLICIES)
def test_pickle_and_copy_give_equals(policy: Policy) -> None:
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("p=f32,c=bf16,o=f32", Policy(torch.float32, torch.bfloat16, torch.float32)),
        ("params=float32, compute=float16, output=half", Policy(torch.float32, torch.float16, torch.float16)),
        ("bf16", Policy(torch.bfloat16, torch.bfloat16, torch.bfloat16)),
        ("torch", Policy(table="torch")),
        ("c=fp16,table=apex", Policy(compute_dtype=torch.float16, table="apex")),
        (
            "c=fp16,full=gelu+sigmoid",
            Policy(compute_dtype=torch.float16).with_rules(full=[F.gelu, "sigmoid"]),
        ),
    ],
)
def test_parse(text: str, policy: Policy) -> None:
    assert Policy.parse(text) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p=f31", "unknown number format 'f31'"),
        ("speed=fast,p=f32", "unknown key 'speed'"),
        ("p=f32,p=bf16", "cannot read 'p=bf16'"),
        ("p=f32,", "cannot read ''"),
        ("p=", "cannot read 'p='"),
        ("fast", "unknown policy 'fast'"),
        ("table=tourch", "unknown op table 'tourch'"),
        ("full=expp", "unknown op 'expp'.*exp"),
        ("full=exp,low=exp", "both low and full"),
        ("c=tf32", "tf32"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy.parse(text)


def test_edits_override_the_table_and_leave_the_original_alone() -> None:
    policy = Policy()
    edited = policy.with_rules(low=[torch.exp], full=[torch.Tensor.matmul, "sum"], banned="tan")
    assert [edited.rule_of(n) for n in ("exp", "matmul", "sum", "tan", "log")] == [
        *(Rule.LOW, Rule.FULL, Rule.FULL, Rule.BANNED, Rule.FULL)
    ]
    assert policy.rule_of("exp") is Rule.FULL
    assert edited.rows()["sum"].via_dtype
    assert not edited.rows()["matmul"].via_dtype
    assert edited.with_rules(full=["exp"]).rule_of("exp") is Rule.FULL


@pytest.mark.parametrize(
    ("given_op", "message"),
    [
        ("layernorm", "unknown op 'layernorm'.*layer_norm"),
        (F.interpolate, "unknown op 'interpolate'"),
        (len, "decorate the function with @halfstep.op"),
        (lambda x: x, "decorate the function with @halfstep.op"),
    ],
)
def test_unknown_ops_are_errors_with_close_matches(given_op: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy().with_rules(full=[given_op])


def test_an_op_in_no_table_has_no_rule() -> None:
    assert Policy().rule_of("relu6") is None
    assert Policy().with_rules(low=["relu6"]).rule_of("relu6") is Rule.LOW


def test_rules_depend_on_device_for_the_torch_table_alone() -> None:
    torch_like = Policy(table="torch")
    assert torch_like.rule_of("exp", "cuda") is Rule.FULL
    assert torch_like.rule_of("exp", "cpu") is None
    for table in set(TABLES) - {"torch"}:
        assert Policy(table=table).rows("cpu") == Policy(table=table).rows("cuda")


@pytest.mark.parametrize(("dtype", "rule"), [("fp16", Rule.BANNED), ("bf16", Rule.FULL)])
def test_rows_are_resolved_for_the_compute_dtype(dtype: str, rule: Rule) -> None:
    assert Policy().with_dtype(dtype).rule_of("binary_cross_entropy") is rule


def test_casting_touches_floating_tensors_only() -> None:
    policy = Policy(torch.float32, torch.bfloat16, torch.float16)
    tree = {
        "x": torch.ones(2),
        "ids": [torch.tensor([1]), "text", 3.5],
        "z": (torch.ones(1, dtype=torch.complex64), torch.ones(1, dtype=torch.bool)),
        "fp8": torch.ones(1).to(torch.float8_e4m3fn),
    }
    low = policy.cast_to_compute(tree)
    assert low["x"].dtype == torch.bfloat16
    assert low["ids"][0] is tree["ids"][0]
    assert low["z"][0] is tree["z"][0]
    assert low["fp8"] is tree["fp8"]
    assert tree["x"].dtype == torch.float32
    assert policy.cast_to_param(low)["x"].dtype == torch.float32
    assert policy.cast_to_output(low)["x"].dtype == torch.float16
    assert Policy().cast_to_output(tree) is tree


@op
def scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


def test_own_functions_can_be_given_rules() -> None:
    name = f"{__name__}.scaled"
    policy = Policy().with_rules(full=[scaled])
    assert policy.rule_of(name) is Rule.FULL
    assert Policy.parse(str(policy)) == policy
    assert Policy().with_rules(low=[name]).rule_of(name) is Rule.LOW
    assert op_names.canonical_op(scaled) == name


def test_only_functions_become_own_ops() -> None:
    with pytest.raises(ConfigError, match="not int"):
        op(3)  # type: ignore[arg-type]


def test_fields_are_checked_and_frozen() -> None:
    with pytest.raises(ConfigError, match="unknown number format"):
        Policy(compute_dtype="bf17")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown op table"):
        Policy(table="nvidia")
    policy = Policy(param_dtype="bf16")  # type: ignore[arg-type]
    assert policy.param_dtype == torch.bfloat16
    with pytest.raises(AttributeError):
        policy.table = "torch"  # type: ignore[misc]
    with pytest.raises(TypeError):
        policy.edits["exp"] = Rule.LOW  # type: ignore[index]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({"table": "mlu", "full": ["exp", torch.tanh]}, "table=mlu,full=exp+tanh"),
        ({"exp": "full", "mm": Rule.LOW}, "low=mm,full=exp"),
        ({"compute": torch.float16, "full": "exp", torch.tanh: "full"}, "c=fp16,full=exp+tanh"),
        ({"o": "fp32", "low": []}, "o=fp32"),
        ({}, "c=bf16"),
    ],
)
def test_a_dict_says_what_a_text_says(rows: dict[Any, Any], text: str) -> None:
    assert Policy.parse(rows) == Policy.parse(text)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"full": 3}, r"'full': 3: a policy's dict reads like \{'table': 'mlu'"),
        ({"exp": "FULL"}, "'exp': 'FULL': a policy's dict"),
        ({"softmaxx": "full"}, "unknown op 'softmaxx'.*did you mean"),
        ({"full": ["exp"], "exp": "low"}, "named under both"),
        ({3: "full"}, "got 3 for an op"),
    ],
)
def test_a_dict_that_is_no_policy_says_how_one_reads(rows: dict[Any, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Policy.parse(rows)


def test_a_region_takes_a_dict_and_refuses_what_is_no_policy() -> None:
    x = torch.ones(2, 2)
    with autocast("cpu", torch.bfloat16, policy={"matmul": "full", "exp": "low"}):
        assert (x @ x).dtype == torch.float32
        assert x.exp().dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="a dict or None, not list"):
        autocast("cpu", policy=["full"])  # pyright: ignore[reportArgumentType]
