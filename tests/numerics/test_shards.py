"""A bad step of a model under fully_shard, run through `amp.replayable` (gloo ranks)."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import halfstep as hs
from tests.ranks import run


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.two(torch.relu(self.one(self.norm(x))))


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 4))


def trained(rank, ours, level, dtype, ready):
    model = blocks()
    if ours:
        hs.distributed.shard(model)
    else:
        for block in model[:2]:
            fully_shard(block)
        fully_shard(model)
    kind = hs.optim.AdamW if ours else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01)
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype, skip_nonfinite=True, kernels="native")

    def step(x, factor):
        with amp.autocast():
            loss = model(x).float().square().mean() * factor
        amp.backward(loss)
        amp.step(clip_norm=1.0)
        return loss.detach()

    for at in range(5):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * at + rank))
        batch = x, float("inf") if at in (2, 3) and rank == 1 else 1.0
        amp.replayable(step, *batch) if ready else step(*batch)
    return [outcome.taken for outcome in amp.history], [p.full_tensor() for p in model.parameters()]


def both(rank):
    found = []
    for way in ((True, "O2", "bf16"), (False, "O1", "fp16")):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ready = trained(rank, *way, True)
        plain = trained(rank, *way, False)
        found.append((ready, plain, [str(one.message) for one in told if "fully_shard" in str(one.message)]))
    return found


@pytest.mark.long
def test_a_bad_step_is_told_once_and_training_goes_on():
    """It used to end in "data is not allocated yet", or in a segmentation fault."""
    for found in run(both, 2):
        for (taken, weights), (_, without), told in found:
            assert taken == [True, True, False, False, True]
            assert all(map(torch.equal, weights, without))
            assert [one.split(":")[0] for one in told] == ["step 3"]
            assert "No op is named" in told[0]
