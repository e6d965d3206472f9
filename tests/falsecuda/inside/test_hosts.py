"""Hosts that choose the device themselves find this one, and train on it through the adapters."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.integrations.accelerate import Accelerator


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accelerate_trains_on_the_device(level: str):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    accelerator = Accelerator(mixed_precision="bf16", level=level)
    model, optimizer = accelerator.prepare(net, hs.optim.AdamW(net.parameters(), lr=1e-2))
    x = torch.randn(32, 6, device=accelerator.device)
    losses = []
    for _ in range(6):
        with accelerator.autocast():
            loss = (model(x).float() - x[:, :1]).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert accelerator.device.type == next(model.parameters()).device.type == "cuda"
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_has_the_gradients_of_the_plain_one(reentrant: bool):
    def gradients(recomputed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1)).cuda()
        amp = hs.prepare(net, hs.optim.SGD(net.parameters(), lr=0.1), level="O1", dtype="bf16")
        x = torch.ones(4, 6, device="cuda", requires_grad=True)
        with amp.autocast():
            out = checkpoint(net, x, use_reentrant=reentrant) if recomputed else net(x)
        amp.backward(out.float().square().mean())
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, again)
