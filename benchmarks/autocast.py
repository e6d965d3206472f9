"""Cost of autocast regions beside torch.autocast: one thread, interleaved, medians; writes
autocast.json.

`torch.autocast` is timed with our kernels out of the dispatcher (`regions.release`), so that it pays nothing
for our presence. A single linear layer is compared with the faster of torch's 16-bit kernel and fp32: where
the first is hopeless (fp16 on most CPUs), a share of it would say nothing.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _machine import save
from torch import nn

from halfstep.casting import autocast, frozen_weights, regions

Step = Callable[[], object]


def one_op(op: Step, dtype: torch.dtype, inner: int = 2000) -> tuple[Step, Step]:
    """`inner` runs of an op in one region, ours and torch's."""

    def ours() -> None:
        with autocast("cpu", dtype):
            for _ in range(inner):
                op()

    def theirs() -> None:
        with torch.autocast("cpu", dtype):
            for _ in range(inner):
                op()

    return ours, theirs


def training(model: nn.Module, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> tuple[Step, Step]:
    """Forward, loss and backward, in our region and in torch's."""

    def run(region: Callable[..., Any]) -> None:
        with region("cpu", dtype):
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        loss.backward()
        model.zero_grad()

    return (
        lambda: run(autocast),
        lambda: run(torch.autocast),
    )


def one_linear(dtype: torch.dtype) -> tuple[Step, Step, Step]:
    """One linear layer, its input needing a gradient too: ours, torch's in 16 bits, and fp32."""
    layer, x = nn.Linear(512, 512), torch.randn(768, 512, requires_grad=True)
    wide = torch.randn(768, 512)
    grad = wide.to(dtype)

    def run(region: Callable[..., Any]) -> None:
        with region("cpu", dtype):
            out = layer(x)
        out.backward(grad)
        layer.zero_grad()
        x.grad = None

    def in_full() -> None:
        layer(x).backward(wide)
        layer.zero_grad()
        x.grad = None

    return lambda: run(autocast), lambda: run(torch.autocast), in_full


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Recurrent(nn.Module):
    """A GRU cell unrolled over time: the same weights at every step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1], x.shape[2])
        for step in x:
            h = self.cell(step, h)
        return self.head(h)


def models() -> dict[str, tuple[nn.Module, torch.Tensor, torch.Tensor]]:
    """Networks of the sizes the recipes have."""
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    cnn = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1568, 10),
    )  # fmt: skip
    gpt = nn.Sequential(
        nn.Embedding(96, 128), *(Block(128, 4) for _ in range(4)), nn.LayerNorm(128), nn.Linear(128, 96)
    )
    digits = torch.randint(0, 10, (64,))
    tokens = torch.randint(0, 96, (16, 64))
    return {
        "mlp 784-512-512-10, batch 64": (mlp, torch.randn(64, 784), digits),
        "cnn 28x28, batch 64": (cnn, torch.randn(64, 1, 28, 28), digits),
        "gpt 4x128, batch 16x64": (gpt, tokens, tokens),
    }


def measure(pairs: int) -> dict[str, dict[str, float]]:
    """Every row of the table."""
    found: dict[str, dict[str, float]] = {}
    small, weight = torch.randn(8), torch.randn(8, 8)
    rows = torch.randn(4, 8)
    for name, op in {
        "untouched op (sin, 8 elements)": lambda: torch.sin(small),
        "untouched op (add, 8 elements)": lambda: torch.add(small, small),
        "low op (linear 4x8x8)": lambda: F.linear(rows, weight),
        "op fp32 here, native there (exp, 8 elements)": lambda: torch.exp(small),
    }.items():
        got = compare(*one_op(op, torch.bfloat16), pairs, 1)
        found[name] = {k: v if k == "ratio" else round(v / 2000, 4) for k, v in got.items()}
    nothing = one_op(lambda: None, torch.bfloat16, 0)
    found["enter and leave"] = compare(*nothing, pairs, 2000)
    for name, (model, x, y) in models().items():
        found[f"bf16 step, {name}"] = compare(*training(model, x, y, torch.bfloat16), 5 * pairs, 1)
    for dtype, turns in ((torch.float16, pairs), (torch.bfloat16, 5 * pairs)):
        name = f"{str(dtype)[6:]} linear 768x512x512, forward and backward"
        found[name] = against_the_faster(*one_linear(dtype), turns)
    found["bf16 GRU cell 256, 32 steps, frozen_weights"] = recurrent(pairs)
    return found


def against_the_faster(ours: Step, low: Step, full: Step, pairs: int) -> dict[str, float]:
    """Beside both of torch's ways; `ratio` is to the faster."""
    beside = compare(ours, low, pairs, 1), compare(ours, full, pairs, 1)
    best = max(beside, key=lambda row: row["ratio"])
    return best | {"torch_16_bit_us": beside[0]["torch_us"], "torch_fp32_us": beside[1]["torch_us"]}


def recurrent(pairs: int) -> dict[str, float]:
    """A recurrent cell whose weights are cast once, beside torch's weight cache."""
    model, x, y = Recurrent(256), torch.randn(32, 16, 256), torch.randint(0, 10, (16,))
    ours, theirs = training(model, x, y, torch.bfloat16)

    def frozen() -> None:
        with frozen_weights(model):
            ours()

    return compare(frozen, theirs, pairs, 3)


def compare(ours: Step, theirs: Step, pairs: int, inner: int) -> dict[str, float]:
    """Medians in microseconds of two steps timed in turn, and the median of their ratios.

    Our kernels are taken out before each of torch's turns and registered again before each of ours, untimed.
    """
    mine: list[float] = []
    peer: list[float] = []
    for _ in range(pairs):
        for step, times in ((ours, mine), (theirs, peer)):
            if step is theirs:
                regions.release()
            step()
            start = time.thread_time()
            for _ in range(inner):
                step()
            times.append((time.thread_time() - start) / inner * 1e6)
    return {
        "halfstep_us": round(statistics.median(mine), 3),
        "torch_us": round(statistics.median(peer), 3),
        "difference_us": round(statistics.median(mine) - statistics.median(peer), 3),
        "ratio": round(statistics.median(a / b for a, b in zip(mine, peer)), 4),
    }


def main() -> None:
    """Measure, print one line per row, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = measure(options.pairs)
    for name, row in found.items():
        print(f"{name:52} {row['halfstep_us']:12.3f} us {row['torch_us']:12.3f} us  x{row['ratio']:.3f}")
    clock = "thread CPU time, medians of interleaved pairs"
    save("autocast", {"rows": found}, options.out, clock=clock, pairs=options.pairs)


if __name__ == "__main__":
    main()
