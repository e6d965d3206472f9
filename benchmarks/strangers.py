"""Five training loops as people write them: O1 beside torch.autocast, time and memory (strangers.json).

A language model of torch's own encoder layers with a log_softmax in `forward`, a UNet with two losses, a
denoising diffusion step, a ViT with augmentation in the step, and TabNet (Arik and Pfister 2019, arXiv
1908.07442). Each is trained in fp32 and under `torch.autocast` with torch's AdamW, and at O1 with torch's
AdamW and with halfstep's. Settings take one step each a turn, in an order that changes, in the thread's own
processor time, one thread; every few turns all are built anew. Memory is the
peak of a step in torch's allocator, with weights, states and batch.

Target: O1 at most 1.02 of torch.autocast's time and of its memory in each loop. `--without RULES` times
a case without some rules of ours (`log_softmax,layer_norm`), to see what one costs.

python benchmarks/strangers.py [--only NAME,...] [--rounds N] [--without OP,...] [--out FILE]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _machine
import _models as models
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.recipes.measure import memory_peak

BLOCK = 6
"""Turns after which all is built anew: where a model lies in memory costs or saves some per cent."""
SETTINGS = ("fp32", "autocast", "O1", "O1, hs.optim")


class LanguageModel(nn.Module):
    """torch's encoder layers under a causal mask, positions of sines, log-probabilities out."""

    def __init__(self, vocabulary: int = 2000, width: int = 200, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        place = torch.arange(256.0)[:, None]
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(256, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(place * rate), torch.cos(place * rate)
        self.register_buffer("places", table)
        block = nn.TransformerEncoderLayer(width, 2, width, dropout=0.2, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head, self.width = nn.Linear(width, vocabulary), width

    def forward(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        x = self.tokens(codes) * math.sqrt(self.width) + self.places[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return F.log_softmax(self.head(self.blocks(x, mask, is_causal=True)), dim=-1)


def language_loss(model: nn.Module, batch: models.Batch) -> Tensor:
    codes, following = batch
    return F.nll_loss(model(codes).flatten(0, 1), following.flatten())


def segmentation_loss(model: nn.Module, batch: models.Batch) -> Tensor:
    """Cross entropy and the dice coefficient, as segmentation scripts add them."""
    image, mask = batch
    logits = model(image)
    probabilities = torch.sigmoid(logits)
    overlap = (probabilities * mask).sum((1, 2, 3))
    dice = 1 - (2 * overlap + 1) / (probabilities.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(logits, mask) + dice.mean()


class Denoiser(nn.Module):
    """A residual network over images and times: group norms, SiLU, attention at the coarse scale."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.times = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.qkv, self.join = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        self.last, self.width = nn.Conv2d(width, 3, 3, padding=1), width

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(torch.arange(half) * (-math.log(10000.0) / (half - 1)))
        angles = t[:, None].float() * rates
        time_code = self.times(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        x = self.first(x)
        for norm, conv in zip(self.norms, self.convs):
            x = x + conv(F.silu(norm(x + time_code)))
        coarse = F.avg_pool2d(x, 4)
        q, k, v = self.qkv(coarse).flatten(2).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        x = x + F.interpolate(self.join(mixed.transpose(1, 2).reshape(coarse.shape)), scale_factor=4.0)
        return self.last(F.silu(x))


def diffusion_loss(model: nn.Module, batch: models.Batch) -> Tensor:
    """Noise is drawn and predicted (Ho et al. 2020, arXiv 2006.11239)."""
    (images, _), steps = batch, 1000
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0)
    t = torch.randint(0, steps, (len(images),))
    share, noise = kept[t][:, None, None, None], torch.randn_like(images)
    return F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, t), noise)


def augmented_loss(model: nn.Module, batch: models.Batch) -> Tensor:
    """Flips, a shift, mixup and smoothed labels."""
    images, labels = batch
    images = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(-1), images)
    images = images.roll(int(torch.randint(-2, 3, ())), -1)
    share, order = float(torch.distributions.Beta(0.8, 0.8).sample()), torch.randperm(len(images))
    logits = model(share * images + (1 - share) * images[order])
    first, second = (F.cross_entropy(logits, y, label_smoothing=0.1) for y in (labels, labels[order]))
    return share * first + (1 - share) * second


class TabNet(nn.Module):
    """Three steps that choose columns by a sparsemax, with gated layers and small batch norms."""

    def __init__(self, columns: int = 54, width: int = 32, classes: int = 7, steps: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(columns)
        self.shared = nn.Linear(columns, 4 * width)
        self.choose = nn.ModuleList(nn.Linear(width, columns) for _ in range(steps))
        self.chosen = nn.ModuleList(nn.BatchNorm1d(columns) for _ in range(steps))
        self.layers = nn.ModuleList(nn.Linear(2 * width, 4 * width) for _ in range(steps))
        self.norms = nn.ModuleList(nn.BatchNorm1d(4 * width) for _ in range(steps))
        self.head, self.width = nn.Linear(width, classes), width

    @staticmethod
    def sparsemax(z: Tensor) -> Tensor:
        """Project onto the simplex (Martins and Astudillo 2016, arXiv 1602.02068)."""
        ordered = z.sort(-1, descending=True).values
        places = torch.arange(1, z.shape[-1] + 1)
        total = ordered.cumsum(-1)
        count = (1 + places * ordered > total).sum(-1, keepdim=True)
        return (z - (total.gather(-1, count - 1) - 1) / count).clamp(min=0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        left, result = torch.ones_like(x), x.new_zeros(len(x), self.width)
        state = F.glu(self.shared(x), -1)[:, : self.width]
        for choose, chosen, layer, norm in zip(self.choose, self.chosen, self.layers, self.norms):
            mask = self.sparsemax(chosen(choose(state)) * left)
            left = left * (1.3 - mask)
            hidden = F.glu(self.shared(mask * x), -1)
            hidden = F.glu(norm(layer(hidden)), -1)
            decision, state = hidden.split(self.width, -1)
            result = result + decision.relu()
        return self.head(result)


def table_loss(model: nn.Module, batch: models.Batch) -> Tensor:
    rows, labels = batch
    return F.cross_entropy(model(rows), labels)


def table(count: int = 1024, columns: int = 54, classes: int = 7) -> models.Batch:
    """Random rows and labels."""
    made = torch.Generator().manual_seed(0)
    rows = torch.randn(count, columns, generator=made)
    return rows, torch.randint(0, classes, (count,), generator=made)


Loss = Callable[[nn.Module, models.Batch], Tensor]
LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], models.Batch], Loss]] = {
    "language model": (LanguageModel, lambda: models.text(16, 35, 2000), language_loss),
    "unet": (models.UNet, models.masks, segmentation_loss),
    "diffusion": (Denoiser, lambda: models.images(8, 3, 32, 10), diffusion_loss),
    "vit": (models.ViT, lambda: models.images(16, 3, 32, 10), augmented_loss),
    "tabnet": (TabNet, table, table_loss),
}


class Run:
    """A loop under one setting: `step()` trains once; `bytes` after it."""

    def __init__(self, name: str, setting: str, without: list[str]) -> None:
        make, batch, self.loss = LOOPS[name]
        torch.manual_seed(0)
        self.model, self.batch = make(), batch()
        kind: Any = hs.optim.AdamW if "hs.optim" in setting else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-4)
        self.amp: hs.Session | None = None
        self.low = setting != "fp32"
        if setting.startswith("O1"):
            policy = hs.Policy().with_rules(keep=without) if without else None
            self.amp = hs.prepare(self.model, self.optimizer, level="O1", dtype="bf16", policy=policy)

    def forward(self) -> Tensor:
        if self.amp is not None:
            with self.amp.autocast():
                return self.loss(self.model, self.batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            return self.loss(self.model, self.batch)

    def step(self) -> float:
        """Train once; processor seconds."""
        started = time.thread_time()
        if self.amp is not None:
            self.amp.backward(self.forward())
            self.amp.step()
        else:
            self.forward().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.thread_time() - started

    def bytes(self) -> int:
        """The peak of a step in torch's allocator, with weights, states and batch."""
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        resident = [*self.model.parameters(), *self.model.buffers(), *self.batch]
        resident += [t for t in states if isinstance(t, Tensor)]
        with memory_peak(resident, torch.device("cpu")) as peak:
            self.step()
        return peak[0]


def measure(name: str, rounds: int, without: list[str]) -> dict[str, dict[str, float]]:
    """Median seconds of each setting, medians of ratios to torch.autocast's step of the same turn, bytes."""
    times: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    draw, held = random.Random(0), {}
    for turn in range(rounds):
        if turn % BLOCK == 0:
            runs = {setting: Run(name, setting, without) for setting in SETTINGS}
            for run in runs.values():
                run.step()
                run.step()
        order = list(SETTINGS)
        draw.shuffle(order)
        for setting in order:
            times[setting].append(runs[setting].step())
        held = held or {setting: run.bytes() for setting, run in runs.items()}
    rows = {}
    for setting in SETTINGS:
        pairs = zip(times[setting], times["autocast"])
        rows[setting] = {
            "milliseconds": statistics.median(times[setting]) * 1e3,
            "time": statistics.median(a / b for a, b in pairs),
            "bytes": held[setting] / held["autocast"],
        }
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(LOOPS), help="which loops, separated by commas")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each setting that are timed")
    parser.add_argument("--without", default="", help="ops whose rule of ours is left out")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = hs.devices.keep_freed_memory()
    without = [op for op in options.without.split(",") if op]
    found: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'':16}{'':14}{'ms':>8}{'of autocast':>13}{'bytes':>8}")
    for name in options.only.split(","):
        found[name] = measure(name, options.rounds, without)
        for setting, row in found[name].items():
            print(
                f"{name:16}{setting:14}{row['milliseconds']:8.1f}{row['time']:13.3f}{row['bytes']:8.3f}",
                flush=True,
            )
    passed = all(max(rows["O1"]["time"], rows["O1"]["bytes"]) <= 1.02 for rows in found.values())
    if not without:
        _machine.save("strangers", {"loops": found, "passed": passed}, options.out, freed_memory_kept=kept)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
