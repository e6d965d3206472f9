"""What a scale rescues, and what the arithmetic inside a product does to training; plain numbers, no drawing.

The language model is an LSTM over words, as the paper's bigLSTM is: its softmax spreads each token's gradient
over the whole vocabulary, so that averaged over a large batch most of it lies below fp16's smallest number.
"""

import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.recipes.data import digits

VOCABULARY, WINDOW, ROWS = 4096, 32, 32
MICRO_BATCHES = 512
"""Half a million tokens a step, as language models are trained: each micro-batch's loss is divided by it."""

RESCUES: dict[str, dict[str, Any]] = {
    "fp32": {"level": "O0"},
    "mixed, scale 1": {"level": "O2", "dtype": "fp16", "loss_scale": 1.0},
    "mixed, scale 8": {"level": "O2", "dtype": "fp16", "loss_scale": 8.0},
    "mixed, scale 128": {"level": "O2", "dtype": "fp16", "loss_scale": 128.0},
    "mixed, dynamic scale": {"level": "O2", "dtype": "fp16", "loss_scale": "dynamic"},
}


class WordModel(nn.Module):
    """Words to the next word: embedding, one LSTM, a projection onto the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.lstm = nn.LSTM(64, 96, batch_first=True)
        self.read = nn.Linear(96, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        """[N, T] to [N, T, VOCABULARY]."""
        return self.read(self.lstm(self.embed(words))[0])


def words_of_python(characters: int = 3_000_000) -> Tensor:
    """Python's own source as word numbers, the commonest first; 0 stands for rarer words."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(p.read_text(encoding="utf-8", errors="replace") for p in sorted(folder.glob("*.py")))
    words = re.findall(r"\w+|[^\w\s]|\n", text[:characters])
    number = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), start=1)}
    return torch.tensor([number.get(word, 0) for word in words])


def language_model(setting: str, steps: int) -> dict[str, Any]:
    """The losses of one training, and the share of logit gradients that fp16 makes zero at its scale."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(0)
    words = words_of_python()
    model = WordModel()
    # An epsilon below the gradients of a batch so large; the same in every setting.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-12)
    amp = hs.prepare(model, optimizer, **RESCUES[setting], max_skips=10_000)
    losses, flushed = [], []
    for _ in range(steps):
        at = torch.randint(len(words) - WINDOW - 1, (ROWS, 1), generator=drawn) + torch.arange(WINDOW)
        with amp.autocast():
            logits = model(words[at])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), words[at + 1].flatten())
        caught = []
        logits.register_hook(caught.append)
        amp.backward(loss / MICRO_BATCHES)
        if caught:
            stored = caught[0].half()
            flushed.append(float((stored == 0).sum() / stored.numel()))
        amp.step()
        losses.append(loss.item())
    return {"losses": losses, "flushed": float(np.mean(flushed)), "final": float(np.mean(losses[-8:]))}


def summed_in_fp16(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with a running sum in fp16, one term at a time, as a multiplier without a wide accumulator."""
    a, b = a.half(), b.half()
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
    for k in range(a.shape[1]):
        total = (total.float() + a[:, k : k + 1].float() * b[k : k + 1].float()).half()
    return total


def summed_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """The same of the same fp16 inputs with an fp32 sum, rounded once."""
    return (a.half().float() @ b.half().float()).half()


SUMS = {"fp32 sums": summed_in_fp32, "fp16 sums": summed_in_fp16}


class _Product(torch.autograd.Function):
    """x @ w.T whose forward and both gradients sum by one of `SUMS`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sums: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = SUMS[sums]
        return ctx.sums(x, weight.T).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return ctx.sums(grad, weight).float(), ctx.sums(grad.T, x).float(), None


def train_with_sums(sums: str, steps: int, batch: int = 64, scale: float = 1024.0) -> dict[str, Any]:
    """A digit classifier (784-64-10) whose products sum by `sums`, fp32 masters and a constant scale."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = digits()
    x, test = data.train_x.flatten(1) / 255, data.test_x.flatten(1) / 255
    first, second = (nn.Parameter(torch.randn(n, k) * k**-0.5) for n, k in ((64, 784), (10, 64)))
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)

    def logits(images: Tensor) -> Tensor:
        hidden = _Product.apply(images, first, sums)
        return _Product.apply(torch.relu(hidden), second, sums)

    drawn, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        at = torch.randint(len(x), (batch,), generator=drawn)
        loss = F.cross_entropy(logits(x[at]), data.train_y[at])
        optimizer.zero_grad()
        (loss * scale).backward()
        for p in (first, second):
            p.grad.div_(scale)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        right = (logits(test).argmax(1) == data.test_y).float().mean()
    return {"losses": losses, "accuracy": 100 * float(right)}


def native_and_pseudo(steps: int) -> dict[str, Any]:
    """A digit classifier by the machine's own fp16 kernels, and by fp32 kernels on rounded values."""
    torch.set_num_threads(1)
    data = digits()
    x, y = data.train_x.flatten(1) / 255, data.train_y
    curves = {}
    for kernels in ("native", "rounded"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        amp = hs.prepare(model, optimizer, level="O2", dtype="fp16", kernels=kernels)
        drawn, losses = torch.Generator().manual_seed(0), []
        for _ in range(steps):
            at = torch.randint(len(x), (64,), generator=drawn)
            with amp.autocast():
                loss = F.cross_entropy(model(x[at]), y[at])
            amp.backward(loss)
            amp.step()
            losses.append(loss.item())
        curves[kernels] = losses
    apart = np.abs(np.subtract(curves["native"], curves["rounded"]))
    return {"curves": curves, "largest": float(apart.max()), "at the end": float(apart[-10:].mean())}


def smooth(losses: Sequence[float], points: int = 32) -> list[tuple[int, float]]:
    """Means over equal stretches, at the step where each ends."""
    edges = np.linspace(0, len(losses), min(points, len(losses)) + 1).astype(int)
    return [(int(b), float(np.mean(losses[a:b]))) for a, b in pairwise(edges) if b > a]
