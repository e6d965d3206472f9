"""Runs the GPU kernels: address tables that stay on the device, one launch a variant for all parameters.

Tables are made anew when addresses change, by an asynchronous copy from pinned memory, and kept while they
stay. Nothing is read back. A step may be captured in a CUDA graph once it has run outside of one: the graph
then owns the tables it was captured with, its own copy of what changed is part of it, and numbers given as
Python floats (learning rate, scale) are fixed in it, while device tensors are read at each replay.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import HalfstepWarning, UnsupportedError
from halfstep.gradients.cpu import GRADS
from halfstep.gradients.stats import GradStats
from halfstep.kernels import codes as L
from halfstep.optim import storage
from halfstep.optim.bundles import EXPONENTS, EXTRA, GRAD, KEY, STATES, STEP, WEIGHT, WIDTH, Bundle
from halfstep.trees import as_float32

ITEM = 32768  # elements of a program: a multiple of the tile
TILE = 1024  # elements at a time: a multiple of the 8-bit block
LANES = 128
HYPER = 6  # float64 numbers that the kernel `scalars` takes
KEPT = 32  # plans of several parameters that one optimizer keeps; those of single ones are small
ROW = [WEIGHT, EXTRA, STATES, STATES + 1, EXPONENTS, EXPONENTS + 1, STEP, KEY, WIDTH]  # of the table there
OLDEST = (7, 0)  # the compute capability Triton's code needs
Number = float | Tensor | None
_dtypes = attrgetter("dtype")


@cache
def kernels() -> Any:
    """The kernels' module, or None where Triton cannot be imported."""
    try:
        from halfstep.kernels.cuda import update as _triton_kernels
    except ImportError:
        return None
    return _triton_kernels


@cache
def usable(device: torch.device, demanded: bool) -> bool:
    """Whether the kernels run on `device`; if not, UnsupportedError where `demanded`, a warning on CUDA."""
    problem = _problem(device)
    if problem and demanded:
        raise UnsupportedError(f"backend='triton' does not run on {problem}")
    if problem and device.type == "cuda":
        warnings.warn(
            f"hs.optim runs its plain torch reference, in many launches and much slower, on {problem}",
            HalfstepWarning,
            stacklevel=4,
        )
    return not problem


def _problem(device: torch.device) -> str:
    """What keeps the kernels from running, and what to do; empty where they run."""
    if device.type == "cpu" and (os.environ.get("TRITON_INTERPRET") != "1" or kernels() is None):
        return "a CPU (except in Triton's interpreter, TRITON_INTERPRET=1); leave backend at 'auto'"
    if device.type not in ("cpu", "cuda"):
        return f"{device.type} devices; leave backend at 'auto'"
    if kernels() is None:
        return "a machine where Triton cannot be imported: pip install triton"
    if torch.version.hip is not None:
        return "AMD GPUs: the kernels are for CUDA"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)}: Triton's code needs compute capability 7.0"
    return ""


def capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _pinned(values: Sequence[Any] | int, dtype: torch.dtype, device: torch.device) -> Tensor:
    pin = device.type == "cuda"
    if isinstance(values, int):
        return torch.empty(values, dtype=dtype, pin_memory=pin, device="cpu")
    return torch.tensor(values, dtype=dtype, pin_memory=pin, device="cpu")


def _upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _pinned(values, dtype, device).to(device, non_blocking=True)


class DeviceTable:
    """int64 numbers on a device, sent again when they change; graphs keep what they were captured with."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._values: Any = None
        self._tensor: Tensor | None = None
        # Not every torch gives pinned memory while a graph is captured, so some is had before.
        self._spare: Tensor | None = _pinned(count, torch.int64, device)

    def get(self, values: Any, captured: list[Any] | None) -> Tensor:
        """The device tensor of an array; `captured` is where a graph under capture keeps what it uses."""
        if self._tensor is not None and np.array_equal(values, self._values):
            there = self._tensor
            if captured is not None:
                captured.append(there)
        elif captured is None:
            there = _upload(values, torch.int64, self._device)
            self._values, self._tensor = values, there
        else:
            host, self._spare = self._spare, None
            if host is None:
                host = _pinned(len(values), torch.int64, self._device)
            host.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))
            there = host.to(self._device, non_blocking=True)
            captured += [host, there]
        if self._spare is None and captured is None:
            self._spare = _pinned(len(values), torch.int64, self._device)
        return there


class UpdatePlan:
    """The address table of one group on one device and its work items by variant of the kernel."""

    def __init__(self, bundles: Sequence[Bundle], facts: UpdateFacts, device: torch.device) -> None:
        self.facts, self.size = facts, len(facts.aligned)
        items: dict[tuple[int, int, int, bool, bool], list[int]] = {}
        weights = [(bundle, weight) for bundle in bundles for weight in bundle.weights.tensors]
        for i, ((bundle, weight), aligned) in enumerate(zip(weights, facts.aligned.tolist())):
            size, width = weight.numel(), storage.width_of(weight)
            ragged = bundle.widths is not None and size > width and width % L.BLOCK != 0
            own = items.setdefault(
                (bundle.kind, GRADS[bundle.grad_dtype], bundle.state_kind, aligned, ragged), []
            )
            blocks = math.prod(storage.exponents_shape(weight)) if ragged else 0
            own += _items_of(i, blocks, ITEM // L.BLOCK) if ragged else _items_of(i, size)
        self.table = _upload(facts.rows.ravel(), torch.int64, device)
        self.items = {key: (_upload(own, torch.int64, device), len(own) // 3) for key, own in items.items()}
        self.numbers = DeviceTable(self.size + HYPER, device)
        self.rows = torch.empty(self.size * 8, dtype=torch.float32, device=device)
        self.keys = torch.empty(self.size, dtype=torch.int32, device=device)
        held = any(bundle.kind == L.FP16_EXACT for bundle in bundles)
        self.over = torch.zeros((), dtype=torch.int32, device=device) if held else None


@dataclass(frozen=True, eq=False)
class UpdateFacts:
    """The numbers an update plan is made of; one that was made of the same still holds."""

    rows: Any
    """Of each parameter: weight, extra, states, exponents, step count, base key, length of a row."""
    aligned: Any
    kinds: list[Any]

    @classmethod
    def of(cls, bundles: Sequence[Bundle], seed: int) -> tuple[UpdateFacts, Any]:
        """The facts of some bundles, and where their gradients lie."""
        tables = [bundle.table() for bundle in bundles]
        for bundle, table in zip(bundles, tables):
            if bundle.rounds_randomly:
                table[KEY] = bundle.base_keys(seed)
        whole = np.concatenate(tables, 1)
        aligned = (whole[:EXPONENTS] % 16 == 0).all(0)
        kinds = [(b.kind, b.grad_dtype, b.state_kind, b.elements, b.widths) for b in bundles]
        return cls(whole[ROW].T.copy(), aligned, kinds), whole[GRAD]

    def hold(self, other: UpdateFacts) -> bool:
        """Whether the other's are the same."""
        return (
            self.kinds == other.kinds
            and np.array_equal(self.rows, other.rows)
            and np.array_equal(self.aligned, other.aligned)
        )


class MeasurePlan:
    """Work items over gradients of given sizes, dtypes and alignments, and room for what each item finds."""

    def __init__(
        self,
        sizes: Sequence[int],
        dtypes: Sequence[torch.dtype],
        alignments: Sequence[bool],
        device: torch.device,
    ) -> None:
        items: dict[tuple[int, bool], list[int]] = {}
        self.size, self.count = len(sizes), 0
        for i, (size, dtype, aligned) in enumerate(zip(sizes, dtypes, alignments)):
            own = items.setdefault((GRADS[dtype], aligned), [])
            for start in range(0, size, ITEM):
                own += [i, start, min(start + ITEM, size), self.count]
                self.count += 1
        self.items = {key: (_upload(own, torch.int64, device), len(own) // 4) for key, own in items.items()}
        self.grads = DeviceTable(self.size, device)
        self.sums = torch.empty(self.count * 3, dtype=torch.float32, device=device)
        self.peaks = torch.empty(self.count, dtype=torch.int32, device=device)


def _items_of(index: int, size: int, most: int = ITEM) -> Iterator[int]:
    for start in range(0, size, most):
        yield from (index, start, min(start + most, size))


class Plans:
    """All plans of one optimizer: found again by what they are for, device and stream; see the module."""

    def __init__(self) -> None:
        self._plans: dict[Any, Any] = {}
        self._captured: list[Any] = []

    def _find(
        self, key: Any, device: torch.device, fits: Callable[[Any], bool], make: Callable[[], Any]
    ) -> Any:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (device, *key)
        if capturing(device):
            # A capture has a stream of its own and waits for all others: what was made on any will do.
            made = [p for (known, _), p in self._plans.items() if known == key and fits(p)]
            if not made:
                raise UnsupportedError(
                    "a CUDA graph can capture this step only after it ran outside of the graph with the same "
                    "parameters and gradient dtypes: take a few steps first, as torch's notes on graphs do"
                )
            self._captured.append(made[-1])
            return made[-1]
        plan = self._plans.get((key, stream))
        if plan is None or not fits(plan):
            plan = make()
            several = [known for known, p in self._plans.items() if p.size > 1]
            if plan.size > 1 and len(several) >= KEPT:
                del self._plans[several[0]]
            self._plans[key, stream] = plan
        return plan

    def _keeper(self, device: torch.device) -> list[Any] | None:
        return self._captured if capturing(device) else None

    def update(
        self,
        bundles: Sequence[Bundle],
        seed: int,
        hyper: tuple[float, ...],
        lr: Tensor | None,
        factors: Sequence[Number],
        sign: float,
        skip: Tensor | None,
        device: torch.device,
    ) -> Tensor | None:
        """Update the bundles of one group; returns the flag of masters out of range.

        `factors` (numbers or 0-d tensors) and `sign` multiply the gradients; `hyper` is what the kernel
        `scalars` takes, with `lr` in place of its first where that is a device tensor.
        """
        code = bundles[0].algorithm.code
        facts, places = UpdateFacts.of(bundles, seed)
        key = ("update", int(facts.rows[0, 0]), len(places))
        plan: UpdatePlan = self._find(
            key, device, lambda p: p.facts.hold(facts), lambda: UpdatePlan(bundles, facts, device)
        )
        keep = self._keeper(device)
        if keep is not None:
            keep.append(bundles)
        numbers = plan.numbers.get(np.concatenate((places, np.array(hyper).view(np.int64))), keep)
        grads, settings = numbers, numbers[plan.size :].view(torch.float64)
        factor, tensors = _factors(factors, sign, device)
        count = plan.size
        _launch(
            kernels().scalars, device, -(-count // LANES), plan.table, plan.rows, plan.keys, settings,
            lr, skip, factor, *tensors, count, ALGORITHM=code, LANES=LANES,
        )  # fmt: skip
        for (kind, grad, state, aligned, ragged), (items, programs) in plan.items.items():
            _launch(
                kernels().update, device, programs, plan.table, grads, items, plan.rows, plan.keys, skip,
                plan.over, ALGORITHM=code, KIND=kind, GRAD=grad, STATE=state, ALIGNED=aligned,
                RAGGED=ragged, TILE=TILE,
            )  # fmt: skip
        if plan.over is None or keep is not None:
            return None  # under capture the flag waits on the device for the next step outside the graph
        flag = plan.over.to(torch.bool)
        plan.over.zero_()
        return flag

    def measure(self, grads: Sequence[Tensor], inv_scale: Number) -> GradStats:
        """Finite flag, norm and largest magnitude of flat gradients on one device, in one read of each.

        Squares are added up in fp32 within a work item (in three ranges, so that none overflows or vanishes)
        and in float64 over items, always in the same order: the same gradients give the same bits.
        """
        device = grads[0].device
        sizes, dtypes = tuple(map(Tensor.numel, grads)), tuple(map(_dtypes, grads))
        places = np.array(list(map(Tensor.data_ptr, grads)), np.int64)
        aligned: Any = places % 16 == 0
        key = ("measure", sizes, dtypes, aligned.tobytes())
        plan: MeasurePlan = self._find(
            key, device, lambda p: True, lambda: MeasurePlan(sizes, dtypes, aligned.tolist(), device)
        )
        table = plan.grads.get(places, self._keeper(device))
        finite = torch.empty((), dtype=torch.bool, device=device)
        stats = torch.empty(2, dtype=torch.float32, device=device)
        for (grad, aligned), (items, programs) in plan.items.items():
            _launch(
                kernels().measure, device, programs, table, items, plan.sums, plan.peaks,
                GRAD=grad, ALIGNED=aligned, TILE=TILE,
            )  # fmt: skip
        factor, (inverse, _) = _factors([inv_scale, None], 1.0, device)
        _launch(
            kernels().total, device, 1, plan.sums, plan.peaks, plan.count, factor, inverse,
            finite.view(torch.uint8), stats, LANES=1024,
        )  # fmt: skip
        return GradStats(finite, stats[0], stats[1])


def _factors(
    given: Sequence[Number], sign: float, device: torch.device
) -> tuple[float, tuple[Tensor | None, ...]]:
    """Numbers multiplied in fp32 and, beside them, tensors as 0-d fp32 on the device (None: none)."""
    product = sign
    tensors: list[Tensor | None] = []
    for one in given:
        if isinstance(one, Tensor) and (one.device.type != "cpu" or device.type == "cpu"):
            tensors.append(one.detach().to(device, torch.float32, non_blocking=True))
        else:
            tensors.append(None)
            product = product if one is None else as_float32(product * as_float32(float(one)))
    return product, tuple(tensors)


def _launch(kernel: Any, device: torch.device, programs: int, *args: Any, **constants: Any) -> None:
    """Launch on `device`, fused multiply-add off."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[(programs,)](*args, **constants, num_warps=4, enable_fp_fusion=False)
        return
    with np.errstate(all="ignore"):  # in the interpreter numpy computes, and warns of infinities
        kernel[(programs,)](*args, **constants)
