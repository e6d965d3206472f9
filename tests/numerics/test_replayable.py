import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.errors import LossScaleCollapsed
from halfstep.numerics.replayable import Replayable
from halfstep.scaling import DynamicLossScale
from halfstep.session import prepare


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(F.dropout(self.norm(self.a(x)), 0.2))


def make(skip, max_skips=50):
    torch.manual_seed(0)
    model = Net()
    amp = prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        dtype="fp16" if skip else "bf16",
        loss_scale=DynamicLossScale(init=2.0**10) if skip else None,
        max_skips=max_skips,
    )

    def step(x, y, factor):
        with amp.autocast():
            loss = F.mse_loss(model(x).float(), y) * factor
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return model, amp, step


def batches(bad_at, n=5):
    g = torch.Generator().manual_seed(1)
    for i in range(n):
        x = torch.randn(16, 4, generator=g)
        yield x, x[:, :1], float("inf") if i == bad_at else 1.0


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.filterwarnings("ignore:step 3")
def test_a_bad_step_is_replayed_and_the_run_goes_on_as_if_not(skip):
    finals = []
    for ready in (False, True):
        model, amp, step = make(skip)
        replay = Replayable(amp)
        for batch in batches(bad_at=2):
            replay.run(step, *batch) if ready else step(*batch)
        finals.append([p.detach().clone() for p in (*model.parameters(), *model.buffers())])
        scale = amp.loss_scale
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*finals))
    assert amp.loss_scale == scale
    assert replay.steps == 5
    assert replay.traces[0][0] == 3
    bad = replay.traces[0][1].bad
    assert (bad.phase, bad.module, bad.op) == ("forward", "", "mul")
    assert len(replay.traces) == (1 if skip else 3)


def test_a_collapse_names_the_first_bad_op():
    _, amp, step = make(skip=True, max_skips=2)
    replay = Replayable(amp, limit=0)
    with pytest.raises(LossScaleCollapsed, match="first bad op: forward: mul in the root"):
        for _ in range(4):
            replay.run(step, torch.randn(16, 4), torch.randn(16, 1), float("inf"))


def test_without_a_session():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sqrt().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    replay = Replayable()
    replay.run(step, torch.full((2, 4), 100.0) * torch.sign(model.weight.detach()))
    assert replay.last is None
    start = model.weight.detach().clone()
    replay.run(step, -torch.full((2, 4), 100.0) * torch.sign(model.weight.detach()))
    assert replay.last.bad.op == "sqrt"
    assert not model.weight.isfinite().all()
    assert start.isfinite().all()
