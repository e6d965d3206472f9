"""What this machine's kernels take: small fixed probes, run at first need, remembered in memory and on disk.

A probe makes tensors of its own, in a thread of its own, so that nothing of the caller (data, random state,
autocast regions, dispatch modes, fake tensors) is seen or touched.
"""

from __future__ import annotations

import atexit
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep import devices
from halfstep.casting import kernel_functions as functions
from halfstep.casting.kernel_choice import (
    IMPLEMENTATIONS,
    NATIVE,
    NEEDS,
    SIZES,
    Choice,
    KernelTable,
    OpClass,
    Row,
    Times,
    geometries,
    sizes,
)
from halfstep.casting.kernel_functions import Geometry
from halfstep.casting.kernel_race import HOPELESS, Call, race, stood_in_line
from halfstep.devices.capabilities import read_rows, write_rows
from halfstep.formats import dtype_name, parse_dtype

#: Lost by so much at one size, a way is not tried at larger ones.
HOPELESS_AT_ANY_SIZE = 25.0
#: What a choice for a small product may take of native's time in a layer.
PAYS = 0.9
#: Goes up where a probe changes what it measures: times of other probes are then not read.
_PROBES_VERSION = 3


# --- shapes ------------------------------------------------------------------------------------------------


class _Base(NamedTuple):
    """Batch, channels and positions of a convolution; n, k and m of a product of matrices."""

    batch: int
    channels: int
    positions: int
    matrix: tuple[int, int, int]


_BASES = {
    "tiny": _Base(2, 8, 64, (32, 64, 32)),
    "small": _Base(4, 24, 196, (128, 128, 128)),
    "medium": _Base(8, 48, 196, (256, 256, 256)),
    "large": _Base(8, 48, 784, (512, 512, 512)),
}


def values_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Ordinary numbers between -1 and 1; no generator is asked."""
    count = math.prod(shape)
    return (
        torch.linspace(-1, 1, count, dtype=torch.float32, device="cpu")
        .add_(seed / 97)
        .to(dtype)
        .reshape(shape)
    )


#: Channels of a convolution's probe as a multiple of the base's, where they are not the base's.
_WIDER = {"pointwise": 3, "narrow-pointwise": 2, "depthwise": 2, "strided-depthwise": 2, "grouped": 2}


class ConvolutionProbe(NamedTuple):
    """Tensors of one convolution."""

    x: Tensor
    weight: Tensor
    grad: Tensor
    geometry: Geometry


def convolution_probe(cls: OpClass) -> ConvolutionProbe:
    """The probe of a class whose geometry reads like `2d dense` or `2d depthwise channels_last`."""
    kind, shape, *layout = cls.geometry.split()
    dims, dtype, base = int(kind[0]), parse_dtype(cls.dtype), _BASES[cls.size]
    extent = max(4, round(base.positions ** (1 / dims)))
    transposed, narrow = shape == "transposed", shape == "narrow-pointwise"
    kernel = 1 if shape.endswith("pointwise") else 4 if transposed else 3
    wide = _WIDER.get(shape, 1) * base.channels
    groups = {"depthwise": wide, "strided-depthwise": wide, "grouped": 4}.get(shape, 1)
    into = 3 if shape == "stem" else base.channels // 2 if narrow else wide
    stride = 2 if transposed or shape.startswith("strided") else 1
    padding = 1 if transposed else kernel // 2
    geometry = Geometry((stride,) * dims, (padding,) * dims, (1,) * dims, transposed, (0,) * dims, groups)
    x = values_of((base.batch * (4 if narrow else 1), into, *(extent,) * dims), dtype, 1)
    weight = values_of((wide, into // groups, *(kernel,) * dims), dtype, 2)
    if layout:
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    grad = torch.empty_like(
        torch.ops.aten.convolution(x.float(), weight.float(), None, *geometry), dtype=dtype
    )
    return ConvolutionProbe(x, weight, grad.copy_(values_of(tuple(grad.shape), dtype, 3)), geometry)


def _ways(names: Iterable[str], function: Callable[..., object], *args: Any) -> dict[str, Call]:
    """The function with these arguments, by every implementation that is named."""
    return {name: functools.partial(function, name, *args) for name in names}


def _convolution(cls: OpClass, direction: str) -> dict[str, Call]:
    x, weight, grad, geometry = convolution_probe(cls)
    names = ["rounded", "native"]
    if cls.geometry[:2] == "2d" and cls.size != SIZES[0] and not cls.geometry.endswith("channels_last"):
        names = ["rounded", "rounded_channels_last", "native", "channels_last"]
    if direction == "forward":
        return _ways(names, functions.convolve, x, weight, None, geometry)
    mask = [direction == "input", direction == "weight", False]
    return _ways(names, functions.convolve_backward, grad, x, weight, geometry, mask)


def matrix_of(cls: OpClass) -> tuple[int, int, int]:
    """n, k and m of a product."""
    n, k, m = _BASES[cls.size].matrix
    if cls.geometry == "thin":
        side = {"tiny": 96, "small": 512}.get(cls.size, 1536)
        return 4, side, side
    return n, k, m


def _linear(cls: OpClass, direction: str) -> dict[str, Call]:
    dtype = parse_dtype(cls.dtype)
    n, k, m = matrix_of(cls)
    x, weight, grad = values_of((n, k), dtype, 1), values_of((m, k), dtype, 2), values_of((n, m), dtype, 3)
    names = ["rounded", *(["onednn"] if functions.has_onednn() else []), "native"]
    if direction == "forward":
        return _ways(names, functions.linear, x, weight, None)
    a, b = (grad, weight) if direction == "input" else (grad.t(), x)
    return _ways(names, functions.product, a, b, dtype)


BATCHES = {
    "matrices up to 64": {"tiny": (4, 16), "small": (64, 32), "medium": (384, 32), "large": (384, 56)},
    "matrices over 64": {"tiny": (1, 80), "small": (2, 112), "medium": (8, 128), "large": (8, 256)},
}


def _products(cls: OpClass, direction: str) -> dict[str, Call]:
    """Batches of square matrices."""
    dtype = parse_dtype(cls.dtype)
    count, n = BATCHES[cls.geometry][cls.size]
    a, b, grad = (values_of((count, n, n), dtype, seed) for seed in (1, 2, 3))
    left, right = {"forward": (a, b), "input": (grad, b.mT), "weight": (a.mT, grad)}[direction]
    return _ways(("rounded", "native"), functions.product, left, right, dtype)


_ATTENTIONS = {"tiny": (16, 32), "small": (64, 32), "medium": (192, 32), "large": (512, 64)}


def _attention(cls: OpClass, direction: str) -> dict[str, Call]:
    dtype = parse_dtype(cls.dtype)
    length, width = _ATTENTIONS[cls.size]
    shape = (4 if length < 100 else 1, 4, length, width)
    q, k, v, grad = (values_of(shape, dtype, seed) for seed in range(4))
    causal, names = cls.geometry == "causal", ("rounded", "native")
    if direction == "forward":
        return _ways(names, functions.attend, q, k, v, None, causal, None)
    saved = (q, k, v, *functions.attend("native", q, k, v, None, causal, None))
    return _ways(names, functions.attend_backward, grad, saved, None, causal, None)


_RECURRENT = {"tiny": (4, 16), "small": (8, 32), "medium": (16, 64), "large": (32, 128)}


def _recurrent(cls: OpClass, direction: str) -> dict[str, Call]:
    """A layer over 16 steps; both gradients come of one backward, which `input` stands for.

    The weights are as small as a layer's are: larger ones close every gate, and gradients become denormal
    numbers, which fp32 kernels take three times as long for.
    """
    dtype = parse_dtype(cls.dtype)
    batch, width = _RECURRENT[cls.size]
    gates = {"lstm": 4, "gru": 3}.get(cls.op, 1)
    x, state = values_of((16, batch, width), dtype, 1), values_of((1, batch, width), dtype, 2)
    sides = [(gates * width, width), (gates * width, width), (gates * width,), (gates * width,)]
    weights = [values_of(side, dtype, i).div_(width**0.5) for i, side in enumerate(sides, 3)]
    op: Any = getattr(torch.ops.aten, cls.op).input
    training = direction != "forward"
    leaves = [t.requires_grad_(training) for t in (x, *weights)]

    def run(how: str) -> object:
        with torch.set_grad_enabled(training):
            wide = [t.float() if how == "rounded" else t for t in (*leaves, state)]
            initial: Any = [wide[-1], wide[-1]] if cls.op == "lstm" else wide[-1]
            out = op(wide[0], initial, wide[1:-1], True, 1, 0.0, training, False, False)[0].to(dtype)
            return torch.autograd.grad(out, leaves, torch.ones_like(out)) if training else out

    return _ways(("rounded", "native"), run)


PROBES: Mapping[str, Callable[[OpClass, str], dict[str, Call]]] = {
    "convolution": _convolution,
    "linear": _linear,
    "bmm": _products,
    "attention": _attention,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
}
#: One backward kernel gives the gradients of all inputs: the direction `weight` is that of `input`.
ONE_BACKWARD = frozenset({"attention", "lstm", "gru", "rnn_tanh"})


def all_classes(dtype: str, threads: int) -> tuple[OpClass, ...]:
    """Every class there is of one dtype."""
    return tuple(
        OpClass(op, dtype, geometry, size, threads)
        for op in PROBES
        for geometry in geometries(op)
        for size in sizes(geometry)
    )


def whole_table(table: KernelTable, dtype: torch.dtype) -> tuple[Row, ...]:
    """All that a table says of a dtype: what it does not know yet is measured now."""
    if table.measures:
        for cls in all_classes(dtype_name(dtype), torch.get_num_threads()):
            for needs in NEEDS:
                table.choose(cls, needs)
    return table.rows


# --- measuring ---------------------------------------------------------------------------------------------


#: Races that other programs spoiled in this process, and how many of them it tries.
_SPOILED: list[int] = []
_TRIED = 10


class Taken(NamedTuple):
    """Seconds by implementation, None for what cannot run; `steady` where they are worth keeping."""

    times: dict[str, float | None]
    steady: bool


def take(candidates: Mapping[str, Call], threads: int, skip: frozenset[str] = frozenset()) -> Taken:
    """A race of ops on so many threads; None for those skipped too.

    Where other programs hold the cores, several threads cannot be timed: those of one thread stand in, and
    after `_TRIED` such races several threads are not tried again.
    """
    alive = {name: call for name, call in candidates.items() if name not in skip}
    found, steady = dict[str, float](), False
    if threads == 1 or len(_SPOILED) < _TRIED:
        found, steady = race(alive, in_line=stood_in_line if threads > 1 else None)
    if not steady:
        _SPOILED.append(threads)
        torch.set_num_threads(1)
        try:
            found = race(alive).times
        finally:
            torch.set_num_threads(threads)
    return Taken({name: found.get(name) for name in candidates}, steady)


def _run_probe(cls: OpClass, direction: str, skip: frozenset[str]) -> Taken:
    with torch.no_grad():
        candidates = PROBES[cls.op](cls, direction)
        if cls.dtype == "fp32":  # what others are compared with
            candidates = {"native": candidates["native"]}
        return take(candidates, cls.threads, skip)


def _run_overhead() -> Taken:
    """Seconds that one op through an autograd Function of ours takes beyond torch's own, both ways."""
    x, weight = (values_of((8, 8), torch.bfloat16, seed).requires_grad_() for seed in (1, 2))
    ones = torch.ones(8, 8, dtype=torch.bfloat16)

    def ours() -> object:
        return torch.autograd.grad(functions.Linear.apply(x, weight, None, NATIVE), (x, weight), ones)

    def torchs() -> object:
        return torch.autograd.grad(torch.nn.functional.linear(x, weight), (x, weight), ones)

    found, steady = race({"torch": torchs, "ours": ours})
    return Taken({"native": max(1e-6, found["ours"] - found["torch"])}, steady)


# --- remembering -------------------------------------------------------------------------------------------


def _ratios(times: Times) -> dict[str, float]:
    best = min((t for t in times.values() if t is not None), default=math.inf)
    return {name: math.inf if t is None else t / best for name, t in times.items()}


class Measurements:
    """Times by class and direction of this machine: asked of the disk first, then measured and kept there.

    `probes` counts what was measured in this process. The file is written at most twice a second, and
    when the process ends; what was measured while other programs held the cores serves this process alone.
    """

    def __init__(self, file: Callable[[], Path], run: Callable[..., Taken] = _run_probe) -> None:
        self._file, self._run = file, run
        self._rows: dict[str, dict[str, float | None]] | None = None
        self._lock = threading.RLock()
        self._passing: set[str] = set()
        self._saved = 0.0
        self._unsaved = False
        self.probes = 0

    def times(self, cls: OpClass, direction: str) -> Times:
        """Seconds by implementation of one direction of a class."""
        if direction == "weight" and cls.op in ONE_BACKWARD:
            return {}
        key = "|".join((cls.op, cls.dtype, cls.geometry, cls.size, str(cls.threads), direction))
        with self._lock:
            rows = self._load()
            found = rows.get(key)
            if found is None:
                skip = self._hopeless(cls, direction)
                found = self._keep(key, self._in_fresh_thread(self._run, cls, direction, skip))
            return found

    def known(self) -> Mapping[str, Times]:
        """What was measured so far, here or in an earlier process; measures nothing."""
        with self._lock:
            return dict(self._load())

    def overhead(self) -> float:
        """Seconds that leaving torch's own dispatch costs an op."""
        with self._lock:
            found = self._load().get("overhead")
            if found is None:
                found = self._keep("overhead", self._in_fresh_thread(_run_overhead))
            return found.get("native") or 0.0

    def pays(self, cls: OpClass, needs: str, choice: Choice) -> bool:
        """Whether a choice is faster in a layer too, with Python and casts; large ops win by more."""
        if cls.op not in ("linear", "bmm", "convolution") or cls.size == SIZES[-1]:
            return True
        ways = ",".join((choice.forward, choice.input, choice.weight))
        key = "|".join(("layer", *map(str, astuple(cls)), needs, ways))
        with self._lock:
            found = self._load().get(key)
            if found is None:
                from halfstep.casting.kernel_layers import time_layer

                found = self._keep(key, self._in_fresh_thread(time_layer, cls, needs, choice))
            native, chosen = found.get("native"), found.get("rounded")
            return native is None or (chosen is not None and chosen <= PAYS * native)

    def _hopeless(self, cls: OpClass, direction: str) -> frozenset[str]:
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

    def _in_fresh_thread(self, call: Callable[..., Taken], *args: Any) -> Taken:
        self.probes += 1
        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(call, *args).result()

    def _load(self) -> dict[str, dict[str, float | None]]:
        if self._rows is None:
            self._rows = read_rows(self._file(), _sound)
        return self._rows

    def _keep(self, key: str, taken: Taken) -> dict[str, float | None]:
        self._rows = {**(self._rows or {}), key: taken.times}
        if not taken.steady:
            self._passing.add(key)
        if not self._unsaved:
            self._unsaved = True
            atexit.register(self.save)
        if time.monotonic() - self._saved > 0.5:
            self.save()
        return taken.times

    def save(self) -> None:
        """Write what was measured since the last time, beside what other processes wrote."""
        with self._lock:
            if self._unsaved and self._rows is not None:
                rows = {key: row for key, row in self._rows.items() if key not in self._passing}
                write_rows(self._file(), {**read_rows(self._file(), _sound), **rows})
            self._saved, self._unsaved = time.monotonic(), False
            atexit.unregister(self.save)


def _sound(row: Mapping[str, Any]) -> bool:
    times = all(t is None or (isinstance(t, float) and 0 < t < 1e3) for t in row.values())
    return "native" in row and set(row) <= set(IMPLEMENTATIONS) and times


def times_file() -> Path:
    """Where this machine's times are kept; another CPU, instruction set, torch or set of probes has its
    own."""
    found = devices.cache_file("cpu")
    return found.with_name(found.name.replace("devices-", f"kernel-times-{_PROBES_VERSION}-", 1))


measurements = Measurements(times_file)


def measured_table() -> KernelTable:
    """A table that asks this machine."""
    return KernelTable((), measurements.times, measurements.overhead, "measured", pays=measurements.pays)
