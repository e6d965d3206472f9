"""Law 8: disabled runs the same path. O0, O1 outside a region and an empty plan are plain PyTorch."""

import pytest
import torch
from torch import nn

from halfstep.convert import convert
from halfstep.optim import MasterWeights
from halfstep.policy.plan import Plan

torch.set_num_threads(1)


def train(prepare, make_optimizer, clip):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))
    optimizer = make_optimizer(model.parameters())
    prepare(model, optimizer)
    for _ in range(6):
        loss = model(torch.randn(7, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    moments = [t for row in state.values() for t in row.values() if isinstance(t, torch.Tensor)]
    return [*model.state_dict().values(), *moments]


def nothing(model, optimizer):
    pass


def converted(plan_or_level):
    def prepare(model, optimizer):
        MasterWeights(optimizer, model, initial=convert(model, plan_or_level).originals)

    return prepare


def reverted(model, optimizer):
    conversion = convert(model, "O2", "bf16")
    masters = MasterWeights(optimizer, model, initial=conversion.originals)
    conversion.revert()
    masters.revert()


OFF = {
    "O0": converted("O0"),
    "O1 outside a region": converted("O1"),
    "empty plan": converted(Plan.empty()),
    "plan of fp32": converted(Plan.from_toml('[[rule]]\npattern = "**"\ndtype = "fp32"\nreason = ""\n')),
    "reverted": reverted,
    "converted and reverted": lambda model, optimizer: convert(model, "O2", "bf16").revert(),
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    ],
)
@pytest.mark.parametrize("how", OFF)
def test_off_is_bit_identical_to_plain_pytorch(how, make_optimizer, clip):
    ours, theirs = train(OFF[how], make_optimizer, clip), train(nothing, make_optimizer, clip)
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs))
