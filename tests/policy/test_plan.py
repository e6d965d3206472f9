"""Plans: which rule holds for which module, the TOML form, and what they refuse."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep.errors import ConfigError, PlanError
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class PreNorm(nn.Module):
    """Holds a norm and a layer; only the norm is a normalisation layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fn = nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.blocks = nn.ModuleList([PreNorm(), PreNorm()])
        self.last = LlamaRMSNorm()
        self.head = nn.Linear(4, 2)


def chosen(plan: Plan, model: nn.Module | None = None) -> dict[str, str]:
    return {path: rule.pattern for path, rule in plan.resolve(model or Model()).items()}


def test_empty_plan_and_levels_that_leave_modules_alone() -> None:
    assert (
        Plan.empty() == Plan.for_level("O0") == Plan.for_level("O1", "bf16") == Plan.for_level("bf16-mixed")
    )
    assert not Plan.empty()
    assert dict(Plan.empty().resolve(Model())) == {}


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_o2_keeps_normalisation_in_fp32_and_nothing_else(dtype: torch.dtype) -> None:
    dtypes = {path: rule.dtype for path, rule in Plan.for_level("O2", dtype).resolve(Model()).items()}
    fp32 = {path for path, found in dtypes.items() if found == FP32}
    assert fp32 == {"stem.1", "blocks.0.norm", "blocks.1.norm", "last"}
    assert {dtypes[path] for path in set(dtypes) - fp32} == {dtype}
    assert set(dtypes) == {path for path, _ in Model().named_modules()}


def test_o3_is_low_throughout_and_o2_fits_a_model_without_norms() -> None:
    assert {rule.dtype for rule in Plan.for_level("bf16-true").resolve(Model()).values()} == {BF16}
    assert {rule.dtype for rule in Plan.for_level("O2", BF16).resolve(nn.Linear(2, 2)).values()} == {BF16}


# Each pair: the closer rule, the farther one, and a module both reach.
RANKED = [
    ("blocks.0.fn", "blocks.*.fn", "blocks.0.fn"),
    ("blocks.*.fn", "type:Linear", "blocks.0.fn"),
    ("blocks.*.fn", "*.*.fn", "blocks.0.fn"),
    ("type:Linear", "blocks.0", "blocks.0.fn"),
    ("type:LayerNorm", "type:*Norm", "blocks.0.norm"),
    ("type:BatchNorm2d", "type:_NormBase", "stem.1"),
    ("type:Batch*", "type:_NormBase", "stem.1"),
    ("blocks.0", "blocks", "blocks.0.fn"),
    ("blocks", "**", "blocks.0.fn"),
    ("**.fn", "**", "blocks.1.fn"),
]


@pytest.mark.parametrize(("closer", "farther", "path"), RANKED)
@pytest.mark.parametrize("swap", [False, True])
def test_the_closer_rule_holds_whatever_the_order(closer: str, farther: str, path: str, swap: bool) -> None:
    rules = [PlanRule(closer, dtype=FP32), PlanRule(farther, dtype=BF16)]
    assert chosen(Plan(tuple(rules[::-1] if swap else rules)))[path] == closer


def test_a_rule_reaches_what_lies_below() -> None:
    assert set(chosen(Plan((PlanRule("blocks.1", rule=Rule.FULL),)))) == {
        *("blocks.1", "blocks.1.norm", "blocks.1.fn")
    }


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("*", {"stem", "blocks", "last", "head"}),
        ("head", {"head"}),
        ("blocks.?", {"blocks.0", "blocks.1"}),
        ("blocks.[1-9]", {"blocks.1"}),
        ("**.norm", {"blocks.0.norm", "blocks.1.norm"}),
        ("blocks.**", {"blocks", "blocks.0", "blocks.1"}),
        ("type:*RMSNorm", {"last"}),
        ("type:_BatchNorm", {"stem.1"}),
    ],
)
def test_globs(pattern: str, paths: set[str]) -> None:
    rule = PlanRule(pattern, dtype=FP32)
    matched = {path for path, module in Model().named_modules() if rule.rank(path, module)}
    assert paths <= matched
    if pattern != "blocks.**":
        assert matched == paths


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("haed", "'haed' matches no module; .*head"),
        ("blocks.*", None),
        ("block.*", "'block.*' matches no module"),
        ("type:LayerNrom", "'type:LayerNrom' matches no module; classes in this model: LayerNorm"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(pattern: str, message: str | None) -> None:
    plan = Plan.for_level("O2", BF16).with_rules(PlanRule(pattern, dtype=FP32))
    if message is None:
        assert plan.resolve(Model())
    else:
        with pytest.raises(PlanError, match=message):
            plan.resolve(Model())


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [("*locks.1.fn", "blocks.1.f?", "blocks.1.fn"), ("type:BatchNorm?d", "type:BatchNorm2*", "stem.1")],
)
def test_two_rules_of_equal_rank_are_an_error(one: str, other: str, path: str) -> None:
    plan = Plan((PlanRule(one, dtype=FP32), PlanRule(other, dtype=BF16)))
    with pytest.raises(PlanError, match=f"equally closely.*{path}") as caught:
        plan.resolve(Model())
    assert repr(one) in str(caught.value)
    assert repr(other) in str(caught.value)
    assert chosen(plan.with_rules(PlanRule(path, dtype=FP32)))[path] == path


def test_the_same_pattern_twice_is_an_error() -> None:
    with pytest.raises(PlanError, match="two plan rules have the pattern 'head'"):
        Plan((PlanRule("head", dtype=FP32), PlanRule("head", dtype=BF16)))


def test_required_rules_outrank_level_defaults() -> None:
    plan = Plan.for_level("O2", BF16) + Plan(
        (PlanRule("**", dtype=FP16), PlanRule("type:*LayerNorm", dtype=FP16))
    )
    dtypes = {path: rule.dtype for path, rule in plan.resolve(Model()).items()}
    assert dtypes["head"] == dtypes["blocks.0.norm"] == FP16
    assert dtypes["stem.1"] == FP32


def test_a_shared_module_must_get_one_rule() -> None:
    model = Model()
    model.tail = model.head
    assert chosen(Plan((PlanRule("type:Linear", dtype=FP32),)), model)["tail"] == "type:Linear"
    with pytest.raises(PlanError, match="shared as 'head' and 'tail'"):
        Plan((PlanRule("tail", dtype=FP32),)).resolve(model)


def test_wrappers_do_not_count_in_patterns() -> None:
    wrapped = nn.Module()
    wrapped.module = Model()
    paths = chosen(Plan((PlanRule("blocks.0.fn", dtype=FP32),)), wrapped)
    assert paths == {"module.blocks.0.fn": "blocks.0.fn"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pattern": ""}, "cannot read plan pattern ''"),
        ({"pattern": "type:"}, "cannot read plan pattern 'type:'"),
        ({"pattern": "a..b"}, "cannot read plan pattern"),
        ({"pattern": "head", "dtype": None}, "sets nothing"),
        ({"pattern": "head", "dtype": "fp99"}, "unknown number format"),
        ({"pattern": "head", "rule": Rule.BANNED}, "Rule.KEEP, given <Rule.BANNED"),
        ({"pattern": "head", "ops": {"expp": Rule.FULL}}, "unknown op 'expp'"),
    ],
)
def test_bad_rules(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanRule(**({"dtype": FP32} | values))  # type: ignore[arg-type]


TEXT = st.text(max_size=20)
COMPONENT = st.text(min_size=1, max_size=8).filter(lambda text: "." not in text)
PATTERNS = st.one_of(
    st.lists(COMPONENT, min_size=1, max_size=3).map(".".join).filter(lambda p: not p.startswith("type:")),
    COMPONENT.map("type:{}".format),
    st.just("**"),
)
RULES = st.builds(
    PlanRule,
    pattern=PATTERNS,
    dtype=st.sampled_from([FP32, FP16, BF16]),
    rule=st.sampled_from([None, Rule.LOW, Rule.KEEP]),
    reason=TEXT,
    ops=st.dictionaries(st.sampled_from(["exp", "sum", "linear"]), st.sampled_from(list(Rule)), max_size=2),
    required=st.booleans(),
    output=st.sampled_from([None, FP32, BF16]),
    buffers=st.booleans(),
)


@given(st.lists(RULES, max_size=4, unique_by=lambda rule: (rule.pattern, rule.required)))
def test_toml_round_trips(rules: list[PlanRule]) -> None:
    plan = Plan(tuple(rules))
    read = Plan.from_toml(plan.to_toml())
    assert read == plan
    assert hash(read) == hash(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]", "not TOML"),
        ("a = " + "[" * 5000, "not TOML"),
        ("speed = 1", "given 'speed'"),
        ("[rule]\npattern = 'a'", "given a \\[rule\\] table"),
        ("[[rule]]\ndtype = 'fp32'", "rule 1 of the plan has no pattern"),
        ("[[rule]]\npattern = 'a'\ndtpye = 'fp32'", "unknown key 'dtpye': did you mean 'dtype'"),
        ("[[rule]]\npattern = 'a'\ndtype = 32", "dtype must be a str, given 32"),
        ("[[rule]]\npattern = 'a'\ndtype = 'fp31'", "rule 1 of the plan: unknown number format"),
        (
            "[[rule]]\npattern = 'a'\nrule = 'slow'",
            "unknown rule 'slow': expected one of low, fp32_out, full",
        ),
        ("[[rule]]\npattern = 'a'\nops = {exp = 3}", "unknown rule 3"),
    ],
)
def test_from_toml_names_what_it_cannot_read(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_toml(text)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("center", torch.zeros(2))


def test_a_path_may_name_a_buffer_and_gives_it_its_dtype_alone():
    model = nn.ModuleDict({"a": Holder(), "b": Holder()})
    far, near = PlanRule("**.center", dtype=torch.float32), PlanRule("b.center", dtype=torch.bfloat16)
    resolved = Plan((far, near)).resolve(model)
    assert dict(resolved) == {"a.center": far, "b.center": near}
    assert Plan.from_toml(Plan((far, near)).to_toml()).resolve(model) == resolved
    with pytest.raises(PlanError, match="matches no module"):
        Plan((PlanRule("a.center", rule=Rule.FULL),)).resolve(model)
    with pytest.raises(PlanError, match="matches no module"):
        Plan((PlanRule("a.*", dtype=torch.float32), PlanRule("a.cent*", dtype=torch.float32))).resolve(model)


def test_a_shared_buffer_takes_a_rule_under_any_path_and_one_only():
    shared = Holder()
    model = nn.ModuleDict({"a": shared, "b": shared})
    rule = PlanRule("b.center", dtype=torch.float32)
    assert dict(Plan((rule,)).resolve(model)) == {"a.center": rule}
    with pytest.raises(PlanError, match="give both the same rule"):
        Plan((rule, PlanRule("a.center", dtype=torch.bfloat16))).resolve(model)
