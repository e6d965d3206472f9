"""torchtitan: its container, schedule, clipping and checkpoint, in the order of its Trainer's step.

Its Trainer itself needs an accelerator.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
from torchtitan.components.optimizer import OptimizersContainer as HostContainer
from torchtitan.distributed.utils import clip_grad_norm_

import halfstep as hs
from halfstep.integrations.torchtitan import OptimizersContainer
from tests.hosts import common
from tests.hosts.common import BATCH, CLIP, RATE, SEEDS, STEPS

pytestmark = pytest.mark.filterwarnings("ignore")
SAVED = STEPS // 2


def make(way, seed, shards=False, **options):
    """A model, and the containers that torchtitan's configs build for it."""
    model = common.llama(seed, torch.float32 if way == "fp32" else torch.bfloat16)
    if shards:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    kind, how = HostContainer if way == "fp32" else OptimizersContainer, {"lr": RATE, **options}
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**how, **own})
        for pattern, own in ((r"norm", {"weight_decay": 0.0}), (r".*", {}))
    ]
    optimizers = kind.Config(param_groups=groups).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=STEPS)
    return model, optimizers, schedule


def train(way, seed=0, steps=STEPS, spoiled=None, save=None, load=None, rank=0, world=1, **options):
    """Train by the steps of torchtitan's Trainer; `save` after half of them, or go on from there."""
    common.quiet()
    model, optimizers, schedule = make(way, seed, world > 1, **options)
    held = {"model": model, "optimizer": optimizers, "lr_scheduler": schedule}
    run = SimpleNamespace(model=model, losses=[], norms=[], optimizers=list(optimizers))
    if load:
        dcp.load(held, checkpoint_id=load)
    rows = torch.stack([row["input_ids"] for row in common.rows(seed)])[rank::world].split(BATCH)
    for step in range(SAVED if load else 0, steps):
        optimizers.zero_grad()
        loss = model(input_ids=rows[step], labels=rows[step]).loss
        run.losses.append(float(loss.detach()))
        (loss * float("inf") if step == spoiled else loss).backward()
        norm = clip_grad_norm_(list(model.parameters()), CLIP, foreach=True)
        run.norms.append(float(norm))
        optimizers.step()
        schedule.step()
        if save and step + 1 == SAVED:
            dcp.save(held, checkpoint_id=save)
    run.last = sum(run.losses[-20:]) / len(run.losses[-20:])
    return run


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_loss_norm_and_checkpoint(state_dtype, tmp_path):
    plain = [train("fp32", seed=seed) for seed in SEEDS]
    ours = [train("ours", seed, state_dtype=state_dtype) for seed in SEEDS]
    assert {type(one) for one in ours[0].optimizers} == {hs.optim.AdamW}
    common.like_fp32(ours, plain, 0.03)
    kept = train("ours", save=tmp_path, state_dtype=state_dtype)
    assert common.same(kept.model, ours[0].model)
    again = train("ours", load=tmp_path, state_dtype=state_dtype)
    assert common.same(again.model, kept.model)
    assert again.losses == kept.losses[SAVED:]


def test_a_step_on_inf_is_skipped():
    run = train("ours", steps=6, spoiled=5, skip_nonfinite=True)
    assert [one.outcome.skipped for one in run.optimizers] == [True]
    assert common.same(run.model, train("ours", steps=5, skip_nonfinite=True).model)


def test_states_in_bf16_by_the_host_s_word():
    model = make("ours", 0)[0]
    config = OptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": RATE})],
        implementation="fused_opt_states_bf16",
    )
    (optimizer,) = config.build(model_parts=[model])
    assert type(optimizer) is hs.optim.Adam
    assert optimizer.param_groups[0]["state_dtype"] == "bf16"


def test_a_checkpoint_before_the_first_step_counts_none():
    model, optimizers, _ = make("ours", 0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = optimizers.state_dict()
    assert all(float(state[name]) == 0 for name in state if name.endswith(".step"))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_two_processes_of_fully_shard(tmp_path):
    ranks = common.launched(__file__, str(tmp_path))
    assert ranks[0]["norms"] == ranks[1]["norms"]
    common.near_in_two(ranks, [train("fp32", seed=seed, steps=STEPS // 2) for seed in SEEDS])


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    run = train("ours", steps=STEPS // 2, rank=torch.distributed.get_rank(), world=2)
    values = torch.cat([p.detach().full_tensor().double().flatten() for p in run.model.parameters()])
    digest = float((values * torch.arange(1, len(values) + 1)).sum())
    common.write(sys.argv[1], last=run.last, digest=digest, norms=run.norms)
