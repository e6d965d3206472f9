"""Hugging Face accelerate: its loop, its clipping and accumulation, its checkpoint, two processes."""

import sys
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import halfstep as hs
from halfstep.integrations.accelerate import Accelerator
from tests.hosts import common
from tests.hosts.common import ACCUMULATE, BATCH, CLIP, DTYPES, LOW, RATE, SEEDS, STEPS, WAYS

pytestmark = pytest.mark.filterwarnings("ignore")
SAVED = STEPS // 2


def make(way, dtype, **how):
    """The Accelerator, in which dtype the weights come, and the optimizer's class."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    base = {"cpu": True, "gradient_accumulation_steps": ACCUMULATE}
    if way == "fp32":
        return accelerate.Accelerator(**base), torch.float32, torch.optim.AdamW
    if way == "optimizer":
        return accelerate.Accelerator(**base), LOW[dtype], hs.optim.AdamW
    if way == "scaler":
        accelerator = accelerate.Accelerator(**base)
        accelerator.scaler = hs.GradScaler(init_scale=1024.0)
        return accelerator, LOW[dtype], hs.optim.AdamW
    return Accelerator(**base, level=way, dtype=dtype, **how), torch.float32, hs.optim.AdamW


def train(way, dtype="bf16", seed=0, steps=STEPS, spoiled=None, save=None, load=None, **how):
    """Train by accelerate's loop; `save` after half the steps, or go on from there."""
    common.quiet()
    accelerator, low, kind = make(way, dtype, **how)
    model = common.llama(seed, low)
    if spoiled is not None:
        common.spoil(model, spoiled * ACCUMULATE)
    optimizer = kind(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / (2 * STEPS))
    loader = torch.utils.data.DataLoader(common.rows(seed), batch_size=BATCH)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    begin = 0
    if load:
        accelerator.load_state(load)
        begin = SAVED
        loader = accelerator.skip_first_batches(loader, begin * ACCUMULATE)
    found = SimpleNamespace(losses=[], norms=[], rates=[], skipped=[], model=model, optimizer=optimizer)
    step = begin
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.losses.append(float(loss.detach()))
        if accelerator.sync_gradients:
            found.rates.append(schedule.get_last_lr()[0])
            found.skipped.append(bool(accelerator.optimizer_step_was_skipped))
            step += 1
            if save and step == SAVED:
                accelerator.save_state(save)
            if step == steps:
                break
    found.last = sum(found.losses[-20:]) / len(found.losses[-20:])
    found.session = getattr(accelerator, "session", None)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_loss_norm_and_checkpoint(way, dtype, tmp_path):
    plain = [train("fp32", seed=seed) for seed in SEEDS]
    ours = [train(way, dtype, seed) for seed in SEEDS]
    common.like_fp32(ours, plain, 0.03)
    for run, other in zip(ours, plain):
        assert run.rates == pytest.approx(other.rates)
        assert not any(run.skipped)
    kept = train(way, dtype, save=str(tmp_path))
    assert common.same(kept.model, ours[0].model)
    again = train(way, dtype, load=str(tmp_path))
    assert common.same(again.model, kept.model)
    assert again.losses == kept.losses[SAVED * ACCUMULATE :]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [*WAYS[1:], "scaler"])
def test_a_skipped_step_is_seen_by_the_scheduler(way, dtype):
    """The last way: accelerate's own optimizer, with our scaler, sees whether `step` was called."""
    common.sees_the_skip(train(way, dtype, steps=6, spoiled=3, **common.SKIPS[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes(way, dtype, tmp_path):
    ranks = common.launched(__file__, way, dtype, str(tmp_path))
    assert ranks[0]["norms"] == ranks[1]["norms"]
    common.near([ranks[0]["last"]], [train("fp32", seed=seed, steps=STEPS // 2).last for seed in SEEDS])


def folds(way, dtype, steps=4):
    """Two models one after another in one Accelerator: their losses, and the second model."""
    common.quiet()
    accelerator, low, kind = make(way, dtype)
    losses = []
    for seed in range(2):
        model = common.llama(seed, low)
        optimizer = kind(model.parameters(), lr=RATE)
        loader = torch.utils.data.DataLoader(common.rows(seed), batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch, _ in zip(loader, range(steps)):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        last = accelerator.unwrap_model(model)
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    return losses, last


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_model_for_each_fold(way, tmp_path):
    plain, _ = folds("fp32", "fp32")
    assert folds(way, "bf16")[0] == pytest.approx(plain, rel=0.02)
    ranks = common.launched(__file__, way, "bf16", "folds", str(tmp_path))
    assert len(ranks[0]["losses"]) == len(plain)
    assert ranks[0]["losses"][4] == pytest.approx(plain[4], rel=0.05)  # the second model begins as one alone


if __name__ == "__main__":
    if "folds" in sys.argv:
        losses, model = folds(*sys.argv[1:3])
        common.write(sys.argv[-1], losses=losses, digest=common.digest(model))
    else:
        run = train(*sys.argv[1:3])
        common.write(sys.argv[3], last=run.last, digest=common.digest(run.model), norms=run.norms)
