"""Stages of a pipeline on gloo ranks: `norm_group` makes norm, clipping and skips the whole model's."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import halfstep as hs
from tests.ranks import run

RANKS = [2, pytest.param(3, marks=pytest.mark.long)]


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 33), nn.GELU(), nn.Linear(33, 9), nn.GELU(), nn.Linear(9, 2))


def optimizer_of(kind, model):
    made = torch.optim.AdamW if kind == "torch" else hs.optim.AdamW
    return made(model.parameters(), lr=0.05)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)


def stage(rank, world, kind, clip):
    """Two modules for each rank, the last has the others; torch's own schedule runs them."""
    model = net()
    own = model[2 * rank : 2 * rank + 2 if rank < world - 1 else None]
    group = torch.distributed.group.WORLD
    amp = hs.prepare(own, optimizer_of(kind, own), level="O0", norm_group=group)
    schedule = ScheduleGPipe(
        PipelineStage(own, rank, world, torch.device("cpu")), 2, loss_fn=nn.functional.mse_loss
    )
    norms = []
    for step in range(4):
        x, y = batch(step)
        with amp.autocast():
            schedule.step(*[x] * (rank == 0), **{"target": y} if rank == world - 1 else {})
        norms.append(amp.step(clip_norm=clip).grad_norm)
    return norms, [p.detach() for p in own.parameters()]


def alone(kind, clip):
    model, norms = net(), []
    amp = hs.prepare(model, optimizer_of(kind, model), level="O0")
    for step in range(4):
        for x, y in zip(*(t.chunk(2) for t in batch(step))):
            with amp.autocast():
                loss = nn.functional.mse_loss(model(x), y) / 2
            amp.backward(loss)
        norms.append(amp.step(clip_norm=clip).grad_norm)
    return norms, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("world", RANKS)
def test_stages_of_a_pipeline_are_clipped_as_one_model(world, kind):
    stages = run(stage, world, world, kind, 0.1)
    norms, weights = alone(kind, 0.1)
    for told, _ in stages:
        assert told == stages[0][0]
        assert told == pytest.approx(norms, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(weights, [p for _, own in stages for p in own], strict=True))


def hurt(rank, kind):
    """In the second step the gradients of stage 1 hold inf, and a session or a scaler tells it to all."""
    model, group = nn.Linear(2, 2, bias=False), torch.distributed.group.WORLD
    optimizer = optimizer_of("torch", model)
    if kind == "scaler":
        scaler = hs.GradScaler(init_scale=2.0, norm_group=group)
        scaler.scale(torch.ones(()))
        step, factor = lambda: scaler.step(optimizer), 2.0
    else:
        amp = hs.prepare(model, optimizer, level="O0", norm_group=group, skip_nonfinite=False)
        step, factor = amp.step, 1.0
    told = []
    for value in (3.0 + rank, math.inf if rank == 1 else 1.0):
        model.weight.grad = torch.full_like(model.weight, value * factor)
        outcome = step()
        told.append((outcome.finite, outcome.grad_norm))
        if kind == "scaler":
            scaler.update()
    return told


@pytest.mark.parametrize("kind", ["scaler", "session"])
@pytest.mark.parametrize("world", RANKS)
@pytest.mark.filterwarnings("ignore:step \\d+. gradients of")
def test_every_stage_is_told_the_norm_of_all(world, kind):
    norm = math.sqrt(sum(4 * (3.0 + rank) ** 2 for rank in range(world)))
    for told in run(hurt, world, kind):
        assert told == [(True, pytest.approx(norm)), (False, math.inf)]


def test_what_is_no_group_of_stages_is_refused():
    model = net()
    with pytest.raises(hs.ConfigError, match=r"norm_group='pp': expected the process group of the stages"):
        hs.prepare(model, optimizer_of("torch", model), level="O0", norm_group="pp")


def released(rank):
    model = net()
    optimizer = hs.optim.AdamW(model.parameters(), release_gradients=True)
    with pytest.raises(hs.UnsupportedError, match="norm_group with release_gradients"):
        hs.prepare(model, optimizer, level="O0", norm_group=torch.distributed.group.WORLD)


def test_released_gradients_know_no_norm_of_stages():
    run(released, 2)


def saved(rank, folder):
    for stage, group in ((net()[2 * rank :], None), (net(), torch.distributed.group.WORLD)):
        amp = hs.prepare(stage, optimizer_of("ours", stage), level="O0", norm_group=group)
        with pytest.raises(hs.CheckpointError, match="ranks hold different parameters"):
            amp.save(f"{folder}/step-1")


def test_one_folder_does_not_hold_half_of_each_stage(tmp_path):
    run(saved, 2, str(tmp_path))
    assert not list(tmp_path.iterdir())
