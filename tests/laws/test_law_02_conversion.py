"""Law 2: nothing is silent. What conversion and masters cannot do is an error that names the thing."""

import copy
import pickle

import pytest
import torch
from torch import nn

from halfstep.convert import convert
from halfstep.errors import CheckpointError, ConfigError, HalfstepError, PlanError, UnsupportedError
from halfstep.optim import MasterWeights
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule

torch.set_num_threads(1)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def tied():
    model = net()
    model[2].weight = model[0].weight
    return model


def masters_of(make):
    model = net().bfloat16()
    return MasterWeights(make(model), model)


def load_others():
    masters_of(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)).load_state_dict({"a": torch.ones(1)})


class Ahead(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.slow = {"weights": [p for g in self.param_groups for p in g["params"]]}


def optimizer_with_masters():
    return masters_of(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)).optimizer


REFUSALS = {
    "a rule that matches nothing": (
        PlanError,
        "head",
        lambda: convert(net(), Plan((PlanRule("head", rule=Rule.FULL),))),
    ),
    "a tied weight with two dtypes": (
        PlanError,
        "0.weight.*2.weight",
        lambda: convert(tied(), Plan((PlanRule("0", "bf16"), PlanRule("2", "fp16")))),
    ),
    "an unknown level": (ConfigError, "O9", lambda: convert(net(), "O9", "bf16")),
    "fp32 at O2": (ConfigError, "fp32", lambda: convert(net(), "O2", "fp32")),
    "no parameters": (ConfigError, "no parameters", lambda: convert(nn.ReLU(), "O2", "bf16")),
    "lazy parameters": (UnsupportedError, "weight", lambda: convert(nn.LazyLinear(2), "O2", "bf16")),
    "after DDP's stand-in": (
        ConfigError,
        "DataParallel",
        lambda: convert(nn.DataParallel(net()), "O2", "bf16"),
    ),
    "twice": (ConfigError, "O2 in bf16", lambda: [convert(m, "O2", "bf16") for m in [net()] * 2]),
    "LBFGS": (
        UnsupportedError,
        "LBFGS.*its own references",
        lambda: masters_of(lambda m: torch.optim.LBFGS(m.parameters())),
    ),
    "own references": (UnsupportedError, "slow", lambda: masters_of(lambda m: Ahead(m.parameters(), 0.1))),
    "another model's parameters": (
        ConfigError,
        "not a parameter of the model",
        lambda: masters_of(lambda _: torch.optim.SGD(net().bfloat16().parameters(), lr=0.1)),
    ),
    "other masters": (CheckpointError, "0.weight", load_others),
    "a copied optimizer": (UnsupportedError, "state_dict", lambda: copy.deepcopy(optimizer_with_masters())),
    "a pickled optimizer": (UnsupportedError, "state_dict", lambda: pickle.dumps(optimizer_with_masters())),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_done_is_told_by_name(case):
    kind, named, attempt = REFUSALS[case]
    with pytest.raises(kind, match=named) as caught:
        attempt()
    assert isinstance(caught.value, HalfstepError)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_never_a_quiet_fall_back_to_fp32(level, low):
    model = net()
    record = convert(model, level, low)
    seen = []
    model[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    model(torch.randn(2, 4))
    assert seen == [low]
    changed = {f"{c.module}.{c.what.split()[-1]}": c.after for c in record.changes if "parameter" in c.what}
    assert changed == {name: p.dtype for name, p in model.named_parameters()}
    assert all(c.why for c in record.changes)
