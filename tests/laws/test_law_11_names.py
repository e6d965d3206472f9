"""Law 11: state is keyed by name, never by id(); nothing bound on an optimizer or module outlives revert."""

import pytest
import torch
from torch import nn

from halfstep.convert import convert, to_float
from halfstep.optim import MasterWeights
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule

torch.set_num_threads(1)


class Wrapped(nn.Module):
    """Stands for DDP: the model under `.module`."""

    def __init__(self, model):
        super().__init__()
        self.module = model


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 2)))


PLAN = Plan((PlanRule("2", rule=Rule.FULL, reason="for the test"),))
WRAPPERS = {
    "plain": lambda m: m,
    "ddp": Wrapped,
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "both": lambda m: Wrapped(torch.compile(m, backend="eager")),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_saved_masters_have_canonical_names(wrapper):
    model = make().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    MasterWeights(optimizer, WRAPPERS[wrapper](model))
    names = [name for name, _ in model.named_parameters()]
    assert list(optimizer.state_dict()["masters"]) == names


@pytest.mark.parametrize("saved_by", WRAPPERS)
def test_masters_go_by_name_and_not_by_order(saved_by):
    model, other = make().bfloat16(), make().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer, WRAPPERS[saved_by](model))
    with torch.no_grad():
        for index, master in enumerate(masters.params()):
            master.fill_(index)
    reversed_order = torch.optim.SGD(list(other.parameters())[::-1], lr=0.1)
    target = MasterWeights(reversed_order, other)
    target.load_state_dict(masters.state_dict())
    loaded = dict(target.named())
    for name, master in masters.named():
        assert torch.equal(loaded[name], master)


def test_without_names_the_key_is_group_and_position():
    model = make().bfloat16()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}]
    masters = MasterWeights(torch.optim.SGD(groups, lr=0.1))
    assert list(masters.state_dict()) == ["0.0", "0.1", "1.0", "1.1"]


def test_the_groups_own_names_count():
    model = make().bfloat16()
    masters = MasterWeights(torch.optim.SGD(list(model.named_parameters()), lr=0.1))
    assert next(iter(masters.state_dict())) == "0.weight"


def snapshot(thing):
    """Everything bound on an optimizer or on the modules of a model: attributes, and the hooks."""
    modules = thing.modules() if isinstance(thing, nn.Module) else [thing]
    return [
        {k: dict(v) if "hooks" in k else None for k, v in vars(m).items()} | {"class": type(m)}
        for m in modules
    ]


def test_nothing_outlives_revert():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = snapshot(model), snapshot(optimizer)
    group = [id(p) for p in optimizer.param_groups[0]["params"]]
    conversion = convert(model, "O2", torch.bfloat16, plan=PLAN)
    masters = MasterWeights(optimizer, model, initial=conversion.originals)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert (snapshot(model), snapshot(optimizer)) != before
    conversion.revert()
    masters.revert()
    assert (snapshot(model), snapshot(optimizer)) == before
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == group
    for p in model.parameters():
        assert p.dtype == torch.float32
        assert p.grad is None
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert set(optimizer.state) == set(model.parameters())


def test_to_float_leaves_nothing_when_taken_off():
    model = make()
    before = snapshot(model)
    to_float(model, torch.bfloat16)
    model(torch.randn(4, 4))
    assert snapshot(model) != before
    to_float(model, None)
    assert snapshot(model) == before


def test_after_revert_gradients_follow_the_weights_dtype_as_ever():
    model = nn.Linear(4, 2)
    conversion = convert(model, "O2", torch.bfloat16)
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.randn(3, 4)).sum().backward()
    masters.copy_grads()
    conversion.revert()
    masters.revert()
    for dtype in (torch.float32, torch.float16, torch.float64):
        model.zero_grad()
        model.to(dtype)
        model(torch.randn(3, 4, dtype=dtype)).sum().backward()
        assert all(p.grad.dtype == dtype for p in model.parameters())
