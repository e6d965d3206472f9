"""Law 12: observation is read-only. A watched run has the same losses and weights, bit for bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfstep.numerics.trace import trace_step
from halfstep.numerics.watch import watch
from halfstep.scaling import DynamicLossScale
from halfstep.session import prepare

pytestmark = pytest.mark.filterwarnings("ignore:5 steps in a row were skipped")


class Net(nn.Module):
    """Dropout, batch norm, an in-place ReLU, a shared module, checkpointing: what observing could disturb."""

    def __init__(self, reentrant):
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.GELU())
        self.shared = nn.Linear(16, 16)
        self.out = nn.Linear(16, 2)
        self.reentrant = reentrant

    def forward(self, x):
        h = self.act(self.norm(self.inp(x)))
        h = h + checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.out(self.shared(torch.tanh(self.shared(h))))


SETTINGS = [("O0", None), ("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]


def train(level, dtype, observe, reentrant=False, accumulate=2):
    """Losses, outcomes and final weights; `observe(model, session)` may return what to do before a step."""
    torch.manual_seed(3)
    model = Net(reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scale = DynamicLossScale(init=2.0**22, interval=4) if dtype == "fp16" and level != "O3" else None
    amp = prepare(model, optimizer, level=level, dtype=dtype, loss_scale=scale)

    def step(x, y):
        seen = []
        for a, b in zip(x.chunk(accumulate), y.chunk(accumulate)):
            with amp.autocast():
                loss = F.cross_entropy(model(a).float(), b)
            amp.backward(loss)
            seen.append(loss.detach().clone())
        return [*seen, torch.tensor(float(amp.step(clip_norm=1.0).taken))]

    before = observe(model, amp)
    data = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(12):
        x = torch.randn(16, 8, generator=data)
        batch = x, (x[:, 0] > 0).long()
        if before is not None:
            before(step, batch)
        losses += step(*batch)
    return losses, [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]


def same(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("level", "dtype"), SETTINGS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_watching_changes_nothing(level, dtype, reentrant):
    plain = train(level, dtype, lambda *_: None, reentrant=reentrant)
    watches = []

    def observe(model, amp):
        watches.append(watch(model, amp, every=1))

    watched = train(level, dtype, observe, reentrant=reentrant)
    assert same(plain[0], watched[0])
    assert same(plain[1], watched[1])
    seen = watches[0]
    assert seen.step == 12
    assert {k for k, _ in seen.series} == {"weight", "gradient", "update", "activation", "activation_grad"}


@pytest.mark.parametrize(("level", "dtype"), [("O1", "fp16"), ("O2", "bf16")])
def test_tracing_a_step_and_running_it_changes_nothing(level, dtype):
    def observe(model, amp):
        return lambda step, batch: trace_step(step, *batch, model=model, session=amp)

    plain = train(level, dtype, lambda *_: None)
    traced = train(level, dtype, observe)
    assert same(plain[0], traced[0])
    assert same(plain[1], traced[1])


def test_closing_leaves_no_hook():
    torch.manual_seed(0)
    model = Net(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, every=1) as seen:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    assert seen.step == 1
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_closing_leaves_nobody_listening():
    model = Net(False)
    amp = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bf16")
    with watch(model, amp):
        assert len(amp.listeners) == len(amp.early_listeners) == 1
    assert amp.listeners == amp.early_listeners == []
