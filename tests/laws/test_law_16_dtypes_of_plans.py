"""Law 16, a rule has an effect, or it is an error: every dtype of a plan, module by module, level by level.

What a module gives is compared with its twin in fp64 on the same inputs; weights are stored as the rule says.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import PlanError
from halfstep.formats import parse_dtype

pytestmark = pytest.mark.filterwarnings("ignore")
ERROR = {"fp64": 1e-7, "fp32": 2e-6, "bf16": 3e-2, "fp16": 4e-3}
LEVELS = (("O0", None), ("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16"))


class Own(nn.Module):
    """A module of nobody's, with a weight and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(16))
        self.register_buffer("table", torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w + self.table


class Block(nn.Module):
    """A part with parts, each of which a rule may name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.inner = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.batches, self.last = nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.batches(self.inner(self.norm(self.first(x)))))


class Net(nn.Module):
    """One module of each kind, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.rms, self.line = (
            nn.Embedding(20, 16),
            nn.LayerNorm(16),
            nn.RMSNorm(16),
            Own(),
        )
        self.conv, self.steps = nn.Conv1d(16, 16, 3, padding=1), nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.batches, self.block, self.head = nn.BatchNorm1d(16), Block(), nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.line(self.rms(self.norm(self.table(tokens))))
        h = self.steps(self.conv(h.mT).mT)[0]
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.head(self.block(self.batches(h[:, 0])))


def prepared(level: str, dtype: str | None, *rules: hs.PlanRule) -> tuple[Net, hs.Session]:
    torch.manual_seed(0)
    net = Net()
    plan = hs.Plan(rules)
    return net, hs.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), level=level, dtype=dtype, plan=plan
    )


def train(net: Net, amp: hs.Session) -> None:
    """Two steps, after which all weights are finite."""
    for _ in range(2):
        with amp.autocast():
            loss = F.cross_entropy(net(torch.arange(32).view(8, 4) % 20).float(), torch.arange(8) % 4)
        amp.backward(loss)
        amp.step()
    assert all(p.isfinite().all() for p in net.parameters())


def error(net: Net, amp: hs.Session, path: str) -> float:
    """How far what a module gives is from its twin in fp64, as a share of the largest value."""
    torch.manual_seed(0)
    twin, seen = Net().double().get_submodule(path), []
    module = net.get_submodule(path)
    handle = module.register_forward_hook(lambda _, args, out: seen.append((args, out)))
    with torch.no_grad(), amp.autocast():
        net(torch.arange(32).view(8, 4) % 20)
    handle.remove()
    args, out = seen[0]
    right = twin(*(a.double() if a.is_floating_point() else a for a in args))
    return float((out.double() - right).abs().max() / right.abs().max())


DTYPES = [
    (d, *level, path)
    for d, level, path in itertools.product(
        ERROR,
        LEVELS,
        ("head", "norm", "rms", "table", "line", "conv", "block", "steps", "attention", "batches", "**"),
    )
]


def check_dtype(dtype: str, level: str, low: str | None, path: str) -> None:
    net, amp = prepared(level, low, hs.PlanRule(path, dtype=dtype))
    module = net if path == "**" else net.get_submodule(path)
    has_norms = path in ("**", "block") and level == "O2" and dtype != "fp64"  # O2 keeps them in fp32
    assert has_norms or {p.dtype for p in module.parameters()} == {parse_dtype(dtype)}
    if path not in ("steps", "attention", "**"):
        # a 16-bit module computes in the dtype of its region
        bound = max(ERROR[dtype], ERROR[low] if low and dtype in ("bf16", "fp16") else 0.0)
        assert error(net, amp, path) <= bound
    train(net, amp)


@pytest.mark.parametrize(("dtype", "level", "low", "path"), DTYPES[::13])
def test_a_dtype_of_some_modules_is_that_of_their_numbers(dtype, level, low, path):
    check_dtype(dtype, level, low, path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "level", "low", "path"), DTYPES)
def test_a_dtype_of_every_module_is_that_of_its_numbers(dtype, level, low, path):
    check_dtype(dtype, level, low, path)


RULES: list[dict[str, Any]] = [
    *({"dtype": dtype} for dtype in ERROR),
    *({"rule": rule} for rule in (hs.Rule.FULL, hs.Rule.LOW, hs.Rule.KEEP)),
    *({"output": dtype} for dtype in ("fp32", "bf16", "fp16")),
    {"dtype": "fp32", "output": "bf16"},
    {"dtype": "fp32", "rule": hs.Rule.KEEP},
]
NESTED = [
    (outer, inner, *level, path)
    for outer, inner, level, path in itertools.product(RULES, RULES, LEVELS, ("inner", "norm", "batches"))
    if level[0] != "O0" or not {*outer.values(), *inner.values()} & {"bf16", "fp16"}
]


def check_nested(
    outer: dict[str, Any], inner: dict[str, Any], level: str, low: str | None, path: str
) -> None:
    train(*prepared(level, low, hs.PlanRule("block", **outer), hs.PlanRule(f"block.{path}", **inner)))


@pytest.mark.parametrize(("outer", "inner", "level", "low", "path"), NESTED[::97])
def test_some_rules_inside_others_train(outer, inner, level, low, path):
    check_nested(outer, inner, level, low, path)


@pytest.mark.exhaustive
def test_every_rule_inside_every_other_trains():
    for case in NESTED:
        check_nested(*case)


@pytest.mark.parametrize(("level", "low"), LEVELS[1:])
def test_a_16_bit_output_is_rounded_in_a_region_and_runs_outside_of_one(level, low):
    other = "fp16" if low == "bf16" else "bf16"
    net, amp = prepared(level, low, hs.PlanRule("head", output=other), hs.PlanRule("block", output=other))
    with amp.autocast():
        h = torch.rand(8, 16)
        assert net.block(h).dtype == net.head(h).dtype == parse_dtype(other)
    train(net, amp)
    net(torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize(("level", "low"), LEVELS)
def test_an_output_of_the_whole_model_wins_over_the_level_s(level, low):
    net, amp = prepared(level, low, hs.PlanRule("**", output="bf16"))
    with amp.autocast():
        assert net(torch.zeros(2, 4, dtype=torch.long)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "e4m3fn"}, "dtype=e4m3fn: expected one of bf16, fp16, fp32, fp64"),
        ({"output": "fp64"}, "output=fp64: expected one of bf16, fp16, fp32"),
        ({"dtype": "fp64", "rule": hs.Rule.FULL}, "computes in fp64, so that rule= and ops="),
        ({"dtype": "fp64", "ops": {"linear": hs.Rule.LOW}}, "computes in fp64, so that rule= and ops="),
        ({"output": "bf16"}, "at O0 what follows computes in fp32"),
    ],
)
def test_what_has_no_effect_is_refused(options, said):
    with pytest.raises(PlanError, match=said):
        prepared("O0", None, hs.PlanRule("block", **options))


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_of_16_bits_take_fp32_inputs(kind, low):
    """At O3 an input keeps its dtype: what is normalised is not rounded, its statistics are."""
    net = nn.Sequential(kind(4, affine=True, track_running_stats=True))
    x = torch.rand(64, 4, 3) * 10 + 1000
    right = kind(4, affine=True, track_running_stats=True)
    expected = right(x)
    amp = hs.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), level="O3", dtype=low)
    with amp.autocast():
        out = net(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
    assert net[0].running_mean.dtype == parse_dtype(low)
    torch.testing.assert_close(net[0].running_mean.float(), right.running_mean, rtol=2**-8, atol=0)


@pytest.mark.parametrize(("level", "low"), LEVELS[1::2])
@pytest.mark.parametrize("path", ["block", "block.inner"])
@pytest.mark.parametrize("edited", [None, "linear"])
@pytest.mark.parametrize("rule", [hs.Rule.LOW, hs.Rule.KEEP])
def test_a_rule_of_ops_trains_and_runs_outside_of_a_region(level, low, path, edited, rule):
    given = {"rule": rule} if edited is None else {"ops": {edited: rule}}
    net, amp = prepared(level, low, hs.PlanRule(path, **given))
    train(net, amp)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    net(tokens)
    with amp.evaluating():
        assert net(tokens).isfinite().all()
