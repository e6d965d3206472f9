"""A session under DistributedDataParallel, as a user's loop has it (gloo ranks)."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests.ranks import run


def cleared(rank):
    """Weights after four steps whose gradients the user's own zero_grad cleared, and how."""
    found = []
    for dtype in ("bf16", "fp16"):
        for to_none in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            amp = hs.prepare(model, optimizer, level="O2", dtype=dtype, kernels="native")
            ddp = DDP(model)
            for step in range(4):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                with amp.autocast():
                    loss = ddp(x).float().square().mean()
                amp.backward(loss)
                amp.step(clip_norm=1.0, zero_grad=False)
                optimizer.zero_grad(set_to_none=to_none)
            found.append([p.detach().clone() for p in model.parameters()])
    return found


def test_gradients_may_be_set_to_zero_between_steps():
    """DDP's reducer used to end in `Expected BFloat16, got Float`: steps leave fp32 gradients."""
    for bf16, bf16_zeros, fp16, fp16_zeros in run(cleared, 2):
        assert all(map(torch.equal, bf16, bf16_zeros))
        assert all(map(torch.equal, fp16, fp16_zeros))
