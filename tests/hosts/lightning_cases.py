"""Lightning: a small CNN on digits by the Trainer's loop, alone and in two processes."""

import sys
from types import SimpleNamespace

import lightning
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.integrations.lightning import DDPStrategy, Precision
from tests.hosts import common
from tests.hosts.common import ACCUMULATE, CLIP, DTYPES, RATE, SEEDS, WAYS

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, BATCHES = 16, 80


class Digits(lightning.LightningModule):
    def __init__(self, seed, kind):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(128, 10),
        )  # fmt: skip
        self.kind, self.losses, self.norms = kind, [], []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x).float(), y)
        self.losses.append(float(loss.detach()))
        return loss

    def forward(self, x):
        return self.net(x.to(self.net[0].weight.dtype))

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad.float() for p in self.parameters()])))

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=RATE)


def train(way, dtype="bf16", seed=0, folder=".", devices=1, accumulate=ACCUMULATE):
    """Train by the Trainer's loop."""
    common.quiet()
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
    order = order[: BATCHES * BATCH]
    x = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16
    rows = torch.utils.data.TensorDataset(x, torch.tensor(found.target)[order])
    how = {"precision": {"bf16": "bf16-true", "fp16": "16-true"}[dtype]} if way == "optimizer" else {}
    two = "auto" if devices == 1 else DDPStrategy() if way in WAYS[1:] else "ddp"
    how = {"plugins": Precision(level=way, dtype=dtype)} if way in WAYS[1:] else how
    module = Digits(seed, torch.optim.AdamW if way == "fp32" else hs.optim.AdamW)
    lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=devices, strategy=two,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=folder, gradient_clip_val=CLIP, accumulate_grad_batches=accumulate, **how,
    ).fit(module, torch.utils.data.DataLoader(rows, batch_size=BATCH))  # fmt: skip
    second = module.losses[len(module.losses) // 2 :]
    last = sum(second) / len(second)
    return SimpleNamespace(model=module.net, losses=module.losses, norms=module.norms, last=last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_norm(way, dtype, tmp_path):
    plain = [train("fp32", seed=seed) for seed in SEEDS]
    ours = [train(way, dtype, seed) for seed in SEEDS]
    common.near([run.last for run in ours], [run.last for run in plain])
    for run, other in zip(ours, plain):
        assert run.norms[:5] == pytest.approx(other.norms[:5], rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes(way, dtype, tmp_path):
    ranks = common.launched(__file__, way, dtype, str(tmp_path))
    assert [rank["world"] for rank in ranks] == [2, 2]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    plain = [train("fp32", seed=seed, accumulate=2 * ACCUMULATE).last for seed in SEEDS]
    common.near([sum(rank["last"] for rank in ranks) / 2], plain)


if __name__ == "__main__":
    run = train(*sys.argv[1:3], folder=sys.argv[3], devices=2)
    common.write(sys.argv[3], last=run.last, digest=common.digest(run.model))
