"""Plans by module from given times, and what a converted model then computes in."""

import torch
from torch import nn

import halfstep as hs
from halfstep.tuning.modules import flow_of, plan_by_module
from halfstep.tuning.op_times import CAST, OpTime, StepTimes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(self.norm(x)).relu())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2))


def times(**ms: float) -> StepTimes:
    ops = tuple(OpTime(path.replace("_", "."), "linear", "forward", t / 1e3) for path, t in ms.items())
    return StepTimes((*ops, OpTime("1.first", CAST, "forward", 1.0)), sum(ms.values()) / 1e3)


FULL = times(_0=1.0, _1_first=2.0, _1_second=2.0, _2_first=2.0, _3=1.0)


def planned(level: str, **low: float) -> hs.Plan:
    given = {path.strip("_"): t for path, t in low.items()}
    names = {"_0": 1.0, "_1_first": 1.0, "_1_second": 1.0, "_2_first": 1.0, "_3": 0.5}
    merged = {name: given.get(name.strip("_"), t) for name, t in names.items()}
    full = StepTimes(tuple(_stripped(op) for op in FULL.ops), FULL.seconds)
    found = times(**merged)
    return plan_by_module(
        network(), full, StepTimes(tuple(_stripped(op) for op in found.ops), found.seconds), {}, 0.0, level,
        torch.bfloat16,
    )  # fmt: skip


def _stripped(op: OpTime) -> OpTime:
    return OpTime(op.module.strip("."), op.op, op.direction, op.seconds)


def test_modules_that_are_faster_in_fp32_get_a_rule_with_their_times() -> None:
    plan = planned("O2", _1_second=5.0)
    assert [rule.pattern for rule in plan.rules] == ["1.second"]
    assert plan.rules[0].rule is hs.Rule.FULL
    assert plan.rules[0].reason == "measured, forward and backward: fp32 2 ms, bf16 5 ms"


def test_no_plan_where_no_module_gains() -> None:
    assert not planned("O1").rules


def test_no_plan_puts_every_module_in_fp32() -> None:
    assert not planned("O1", _0=5.0, _1_first=5.0, _1_second=5.0, _2_first=5.0, _3=5.0).rules


def test_a_container_whose_modules_are_all_fp32_gets_one_rule() -> None:
    plan = planned("O2", _1_first=5.0, _1_second=5.0)
    assert [rule.pattern for rule in plan.rules] == ["1"]


def test_casts_between_modules_count() -> None:
    model = network()
    flow = flow_of(lambda: model(torch.randn(3, 4)), [model], {"1.first", "1.second"})
    slow, fast = {"1.first": 2.5, "1.second": 1.0}, {"1.first": 2.0, "1.second": 2.0}
    given = [
        StepTimes(tuple(OpTime(path, "linear", "forward", ms / 1e3) for path, ms in side.items()), 1e-2)
        for side in (fast, slow)
    ]
    assert plan_by_module(model, *given, {}, 1.0, "O1", torch.bfloat16).rules
    assert flow == {} or not plan_by_module(model, *given, flow, 1.0, "O1", torch.bfloat16).rules


def test_the_plan_holds_in_a_prepared_model() -> None:
    model = network()
    amp = hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), plan=planned("O2", _1_second=5.0),
                     level="O2", dtype="bf16")  # fmt: skip
    seen: dict[str, torch.dtype] = {}
    for name in ("first", "second"):
        hook = lambda m, a, k=name: seen.__setitem__(k, a[0].dtype)  # noqa: E731
        getattr(model[1], name).register_forward_pre_hook(hook)
    with amp.autocast():
        loss = model(torch.randn(3, 4)).square().mean()
    amp.backward(loss)
    amp.step()
    assert seen == {"first": torch.bfloat16, "second": torch.float32}
    assert model[1].second.weight.dtype == torch.float32
    amp.revert()


def test_flow_names_who_hands_to_whom() -> None:
    model = network()
    nodes = {"0", "1", "1.norm", "1.first", "1.second", "2", "2.norm", "2.first", "2.second", "3"}
    flow = flow_of(lambda: model(torch.randn(3, 4)), [model], nodes)
    assert flow["0", "1.norm"] == 24
    assert flow["0", "1"] == 24  # the residual sum is the block's own
    assert flow["1.norm", "1.first"] == 24
    assert flow["1.first", "1"] == 24  # relu is called by the block
    assert flow["1", "1.second"] == 24
    assert flow["2", "3"] == 24
