"""Wrong types given to formats, devices, levels, policies and plans: a clear error, never a raw one."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from halfstep import formats
from halfstep.devices import capabilities, register
from halfstep.errors import ConfigError, PlanError
from halfstep.policy import Policy
from halfstep.policy.levels import LEVELS
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule

WRONG = [
    None,
    3.5,
    "no such thing",
    object(),
    [],
    ["a"],
    {},
    torch.ones(2),
    torch.ones(()),
    b"x",
    torch.int64,
]
HEAD = PlanRule("head", dtype=torch.float32)


@pytest.fixture(autouse=True)
def _nothing_declared(monkeypatch):
    monkeypatch.setattr(capabilities, "_declared", {})


# What is called, and the types that it takes, right or of no consequence.
DOORS = {
    "number": (lambda x: formats.describe(x, "bf16"), float),
    "number to round": (lambda x: formats.round_reference(x, "bf16"), float),
    "number to encode": (lambda x: formats.encode(x, "bf16"), float),
    "pattern": (lambda x: formats.decode(x, "bf16"), int),
    "format": (lambda x: formats.describe(1.0, x), ()),
    "format to round to": (lambda x: formats.round_to(torch.ones(2), x), ()),
    "tensor to round": (lambda x: formats.round_to(x, "bf16"), torch.Tensor),
    "dtype": (formats.parse_dtype, ()),
    "dtype's name": (formats.dtype_name, torch.dtype),
    "device": (capabilities.resolve, type(None)),
    "device that can": (lambda x: capabilities.capability(x, "fp32"), type(None)),
    "device with a default": (capabilities.default_dtype, type(None)),
    "device's facts": (capabilities.machine, type(None)),
    "device's file": (capabilities.cache_file, type(None)),
    "dtype it can": (lambda x: capabilities.check_dtype("cpu", x), ()),
    "name declared": (lambda x: capabilities.declare(x, ["bf16"]), str),
    "dtypes declared": (lambda x: capabilities.declare("chip", x), list),
    "dtype declared": (lambda x: capabilities.declare("chip", [x]), ()),
    "slow dtypes": (lambda x: capabilities.declare("chip", ["bf16"], x), list),
    "name registered": (register, ()),
    "dtypes registered": (lambda x: register("chip", dtypes=x), list),
    "finite check": (lambda x: register("chip", finite_check=x), type(None)),
    "scale update": (lambda x: register("chip", update_scale=x), type(None)),
    "collective": (lambda x: register("chip", collective=x), (str, type(None))),
    "level's dtype": (LEVELS["O2"].policy, ()),
    "dtype at O0": (LEVELS["O0"].policy, type(None)),
    "level's table": (lambda x: LEVELS["O1"].policy("fp16", x), type(None)),
    "policy": (Policy.parse, dict),
    "compute dtype": (lambda x: Policy(compute_dtype=x), ()),
    "other compute dtype": (Policy().with_dtype, ()),
    "output dtype": (lambda x: Policy(output_dtype=x), type(None)),
    "table": (lambda x: Policy(table=x), ()),
    "edits": (lambda x: Policy(edits=x), dict),
    "rule edited": (lambda x: Policy(edits={"exp": x}), ()),
    "op edited": (lambda x: Policy(edits=[(x, Rule.LOW)]), ()),
    "op named": (lambda x: Policy().with_rules(low=[x]), ()),
    "op asked for": (Policy().rule_of, ()),
    "device type": (lambda x: Policy(table="torch").rows(x), (str, type(None))),
    "rule's pattern": (lambda x: PlanRule(x, dtype=torch.float32), str),
    "module's rule": (lambda x: PlanRule("**", dtype=torch.float32, rule=x), type(None)),
    "reason": (lambda x: PlanRule("**", dtype=torch.float32, reason=x), str),
    "ops in a rule": (lambda x: PlanRule("**", dtype=torch.float32, ops=x), dict),
    "plan's rules": (Plan, list),
    "rule added": (Plan().with_rules, ()),
    "plan added": (lambda x: Plan() + x, ()),
    "level of a plan": (lambda x: Plan.for_level(x, "bf16"), ()),
    "model of a plan": (Plan((HEAD,)).resolve, ()),
    "plan's text": (Plan.from_toml, ()),
}


@pytest.mark.parametrize("door", DOORS)
def test_wrong_types_are_refused_clearly(door):
    call, takes = DOORS[door]
    for wrong in WRONG:
        if not isinstance(wrong, takes):
            with pytest.raises(ConfigError) as refused:
                call(wrong)
            assert len(str(refused.value).splitlines()) == 1
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"


SAID = [
    (lambda: formats.describe("1.5", "bf16"), "given '1.5'; turn text into one with float()"),
    (lambda: formats.round_to(1.5, "bf16"), "given 1.5; make it one with torch.tensor()"),
    (lambda: formats.decode(1.5, "bf16"), "a bit pattern as an int"),
    (lambda: formats.encode(Fraction(1, 3), "bf16"), "1/3 is not a number of bf16"),
    (lambda: formats.encode(10**400, "e4m3fn"), "is not a number of e4m3fn"),
    (lambda: capabilities.declare("chip", "bf16"), "dtypes='bf16': expected a list of dtypes"),
    (lambda: capabilities.declare("chip", ["bf16"], ["fp16"]), r"slow=\['fp16'\] is not among"),
    (lambda: register(3), "3 cannot name a device"),
    (lambda: register("npu2"), "'npu2' cannot name a device: expected lower-case letters"),
    (lambda: register("npu", finite_check=3), "3 is no function: finite_check"),
    (lambda: Policy(edits={"exp": "low"}), "edit 'exp': 'low': expected .* a Rule"),
    (lambda: Policy(edits={"expp": Rule.LOW}), "unknown op 'expp'.*exp"),
    (lambda: Policy(edits={"torch.exp": Rule.LOW}), "edit 'torch.exp': the op is called 'exp'"),
    (lambda: Policy().rule_of("expp"), "unknown op 'expp'.*exp"),
    (lambda: Policy().rows(torch.device("cpu")), "a device type is a word"),
    (lambda: Plan() + HEAD, r"a plan adds a plan.*with_rules\(\)"),
    (lambda: PlanRule("**", rule="low"), "Rule.FULL, Rule.LOW or Rule.KEEP, given 'low'"),
    (lambda: PlanRule("**", ops={"exp": "low"}), "edit 'exp': 'low': expected"),
]


@pytest.mark.parametrize(("call", "says"), SAID)
def test_what_the_error_says(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


@pytest.mark.parametrize("options", [{"rule": 3}, {"reason": 3}, {"dtype": None}])
def test_errors_about_a_rule_are_plan_errors(options):
    with pytest.raises(PlanError):
        PlanRule("**", **{"dtype": torch.float32, **options})


@pytest.mark.parametrize(
    "number", [3, np.float32(0.1), np.float16(3), np.int64(3), np.uint8(3), True, Fraction(3), 10**30]
)
def test_numbers_of_other_types_are_taken_exactly(number):
    exact = Fraction(number.item()) if isinstance(number, np.generic) else Fraction(number)
    expected = formats.describe(exact, "fp32")
    assert formats.describe(number, "fp32") == expected
    assert formats.encode(expected.value, "fp32") == expected.bits
    assert formats.round_reference(number, "fp64") == float(exact)


def test_patterns_of_numpy_and_torch_are_taken():
    assert formats.decode(np.int16(0x3C00), "fp16") == formats.decode(torch.tensor(0x3C00), "fp16") == 1.0


@pytest.mark.parametrize("name", ["elsewhere.attention", "nolib::op"])
def test_ops_that_only_another_process_knows_are_kept(name):
    policy = Policy(edits={name: Rule.FULL})
    assert policy.rule_of(name) is Rule.FULL


@pytest.mark.parametrize("exp", ["exp", "torch.exp", torch.exp, torch.Tensor.exp_])
def test_a_rule_is_asked_for_by_name_or_function(exp):
    assert Policy().rule_of(exp) is Rule.FULL


def test_a_question_without_a_device_is_asked_again_after_a_declaration(monkeypatch):
    monkeypatch.setattr(capabilities, "_known", {})
    capabilities.capability(None, "fp32")
    capabilities.declare("chip", ["bf16"])
    assert not capabilities._known


def test_facts_and_file_of_a_device_are_found_by_its_name():
    assert (
        capabilities.machine("cpu") == capabilities.machine(torch.device("cpu")) == capabilities.machine(None)
    )
    assert capabilities.cache_file("cpu") == capabilities.cache_file(torch.device("cpu"))
