"""The tasks the tables are re-created on, each trained by one function at one precision and one seed.

`fp32` is level O0; `mixed` is the paper's recipe: fp16 weights and arithmetic with fp32 masters (level O2),
with a dynamic loss scale or with none; `fp16 weights` is level O3: no masters, with a dynamic scale.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.recipes import RECIPES

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from detection.data import load
from detection.metrics import mean_average_precision
from detection.model import Detector, detection_loss, detections

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"level": "O0"},
    "mixed, no scale": {"level": "O2", "dtype": "fp16", "loss_scale": "none", "skip_nonfinite": True},
    "mixed, dynamic scale": {"level": "O2", "dtype": "fp16", "loss_scale": "dynamic"},
    "fp16 weights, no masters": {"level": "O3", "dtype": "fp16", "loss_scale": "dynamic"},
}


@dataclass(frozen=True)
class Task:
    """A name, what its score is, whether more is better, and how to train it."""

    name: str
    score: str
    more_is_better: bool
    run: "Callable[[str, int, float], Run]"
    nothing: float
    """The score of a model that has learned nothing."""
    paper: str = ""
    """What the paper reports of its like: fp32, mixed; and where."""


@dataclass
class Run:
    """One training: the loss at each step, steps skipped, and the score on held-out data."""

    losses: list[float]
    skipped: int
    score: float
    shown: Any = None


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    setting: str,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> tuple[hs.Session, list[float]]:
    amp = hs.prepare(model, optimizer, **SETTINGS[setting], max_skips=10_000)
    losses = []
    for x, y in batches:
        with amp.autocast():
            loss = loss_of(model(x), y)
        amp.backward(loss)
        amp.step()
        losses.append(loss.item())
    return amp, losses


def take(steps: int, loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `steps` batches, over as many passes of the loader as that needs."""
    passes = chain.from_iterable(iter(lambda: loader, None))
    return islice(passes, steps)


def recipe(name: str) -> Callable[[str, int, float], Run]:
    """Train one of halfstep's recipes; `effort` scales the number of steps."""

    def run(setting: str, seed: int, effort: float) -> Run:
        chosen = RECIPES[name]
        steps = max(2, int(chosen.demo_steps * effort))
        task = chosen.task()
        model, optimizer = chosen.build(seed, SETTINGS[setting]["level"])
        batches = take(steps, task.train(seed))
        amp, losses = _train(model, optimizer, setting, batches, chosen.loss)
        with amp.evaluating():
            outputs = [(model(x), y) for x, y in task.test]
        if chosen.metric == "accuracy":
            right = sum(float((out.argmax(-1) == y).sum()) for out, y in outputs)
            score = 100 * right / sum(len(y) for _, y in outputs)
        else:
            score = float(np.mean([float(chosen.loss(out, y)) for out, y in outputs]))
        return Run(losses, amp.skips.total, score)

    return run


def detector(setting: str, seed: int, effort: float) -> Run:
    """The digit detector of examples/detect.py, small; the score is mAP at 0.5 in per cent."""
    torch.manual_seed(seed)
    training, held_out = load("digits", 48, max(64, int(1024 * effort)))
    model = Detector(10, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = np.random.default_rng(seed)
    epochs = max(1, int(6 * effort))
    indices = (
        i for _ in range(epochs) for i in np.split(order.permutation(len(training)), len(training) // 32)
    )
    batches = (training.batch(i) for i in indices)
    amp, losses = _train(model, optimizer, setting, batches, lambda out, y: detection_loss(out, y)[0])
    with amp.evaluating():
        found = detections(model(held_out.pixels))
    truth = [torch.from_numpy(rows) for rows in held_out.labels]
    score = 100 * mean_average_precision(found, truth, 10)
    best = found[0][found[0][:, 0].argsort(descending=True)[:6]]
    shown = {
        "image": held_out.pixels[0].mean(0).clamp(0, 1).mul(255).round().int().tolist(),
        "boxes": [[round(float(v), 4) for v in row[:6]] for row in best],
    }
    return Run(losses, amp.skips.total, score, shown)


def dense_detector(setting: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The detector with its loss averaged over the pixels, as dense losses are: its losses and mAP."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    side = 48
    training, held_out = load("digits", side, 1024)
    model = Detector(10, 16)
    # An epsilon below gradients so small; the same in every setting.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-12)
    amp = hs.prepare(model, optimizer, **setting, max_skips=10_000)
    order, losses = np.random.default_rng(0), []
    for _ in range(steps):
        x, y = training.batch(order.integers(len(training), size=32))
        with amp.autocast():
            loss = detection_loss(model(x), y)[0]
        amp.backward(loss / side**2)
        amp.step()
        losses.append(loss.item())
    with amp.evaluating():
        found = detections(model(held_out.pixels))
    truth = [torch.from_numpy(rows) for rows in held_out.labels]
    return {"losses": losses, "score": 100 * mean_average_precision(found, truth, 10)}


class _Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (32, 1, 1)),
            nn.ConvTranspose2d(32, 64, 4, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 1, 4, 2, 1),
            nn.Sigmoid(),
        )


def gan(setting: str, seed: int, effort: float) -> Run:
    """A small DCGAN on the 8x8 digits.

    The score is the distance between generated and real digits: the absolute difference of mean pixel values
    plus that of standard deviations, averaged over pixels (0 is best).
    """
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    real = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    make = _Generator()
    judge = nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64, 1),
    )
    of_make = torch.optim.Adam(make.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=5e-4, betas=(0.5, 0.999))
    amp = hs.prepare([make, judge], [of_make, of_judge], **SETTINGS[setting], max_skips=10_000)
    losses = []
    for _ in range(max(2, int(500 * effort))):
        batch = real[torch.randint(len(real), (64,))]
        with amp.autocast():
            fake = make(torch.randn(64, 32))
            wrong = _bce(judge(batch), 0.9) + _bce(judge(fake.detach()), 0.0)
        amp.backward(wrong, of_judge)
        amp.step(of_judge)
        with amp.autocast():
            fooled = _bce(judge(fake), 1.0)
        amp.backward(fooled, of_make)
        amp.step(of_make)
        of_judge.zero_grad()
        losses.append(wrong.item())
    with amp.evaluating():
        drawn = make(torch.randn(1000, 32))
    score = (drawn.mean(0) - real.mean(0)).abs().mean() + (drawn.std(0) - real.std(0)).abs().mean()
    return Run(losses, amp.skips.total, score.item(), drawn[:12, 0].float().tolist())


def _bce(logits: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


TASKS = (
    Task(
        "classification (digits-cnn)",
        "accuracy %",
        True,
        recipe("digits-cnn"),
        10.0,
        "ResNet-50 75.92, 76.04 (table 1)",
    ),
    Task(
        "classification (digits-mlp)",
        "accuracy %",
        True,
        recipe("digits-mlp"),
        10.0,
        "AlexNet 56.77, 56.93 (table 1)",
    ),
    Task(
        "language modelling (text-gpt)",
        "test loss",
        False,
        recipe("text-gpt"),
        math.log(128),
        "bigLSTM: equal curves with scale 128 (figure 5)",
    ),
    Task(
        "detection (digits on photographs)",
        "mAP@0.5 %",
        True,
        detector,
        0.0,
        "SSD 76.9, diverges without a scale, 77.1 with 8 (table 2)",
    ),
    Task("generation (DCGAN)", "distance", False, gan, 0.5, "DCGAN: pictures alike (figure 6)"),
    Task("faint gradients (digits-faint)", "test loss", False, recipe("digits-faint"), 9.3e-4, "none"),
)
