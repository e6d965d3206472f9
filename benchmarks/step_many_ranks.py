"""What a step adds on the host of one rank of many (norm, flag, guards), under torch's fake process group.

    python benchmarks/step_many_ranks.py [--ranks 64 1024 4096] [--rounds 200] [--out FILE]

A process that believes itself rank 0 of so many: what is measured is the work on the host, making and reading
what is exchanged. Steps take turns with those of a session of one rank, whose shards are as large (under DDP:
of the model unwrapped). `added_ms` is the median of the differences, and what the look for gradients of other
parameters takes, which both do; without the time inside collectives (`fake_ms`: the fake group copies for
every rank, one after the other). `pickles` counts collectives that pickle. Writes step_many_ranks.json; ends
with 1 where a bound is passed.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep as hs

BOUNDS = {64: 0.3, 1024: 0.6, 4096: 2.5}
LAYERS, WIDTH = 12, 16
WAYS = list(itertools.product(("FSDP2", "DDP"), (("O1", "fp16"), ("O2", "bf16")), (None, 1.0)))
PICKLING = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
SENDING = ("all_gather_into_tensor", "all_gather_single", "all_reduce", "all_gather", "broadcast")
WARM = 30


class Rank:
    """A model and its session, of all ranks or `alone`."""

    def __init__(self, way: str, level: str, dtype: str, alone: bool) -> None:
        torch.manual_seed(0)
        rows = dist.get_world_size() if way == "FSDP2" and not alone else 1
        self.model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, rows) for _ in range(LAYERS)))
        if way == "FSDP2":
            hs.distributed.shard(self.model, mesh=DeviceMesh("cpu", [0]) if alone else None)
        self.parameters = list(self.model.parameters())
        self.same = hs.distributed.SameGradients()
        optimizer = hs.optim.AdamW(self.parameters, lr=1e-3)
        group = dist.new_group([0]) if alone else None
        self.amp = hs.prepare(self.model, optimizer, level=level, dtype=dtype, kernels="native", group=group)
        if way == "DDP" and not alone:
            self.model = nn.parallel.DistributedDataParallel(self.model)

    def step(self, clip: float | None, seen: "Collectives") -> tuple[float, float]:
        """Milliseconds of one step, its gradients given, outside and inside of collectives."""
        own = [getattr(p, "to_local", lambda p=p: p)() for p in self.parameters]
        self.amp.backward(torch.stack([p.float().mean() for p in own]).sum())
        before, start = seen.seconds, time.perf_counter()
        self.amp.step(clip_norm=clip)
        whole, inside = time.perf_counter() - start, seen.seconds - before
        return (whole - inside) * 1e3, inside * 1e3

    def look(self) -> float:
        """Milliseconds of the look whether all ranks have gradients of the same parameters."""
        start = time.perf_counter()
        self.same.check(self.parameters, str)
        return (time.perf_counter() - start) * 1e3


class Collectives:
    """Within, the time of collectives is added up, and those that pickle are counted."""

    def __enter__(self) -> "Collectives":
        self.seconds, self.pickles = 0.0, 0
        names = [name for name in (*SENDING, *PICKLING) if hasattr(dist, name)]
        self._before = {name: getattr(dist, name) for name in names}
        for name in names:
            setattr(dist, name, self._timed(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def _timed(self, name: str) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            self.pickles += name in PICKLING
            start = time.perf_counter()
            result = self._before[name](*args, **options)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def row(way: str, level: str, dtype: str, clip: float | None, rounds: int) -> dict[str, Any]:
    """What one way to train adds to a step."""
    ours, alone = (Rank(way, level, dtype, one) for one in (False, True))
    with Collectives() as warm:
        for _ in range(WARM):
            ours.step(clip, warm), alone.step(clip, warm)
    with Collectives() as seen:
        times = [(*ours.step(clip, seen), alone.step(clip, seen)[0], ours.look()) for _ in range(rounds)]
    look_ms = statistics.median(look for *_, look in times) if way == "FSDP2" else 0.0
    found = {
        "alone_ms": statistics.median(other for _, _, other, _ in times),
        "added_ms": statistics.median(own - other for own, _, other, _ in times) + look_ms,
        "fake_ms": statistics.median(inside for _, inside, _, _ in times),
        "pickles": seen.pickles,
    }
    return {
        "ranks": dist.get_world_size(),
        "way": way,
        "level": level,
        "dtype": dtype,
        "clip_norm": clip,
        **found,
    }


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
