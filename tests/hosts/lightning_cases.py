"""Lightning: a small CNN on digits by the Trainer's loop, its checkpoint, two processes."""

import sys
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F

import halfstep as hs
from halfstep.integrations.lightning import DDPStrategy, Precision
from tests.hosts import common
from tests.hosts.common import ACCUMULATE, CLIP, DTYPES, RATE, SEEDS, WAYS

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, BATCHES = 16, 80


class Digits(lightning.LightningModule):
    def __init__(self, seed, kind, spoiled=None):
        super().__init__()
        self.net, self.kind, self.spoiled = common.cnn(seed), kind, spoiled
        self.losses, self.norms, self.rates, self.skipped = [], [], [], []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x).float(), y)
        self.losses.append(float(loss.detach()))
        return loss * float("inf") if index == self.spoiled else loss

    def forward(self, x):
        return self.net(x.to(self.net[0].weight.dtype))

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad.float() for p in self.parameters()])))

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler, metric):  # the hook that docs/hosts.md recommends
        outcome = getattr(self.trainer.precision_plugin, "outcome", None)
        self.skipped.append(outcome is not None and outcome.skipped)
        if not self.skipped[-1]:
            scheduler.step()
        self.rates.append(scheduler.get_last_lr()[0])


def train(
    way, dtype="bf16", seed=0, folder=".", devices=1, accumulate=ACCUMULATE, epochs=1, load=None,
    batches=BATCHES, spoiled=None, **options,
):  # fmt: skip
    """Train by the Trainer's loop; of several epochs each ends with a checkpoint."""
    common.quiet()
    how = {"precision": {"bf16": "bf16-true", "fp16": "16-true"}[dtype]} if way == "optimizer" else {}
    two = "auto" if devices == 1 else DDPStrategy() if way in WAYS[1:] else "ddp"
    how = {"plugins": Precision(level=way, dtype=dtype, **options)} if way in WAYS[1:] else how
    module = Digits(seed, torch.optim.AdamW if way == "fp32" else hs.optim.AdamW, spoiled)
    saver = [ModelCheckpoint(folder, save_top_k=-1, save_on_train_epoch_end=True)] if epochs > 1 else []
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=devices, strategy=two, callbacks=saver,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=bool(saver),
        default_root_dir=folder, gradient_clip_val=CLIP, accumulate_grad_batches=accumulate, **how,
    )  # fmt: skip
    rows = common.digits(seed, batches * BATCH)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=BATCH), ckpt_path=load)
    second = module.losses[len(module.losses) // 2 :]
    last = sum(second) / len(second)
    found = {name: getattr(module, name) for name in ("losses", "norms", "rates", "skipped")}
    return SimpleNamespace(model=module.net, last=last, **found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_loss_norm_and_checkpoint(way, dtype, tmp_path):
    plain = [train("fp32", seed=seed) for seed in SEEDS]
    common.like_fp32([train(way, dtype, seed) for seed in SEEDS], plain, 0.05)
    kept = train(way, dtype, folder=tmp_path, epochs=2)
    first = tmp_path / f"epoch=0-step={BATCHES // ACCUMULATE}.ckpt"
    again = train(way, dtype, folder=tmp_path, epochs=2, load=first)
    assert common.same(again.model, kept.model)
    assert again.losses == kept.losses[BATCHES:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_skipped_step_is_seen_by_the_scheduler(way, dtype):
    run = train(way, dtype, batches=6 * ACCUMULATE, spoiled=3 * ACCUMULATE, **common.SKIPS[dtype])
    common.sees_the_skip(run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes(way, dtype, tmp_path):
    ranks = common.launched(__file__, way, dtype, str(tmp_path))
    common.near_in_two(ranks, [train("fp32", seed=seed, accumulate=2 * ACCUMULATE) for seed in SEEDS])


if __name__ == "__main__":
    run = train(*sys.argv[1:3], folder=sys.argv[3], devices=2)
    common.write(sys.argv[3], last=run.last, digest=common.digest(run.model))
