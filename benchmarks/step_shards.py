"""A step on shards against the same step on plain tensors, in one process: what the sharding itself costs.

The mesh has one rank, so nothing is sent: both steps do the same arithmetic, and the ratio is the bookkeeping
of DTensors. Small: 400 parameters of 200 layers, 32 wide; large: 8 parameters of 16 million elements in all.
Steps of the two models take turns; ratios are of neighbours, and their medians are kept. Both models are
built several times, for where their memory happens to lie decides more than the bookkeeping does. A step is
what torch calls one, without the dropping of gradients; `ratio_with_drop` counts that in: a shard's gradient
is two objects of Python, made by torch in backward, where a plain one is none. Freed memory is kept: here all
gradients of the sharded model lie in one buffer of 32 MiB, which the C library else gives back to the system
where a step drops them (4 % of it; one group for each block avoids that as well).
Beside it torch's own (`torch`): fused AdamW over fp32 weights, sharded and not.
Writes step_shards.json.

    python benchmarks/step_shards.py [--rounds 14] [--out FILE]
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _machine import save
from torch import nn

import halfstep as hs

MODELS = {"small": (200, 32), "large": (4, 2048)}
BUILDS = {"small": 12, "large": 4}
WARM = 25  # as long a session watches gradients for changes made past it
STEPS = (("fp32", None), ("fp32", 1.0), ("8bit", None), ("8bit", 1.0), ("torch", None))
BOUNDS = {"small": 1.10, "large": 1.02}


def build(layers: int, width: int, state_dtype: str, sharded: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if sharded:
        hs.distributed.shard(model, blocks=[])
    if state_dtype == "torch":
        return model, TorchsOwn(model)
    optimizer = hs.optim.AdamW(model.parameters(), lr=1e-3, state_dtype=state_dtype)
    return model, hs.prepare(model, optimizer, level="O2", dtype="bf16")


class TorchsOwn:
    """torch's fused AdamW behind the methods of a session."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = [torch.optim.AdamW(model.parameters(), fused=True)]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """fp32."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """As it is."""
        loss.backward()

    def step(self, clip_norm: float | None, zero_grad: bool) -> None:
        """Update."""
        self.optimizers[0].step()


def seconds(model: nn.Module, amp: Any, clip: float | None) -> tuple[float, float]:
    """Processor time of one step, and of it and the dropping of gradients."""
    with amp.autocast():
        loss = model(torch.ones(1, next(model.parameters()).shape[1])).square().mean()
    amp.backward(loss)
    start = time.process_time()
    amp.step(clip_norm=clip, zero_grad=False)
    stepped = time.process_time()
    amp.optimizers[0].zero_grad()
    return stepped - start, time.process_time() - start


def turns(
    size: str, state_dtype: str, clip: float | None, rounds: int, sharded_first: bool
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """`seconds` (sharded, plain) of two new models; the second finds other caches, so they change places."""
    made = {k: build(*MODELS[size], state_dtype, k) for k in (sharded_first, not sharded_first)}
    found: list[dict[bool, tuple[float, float]]] = []
    for turn in range(rounds + WARM):
        order = (True, False) if turn % 2 else (False, True)
        found.append({k: seconds(*made[k], clip) for k in order})
    return [(one[True], one[False]) for one in found[WARM:]]


def compare(size: str, state_dtype: str, clip: float | None, rounds: int) -> dict[str, Any]:
    builds = range(BUILDS[size])
    times = [pair for turn in builds for pair in turns(size, state_dtype, clip, rounds, turn % 2 == 0)]
    ratio, with_drop = (statistics.median(ours[k] / plain[k] for ours, plain in times) for k in range(2))
    sharded, plain = (statistics.median(step for step, _ in column) * 1e3 for column in zip(*times))
    row = {"size": size, "state_dtype": state_dtype, "clip_norm": clip, "plain_ms": plain}
    bound = None if state_dtype == "torch" else BOUNDS[size]
    return {**row, "sharded_ms": sharded, "ratio": ratio, "ratio_with_drop": with_drop, "bound": bound}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hs.devices.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        rows = []
        for size, (state_dtype, clip) in itertools.product(MODELS, STEPS):
            rows.append(compare(size, state_dtype, clip, given.rounds))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
        dist.destroy_process_group()
    save("step_shards", {"rows": rows}, given.out)
    return int(any(row["bound"] and row["ratio"] > row["bound"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
