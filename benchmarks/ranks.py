"""A training step over two gloo ranks beside torch's own with fused AdamW, DDP and fully_shard, two sizes.

    python benchmarks/ranks.py [--rounds 30] [--out FILE]

Each rank is a process with one thread. The model is a transformer (blocks, width): small 2 x 128, middle
4 x 768. torch's side is its usual recipe: fp32 weights with `torch.autocast` under DDP, `fully_shard` with
`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`; ours has the same at O1 (`param_dtype` too), and O2. Whole
steps (forward, backward, update) take turns, both ranks starting together; `ratio` is the median over
neighbours, ours to torch's. "own" is a session with torch's optimizer. Writes ranks.json; ends with 1 where a
bound is passed.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _machine import save
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs

SIZES = {"small": (2, 128, 8), "middle": (4, 768, 2)}
BOUNDS = {
    ("DDP", "O1", "ours"): {"small": 0.9, "middle": 0.9},
    ("DDP", "O2", "ours"): {"middle": 0.65},
    ("FSDP2", "O1", "ours"): {"small": 0.9, "middle": 0.9},
    ("FSDP2", "O2", "ours"): {"middle": 0.75},
    ("DDP", "O1", "own"): {"small": 1.1, "middle": 1.1},
    ("FSDP2", "O1", "own"): {"small": 1.1, "middle": 1.1},
}
LENGTH, WARM = 32, 6


def net(size: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks, width, _ = SIZES[size]
    layer = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(width, **layer, norm_first=True) for _ in range(blocks))
    )


class Torchs:
    """torch's recipe."""

    def __init__(self, size: str, way: str) -> None:
        model = net(size)
        if way == "FSDP2":
            hs.distributed.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        self.region: Any = contextlib.nullcontext
        if way == "DDP":
            self.region = lambda: torch.autocast("cpu", torch.bfloat16)
        self.model: nn.Module = DDP(model) if way == "DDP" else model
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(self, x: Tensor) -> None:
        """Forward, backward, update."""
        with self.region():
            loss = self.model(x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ours:
    """A session, with an optimizer of ours or torch's."""

    def __init__(self, size: str, way: str, level: str, owner: str) -> None:
        model = net(size)
        if way == "FSDP2":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if level == "O1" else None
            hs.distributed.shard(model, **({"mp_policy": policy} if policy else {}))
        if owner == "ours":
            optimizer: torch.optim.Optimizer = hs.optim.AdamW(model.parameters())
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.amp = hs.prepare(model, optimizer, level=level, dtype="bf16")
        self.model: nn.Module = DDP(model) if way == "DDP" else model

    def step(self, x: Tensor) -> None:
        """Forward, backward, update."""
        with self.amp.autocast():
            loss = self.model(x).float().square().mean()
        self.amp.backward(loss)
        self.amp.step()


def seconds(side: Any, x: Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    side.step(x)
    return time.perf_counter() - start


def row(size: str, way: str, level: str, owner: str, rounds: int) -> dict[str, Any]:
    """One comparison, on this rank."""
    sides = Ours(size, way, level, owner), Torchs(size, way)
    _, width, batch = SIZES[size]
    x = torch.randn(batch, LENGTH, width)
    times: list[tuple[float, float]] = []
    for turn in range(rounds + WARM):
        order = (0, 1) if turn % 2 else (1, 0)
        found = {side: seconds(sides[side], x) for side in order}
        times.append((found[0], found[1]))
    ours, torchs = zip(*times[WARM:])
    ratio = statistics.median(a / b for a, b in times[WARM:])
    kind = {"size": size, "way": way, "level": level, "optimizer": owner}
    own_ms, torch_ms = statistics.median(ours) * 1e3, statistics.median(torchs) * 1e3
    bound = BOUNDS[way, level, owner].get(size)
    return {**kind, "ours_ms": own_ms, "torch_ms": torch_ms, "ratio": ratio, "bound": bound}


def one_rank(rank: int, meet: str, rounds: int) -> None:
    """Run all comparisons; rank 0 prints them."""
    hs.devices.keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    rows = [row(size, *kind, rounds) for size in SIZES for kind in BOUNDS]
    if rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank is not None:
        one_rank(given.rank, given.meet, given.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--meet", f"{folder}/meet", "--rounds", str(given.rounds)]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        printed = [process.communicate()[0] for process in ranks]
    rows = json.loads(printed[0].splitlines()[-1])
    for one in rows:
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in one.items()})
    save("ranks", {"rows": rows}, given.out, ranks=2)
    return int(any(one["bound"] and one["ratio"] > one["bound"] for one in rows))


if __name__ == "__main__":
    sys.exit(main())
