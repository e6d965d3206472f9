"""Lightning's Fabric: a small CNN on digits by a loop of one's own, its checkpoint, two processes."""

import sys
from types import SimpleNamespace

import lightning
import pytest
import torch
from torch.nn import functional as F

import halfstep as hs
from halfstep.integrations.fabric import Fabric
from tests.hosts import common
from tests.hosts.common import ACCUMULATE, CLIP, DTYPES, LOW, RATE, SEEDS, WAYS

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, BATCHES = 16, 80
SAVED = BATCHES // 2


def make(way, dtype, seed, devices, **how):
    """The Fabric, the network and its optimizer, set up."""
    base = {"accelerator": "cpu", "devices": devices, "strategy": "auto" if devices == 1 else "ddp"}
    if way in WAYS[1:]:
        fabric = Fabric(**base, level=way, dtype=dtype, **how)
    else:
        words = {"bf16": "bf16-true", "fp16": "16-true"}
        fabric = lightning.Fabric(**base, precision="32-true" if way == "fp32" else words[dtype])
    fabric.launch()
    net = common.cnn(seed).to(LOW[dtype] if way == "optimizer" else LOW["fp32"])
    optimizer = (torch.optim.AdamW if way == "fp32" else hs.optim.AdamW)(net.parameters(), lr=RATE)
    return fabric, *fabric.setup(net, optimizer), net


def train(
    way, dtype="bf16", seed=0, devices=1, accumulate=ACCUMULATE, batches=BATCHES, spoiled=None, save=None,
    load=None, **how,
):  # fmt: skip
    """Train by a loop in Fabric's words; `save` after half the batches, or go on from there."""
    common.quiet()
    fabric, model, optimizer, net = make(way, dtype, seed, devices, **how)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if way in WAYS[1:]:
        state["session"] = fabric.session
    if load:
        fabric.load(load, state)
    rows = common.digits(seed, batches * BATCH)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=BATCH))
    run = SimpleNamespace(model=net, losses=[], norms=[], rates=[], skipped=[])
    for i, (x, y) in enumerate(loader):
        if load and i < SAVED:
            continue
        ends = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not ends):
            loss = F.cross_entropy(model(x).float(), y)
            run.losses.append(float(loss.detach()))
            fabric.backward(loss / accumulate * (float("inf") if i == spoiled else 1.0))
        if ends:
            run.norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=CLIP)))
            outcome = optimizer.step()
            run.skipped.append(isinstance(outcome, hs.Outcome) and outcome.skipped)
            if not run.skipped[-1]:
                schedule.step()
            optimizer.zero_grad()
            run.rates.append(schedule.get_last_lr()[0])
        if save and i + 1 == SAVED:
            fabric.save(save, state)
    second = run.losses[len(run.losses) // 2 :]
    run.last = sum(second) / len(second)
    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_loss_norm_and_checkpoint(way, dtype, tmp_path):
    plain = [train("fp32", seed=seed) for seed in SEEDS]
    ours = [train(way, dtype, seed) for seed in SEEDS]
    common.like_fp32(ours, plain, 0.05)
    kept = train(way, dtype, save=tmp_path / "saved.ckpt")
    assert common.same(kept.model, ours[0].model)
    again = train(way, dtype, load=tmp_path / "saved.ckpt")
    assert common.same(again.model, kept.model)
    assert again.losses == kept.losses[SAVED:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_skipped_step_is_seen_by_the_scheduler(way, dtype):
    run = train(way, dtype, batches=6 * ACCUMULATE, spoiled=3 * ACCUMULATE, **common.SKIPS[dtype])
    common.sees_the_skip(run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes(way, dtype, tmp_path):
    ranks = common.launched(__file__, way, dtype, str(tmp_path))
    assert ranks[0]["norms"] == ranks[1]["norms"]
    common.near_in_two(ranks, [train("fp32", seed=seed, accumulate=2 * ACCUMULATE) for seed in SEEDS])


if __name__ == "__main__":
    run = train(*sys.argv[1:3], devices=2)
    common.write(sys.argv[3], last=run.last, digest=common.digest(run.model), norms=run.norms)
