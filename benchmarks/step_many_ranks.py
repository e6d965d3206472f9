"""What a step adds on the host of one rank of many (norm, flag, guards), under torch's fake process group.

    python benchmarks/step_many_ranks.py [--ranks 64 1024 4096] [--rounds 200] [--out FILE]

A process that believes itself rank 0 of so many; a collective returns at once. So what is measured is the
work that grows with the number of ranks: making and reading what is exchanged. Steps take turns with those
of plain tensors in a session of one rank, as large as this rank's shards (under DDP: as the whole model), and
`added_ms` is the median of the differences. `pickles` counts collectives that pickle. Writes
step_many_ranks.json; ends with 1 where a bound is passed.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _machine import save
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep as hs

BOUNDS = {64: 0.3, 1024: 0.6, 4096: 2.5}
LAYERS, WIDTH = 12, 16
WAYS = list(itertools.product(("FSDP2", "DDP"), (("O1", "fp16"), ("O2", "bf16")), (None, 1.0)))
PICKLING = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
WARM = 30


class Rank:
    """A model and its session: `way` None is plain tensors of one process."""

    def __init__(self, rows: int, level: str, dtype: str, way: str | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, rows) for _ in range(LAYERS)))
        if way == "FSDP2":
            hs.distributed.shard(self.model)
        self.parameters = list(self.model.parameters())
        optimizer = hs.optim.AdamW(self.parameters, lr=1e-3)
        group = None if way else dist.new_group([0])
        self.amp = hs.prepare(self.model, optimizer, level=level, dtype=dtype, kernels="native", group=group)
        if way == "DDP":
            self.model = nn.parallel.DistributedDataParallel(self.model)

    def step(self, clip: float | None) -> float:
        """Milliseconds of one step, its gradients given."""
        own = [getattr(p, "to_local", lambda p=p: p)() for p in self.parameters]
        self.amp.backward(torch.stack([p.float().mean() for p in own]).sum())
        start = time.perf_counter()
        self.amp.step(clip_norm=clip)
        return (time.perf_counter() - start) * 1e3


class Pickles:
    """Within, collectives that pickle are counted."""

    def __enter__(self) -> "Pickles":
        self.count, self._before = 0, {name: getattr(dist, name) for name in PICKLING}
        for name, function in self._before.items():
            setattr(dist, name, self._counted(function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            return function(*args, **options)

        return counted


def row(way: str, level: str, dtype: str, clip: float | None, rounds: int) -> dict[str, Any]:
    """What one way to train adds to a step."""
    ranks = dist.get_world_size()
    rows = {"FSDP2": ranks, "DDP": 8}[way]
    ours = Rank(rows, level, dtype, way)
    plain = Rank(rows // ranks if way == "FSDP2" else rows, level, dtype, None)
    for _ in range(WARM):
        ours.step(clip), plain.step(clip)
    times: list[tuple[float, float]] = []
    with Pickles() as pickles:
        for _ in range(rounds):
            times.append((ours.step(clip), plain.step(clip)))
    plain_ms = statistics.median(other for _, other in times)
    added_ms = statistics.median(one - other for one, other in times)
    kind = {"ranks": ranks, "way": way, "level": level, "dtype": dtype, "clip_norm": clip}
    return {**kind, "plain_ms": plain_ms, "added_ms": added_ms, "pickles": pickles.count}


def rows_of(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """All ways, in a process of their own."""
    command = [sys.executable, __file__, "--one", str(ranks), "--rounds", str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(BOUNDS))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.one)
        found = [row(way, *level, clip, given.rounds) for way, level, clip in WAYS]
        print(json.dumps(found))
        return 0
    rows = [{**one, "bound_ms": BOUNDS.get(n)} for n in given.ranks for one in rows_of(n, given.rounds)]
    for one in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in one.items()})
    save("step_many_ranks", {"rows": rows}, given.out)
    return int(any(one["pickles"] or one["added_ms"] > (one["bound_ms"] or 1e9) for one in rows))


if __name__ == "__main__":
    sys.exit(main())
