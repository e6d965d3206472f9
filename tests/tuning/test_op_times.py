"""Where a step's time goes: names, directions and modules are right, the parts within the whole."""

import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.tuning.op_times import CAST, step_times


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.conv(x)).flatten(1))


def times(level: str) -> tuple[set[tuple[str, str, str]], float, float]:
    torch.manual_seed(0)
    model = Net()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level)
    x, y = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)

    def step() -> None:
        with amp.autocast():
            loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()

    step()
    found = step_times(step, [model], steps=2)
    return {op.key for op in found.ops}, sum(op.seconds for op in found.ops), found.seconds


def test_ops_are_named_by_direction_and_module() -> None:
    keys, parts, whole = times("O0")
    for module, op in (("conv", "conv2d"), ("head", "linear"), ("", "relu"), ("", "cross_entropy_loss")):
        assert (module, op, "forward") in keys
        assert (module, op, "backward") in keys
    assert not any(op == CAST and module for module, op, _ in keys)
    assert 0 < parts <= whole * 1.001


def test_casts_stand_apart() -> None:
    keys, _, _ = times("O1")
    assert ("conv", CAST, "forward") in keys
    assert ("conv", CAST, "backward") in keys
    assert ("conv", "conv2d", "backward") in keys


def test_several_models_are_told_apart() -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)

    def step() -> None:
        two(one(torch.ones(2, 3))).sum().backward()

    modules = {op.module for op in step_times(step, [one, two], steps=1).ops}
    assert {"0", "1"} <= modules


def test_hooks_are_gone_afterwards() -> None:
    model = nn.Linear(2, 2)
    step_times(lambda: model(torch.ones(1, 2)), [model], steps=1)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
