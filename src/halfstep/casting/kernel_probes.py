"""What this machine's kernels take: small fixed probes, run at first need, remembered in memory and on disk.

A probe makes tensors of its own, in a thread of its own, so that nothing of the caller (data, random state,
autocast regions, dispatch modes, fake tensors) is seen or touched.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfstep import devices
from halfstep.casting.kernel_choice import IMPLEMENTATIONS, NEEDS, KernelTable, Row, Times
from halfstep.casting.kernel_race import HOPELESS, Call, race, read_scheduler_wait
from halfstep.casting.kinds import KINDS
from halfstep.casting.kinds.kind import NATIVE, SIZES, Choice, OpClass, sizes, values_of
from halfstep.casting.kinds.products import Linear
from halfstep.devices.capabilities import read_rows, write_rows
from halfstep.formats import dtype_name, parse_dtype

#: Lost by so much at one size, a way is not tried at larger ones.
HOPELESS_AT_ANY_SIZE = 25.0
#: What a choice for a small product may take of native's time in a layer.
PAYS = 0.9
#: Goes up where a probe changes what it measures: times of other probes are then not read.
_PROBES_VERSION = 3

Region = Callable[..., AbstractContextManager[Any]]
"""autocast, or something called like it."""


def all_classes(dtype: str, threads: int) -> tuple[OpClass, ...]:
    """Return every class there is of one dtype."""
    return tuple(
        OpClass(op, dtype, geometry, size, threads)
        for op, kind in KINDS.items()
        for geometry in kind.geometries
        for size in sizes(geometry)
    )


def whole_table(table: KernelTable, dtype: torch.dtype, seconds: float = math.inf) -> tuple[Row, ...]:
    """All that a table says of a dtype: what it does not know yet is measured now, for so many seconds."""
    until = time.monotonic() + seconds
    classes = all_classes(dtype_name(dtype), torch.get_num_threads()) if table.measures else ()
    for cls, needs in itertools.product(classes, NEEDS):
        if time.monotonic() > until:
            break
        table.choose(cls, needs)
    return table.rows


# --- measuring ---------------------------------------------------------------------------------------------


#: How often a race is held until no thread stood in line for more than this share of it, and the rest before.
_TRIES, _DISTURBED, _REST = 3, 0.1, 0.003


class Timing(NamedTuple):
    """Seconds by implementation, None for what cannot run; `steady` where they are worth keeping."""

    times: dict[str, float | None]
    steady: bool


def time_candidates(
    candidates: Mapping[str, Call], threads: int, skip: frozenset[str] = frozenset()
) -> Timing:
    """Time candidates against each other on so many threads; None for those skipped too.

    Where other programs hold the cores, several threads cannot be timed: those of one thread stand in.
    """
    alive = {name: call for name, call in candidates.items() if name not in skip}
    for _ in range(_TRIES if threads > 1 else 0):
        waited, began = read_scheduler_wait(), time.monotonic()
        seconds = race(alive)
        if read_scheduler_wait() - waited <= _DISTURBED * (time.monotonic() - began):
            return Timing({name: seconds.get(name) for name in candidates}, True)
        time.sleep(_REST)
    torch.set_num_threads(1)
    try:
        seconds = race(alive)
    finally:
        torch.set_num_threads(threads)
    return Timing({name: seconds.get(name) for name in candidates}, threads == 1)


def _run_probe(cls: OpClass, direction: str, skip: frozenset[str]) -> Timing:
    with torch.no_grad():
        candidates = KINDS[cls.op].probe(cls, direction)
        if cls.dtype == "fp32":  # what others are compared with
            candidates = {"native": candidates["native"]}
        return time_candidates(candidates, cls.threads, skip)


def time_layer(region: Region, cls: OpClass, needs: str, choice: Choice) -> Timing:
    """What an op takes as a layer calls it, both ways and in a region: by torch's own kernels, and as chosen.

    The times of bare kernels do not show it: an op that leaves torch's own dispatch pays for Python and for
    casts one by one, and in a small op that is all it won. The choice's time is called `rounded`.
    """
    layer = KINDS[cls.op].layer
    assert layer is not None
    op, leaves = layer(cls)
    grad_leaves = [t.requires_grad_() for t, need in zip(leaves, "iww") if need in needs]

    def run(table: KernelTable) -> object:
        with region("cpu", parse_dtype(cls.dtype), kernels=table):
            out = op(*leaves)
        return torch.autograd.grad(out, grad_leaves, torch.ones_like(out)) if grad_leaves else out

    tables = {"native": KernelTable([Row(NATIVE)]), "rounded": KernelTable([Row(choice)])}
    return time_candidates(
        {name: functools.partial(run, table) for name, table in tables.items()}, cls.threads
    )


def _run_overhead() -> Timing:
    """Return seconds that one op through an autograd Function of ours takes beyond torch's own, both ways."""
    x, weight = (values_of((8, 8), torch.bfloat16, seed).requires_grad_() for seed in (1, 2))
    ones = torch.ones(8, 8, dtype=torch.bfloat16, device="cpu")

    def ours() -> object:
        return torch.autograd.grad(Linear.apply(x, weight, None, NATIVE), (x, weight), ones)

    def torchs() -> object:
        return torch.autograd.grad(torch.nn.functional.linear(x, weight), (x, weight), ones)

    seconds = race({"torch": torchs, "ours": ours})
    return Timing({"native": max(1e-6, seconds["ours"] - seconds["torch"])}, True)


# --- remembering -------------------------------------------------------------------------------------------


def _ratios(times: Times) -> dict[str, float]:
    best = min((t for t in times.values() if t is not None), default=math.inf)
    return {name: math.inf if t is None else t / best for name, t in times.items()}


class Measurements:
    """Times by class and direction of this machine: asked of the disk first, then measured and kept there.

    `probes` counts what was measured in this process. What was measured while other programs held the cores
    serves this process alone.
    """

    def __init__(self, file: Callable[[], Path], run: Callable[..., Timing] = _run_probe) -> None:
        self._file, self._run = file, run
        self._rows: dict[str, dict[str, float | None]] | None = None
        self._lock = threading.RLock()
        self.probes = 0

    def times(self, cls: OpClass, direction: str) -> Times:
        """Return seconds by implementation of one direction of a class."""
        if direction == "weight" and KINDS[cls.op].one_backward:
            return {}
        key = "|".join((cls.op, cls.dtype, cls.geometry, cls.size, str(cls.threads), direction))
        with self._lock:
            seconds = self._load().get(key)
            return seconds or self._measure(
                key, self._run, cls, direction, self._skip_at_this_size(cls, direction)
            )

    def lookup(self) -> Mapping[str, Times]:
        """Return what was measured so far, here or in an earlier process; measures nothing."""
        with self._lock:
            return dict(self._load())

    def overhead(self) -> float:
        """Return seconds that leaving torch's own dispatch costs an op."""
        with self._lock:
            seconds = self._load().get("overhead") or self._measure("overhead", _run_overhead)
        return seconds["native"] or 0.0

    def pays(self, region: Region, cls: OpClass, needs: str, choice: Choice) -> bool:
        """Whether a choice is faster in a layer too, with Python and casts; large ops win by more."""
        if KINDS[cls.op].layer is None or cls.size == SIZES[-1]:
            return True
        ways = ",".join((choice.forward, choice.input, choice.weight))
        key = "|".join(("layer", *map(str, astuple(cls)), needs, ways))
        with self._lock:
            seconds = self._load().get(key) or self._measure(key, time_layer, region, cls, needs, choice)
        native, chosen = seconds["native"], seconds.get("rounded")
        return native is None or (chosen is not None and chosen <= PAYS * native)

    def _skip_at_this_size(self, cls: OpClass, direction: str) -> frozenset[str]:
        """What lost so clearly at smaller sizes, and ever more clearly, that this size need not show it."""
        smaller = SIZES[: SIZES.index(cls.size)][-2:]
        lost = [_ratios(self.times(replace(cls, size=size), direction)) for size in smaller]
        if not lost:
            return frozenset()
        first, last = lost[0], lost[-1]
        grows = {
            n
            for n in last
            if len(lost) > 1 and last[n] > HOPELESS and last[n] >= 1.2 * first.get(n, math.inf)
        }
        return frozenset(grows | {n for n in last if last[n] > HOPELESS_AT_ANY_SIZE})

    def _load(self) -> dict[str, dict[str, float | None]]:
        if self._rows is None:
            self._rows = read_rows(self._file(), _sound)
        return self._rows

    def _measure(self, key: str, call: Callable[..., Timing], *args: Any) -> dict[str, float | None]:
        self.probes += 1
        with ThreadPoolExecutor(1) as fresh:
            timing = fresh.submit(call, *args).result()
        self._load()[key] = timing.times
        if timing.steady:
            write_rows(self._file(), {**read_rows(self._file(), _sound), key: timing.times})
        return timing.times


def _sound(row: Mapping[str, Any]) -> bool:
    times = all(t is None or (isinstance(t, float) and 0 < t < 1e3) for t in row.values())
    return "native" in row and set(row) <= set(IMPLEMENTATIONS) and times


def times_file() -> Path:
    """Where this machine's times are kept; another CPU, instruction set, torch or set of probes has its
    own."""
    cache_file = devices.cache_file("cpu")
    return cache_file.with_name(cache_file.name.replace("devices-", f"kernel-times-{_PROBES_VERSION}-", 1))


measurements = Measurements(times_file)


def make_measured_table(region: Region) -> KernelTable:
    """Return a table that asks this machine; `region` is autocast, in which layers are timed."""
    pays = functools.partial(measurements.pays, region)
    return KernelTable((), measurements.times, measurements.overhead, "measured", pays=pays)
