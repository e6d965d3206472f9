"""A training step that arithmetic dominates, ours at O2 beside torch.autocast's (step_compute_bound.json).

text-gpt (batch 16, AdamW) and a ResNet-18 for 32x32 images (batch 8, SGD with momentum), bf16, one thread,
one step of each in turn, in changing order, with the allocator keeping freed memory for both. torch: fp32
weights under torch.autocast, its fused optimizer. Ours: `prepare(level="O2")` around hs.optim's of the same
kind and arguments. The value of a row is the median over pairs of ratios of processor time. Target: 0.97 in
the geometric mean of text-gpt and the ResNet in the memory format in which torch is faster.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _machine import save
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.casting import regions
from halfstep.recipes import RECIPES

Step = Callable[[], object]
TARGET = 0.97


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to their input (He et al. 2016, arXiv 1512.03385)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 32x32 images: a 3x3 stem without pooling, four stages of two blocks, 11.2M weights."""
    stages: list[nn.Module] = []
    inside = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        stages += [BasicBlock(inside, outside, stride), BasicBlock(outside, outside, 1)]
        inside = outside
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


@dataclass(frozen=True)
class Case:
    """What both sides train: `optimizer` and `options` name the class in torch.optim and in hs.optim."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: str
    options: dict[str, Any]


def text_gpt() -> Case:
    recipe = RECIPES["text-gpt"]
    return Case(
        "text-gpt, batch 16",
        lambda: recipe.build(0)[0],
        lambda: next(iter(recipe.task().train(0))),
        recipe.loss,
        "AdamW",
        {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
    )


def resnet(memory_format: torch.memory_format, batch: int = 8) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return resnet18().to(memory_format=memory_format)

    def images() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, 3, 32, 32, generator=generator).to(memory_format=memory_format)
        return x, torch.randint(0, 10, (batch,), generator=generator)

    shown = str(memory_format).removeprefix("torch.").removesuffix("_format")
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
    return Case(f"resnet-18, batch {batch}, {shown}", build, images, F.cross_entropy, "SGD", options)


def our_step(case: Case) -> Step:
    model, (x, y) = case.build(), case.batch()
    optimizer = getattr(hs.optim, case.optimizer)(model.parameters(), **case.options)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")

    def step() -> None:
        with amp.autocast():
            loss = case.loss(model(x), y)
        amp.backward(loss)
        amp.step()

    return step


def torch_step(case: Case) -> Step:
    model, (x, y) = case.build(), case.batch()
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), fused=True, **case.options)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = case.loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def compare(case: Case, pairs: int) -> dict[str, Any]:
    """One row: medians over `pairs` pairs, ours first in every second one."""
    ours, peer = our_step(case), torch_step(case)
    for step in (ours, peer, ours, peer):
        step()
    found: list[tuple[float, float]] = []
    for turn in range(pairs):
        if turn % 2:
            mine = seconds(ours)
        regions.release()  # the peer runs without our kernels in the dispatcher
        theirs = seconds(peer)
        with hs.autocast("cpu", "bf16"):
            pass  # puts them back, outside of what is timed
        if not turn % 2:
            mine = seconds(ours)
        found.append((mine, theirs))
    mine, theirs = (statistics.median(side) * 1e3 for side in zip(*found))
    share = statistics.median(a / b for a, b in found)
    return {"name": case.name, "share": share, "ours_ms": mine, "torch_ms": theirs, "pairs": pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = hs.devices.keep_freed_memory()
    cases = [text_gpt(), resnet(torch.contiguous_format), resnet(torch.channels_last)]
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(compare(case, arguments.pairs))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    gpt, *images = rows
    net = min(images, key=lambda row: row["torch_ms"])
    mean = math.sqrt(gpt["share"] * net["share"])
    print(f"geometric mean {mean:.3f} (target {TARGET})")
    report = {
        "geometric_mean": mean,
        "target": TARGET,
        "passed": mean <= TARGET,
        "results": rows,
    }
    save("step_compute_bound", report, arguments.out, freed_memory_kept=kept)
    return 0 if mean <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
