"""The backend of CUDA: Triton's kernels over address tables, one launch a variant for all parameters.

Tables stay on the device. They are rebuilt when addresses change, by an asynchronous copy from pinned
memory, and kept while they stay. Nothing is read back. A step may be captured in a CUDA
graph once it has run outside of one: the graph then owns the tables it was captured with, its own copy of
what changed is part of it, and numbers given as Python floats (learning rate, scale) are fixed in it, while
device tensors are read at each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import TypeIs

from halfstep.devices.transfer import capturing
from halfstep.errors import UnsupportedError
from halfstep.gradients.decision import Clip, Decision, Scalar, clip_coefficient
from halfstep.gradients.stats import AnyStats, GradStats, KernelStats, measure
from halfstep.kernels import codes as L
from halfstep.kernels.cpu.run import GRADS
from halfstep.kernels.cuda import launch as cuda
from halfstep.kernels.cuda.launch import kernels
from halfstep.optim import storage
from halfstep.optim.arguments import check_betas
from halfstep.optim.backends.backend import Backend, RangeErrors
from halfstep.optim.bundles import (
    EXPONENTS,
    EXTRA,
    GRAD,
    KEY,
    LINES,
    STATES,
    STEP,
    WEIGHT,
    WIDTH,
    Group,
    TensorGroup,
)
from halfstep.trees import as_float32, move_to

ITEM = 32768  # elements of a program: a multiple of the tile
TILE = 1024  # elements at a time
BLOCKS = 32  # of 8-bit states, of a program: half the elements of others, for half the threads
WIDE = 16  # bytes of the widest load, and elements of 8-bit states in it
LANES = 128
HYPER = 6  # float64 numbers that the kernel `scalars` takes
KEPT = 32  # plans of several parameters that one optimizer keeps; those of single ones are small
ROW = [WEIGHT, EXTRA, STATES, STATES + 1, EXPONENTS, EXPONENTS + 1, STEP, KEY, WIDTH]  # of the table there
Number = float | Tensor | None
_dtypes = attrgetter("dtype")


def _room(count: int, device: torch.device) -> Tensor:
    """Return host memory for so many int64 numbers, from which `device` copies without waiting."""
    return torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")


def upload(values: Sequence[Any], device: torch.device) -> Tensor:
    """Send int64 numbers to a device without waiting."""
    host = _room(len(values), device)
    host.numpy()[:] = values
    return move_to(host, device)


class DeviceTable:
    """int64 numbers on a device, sent again when they change; graphs keep what they were captured with."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._values: Any = None
        self._tensor: Tensor | None = None
        # Not every torch gives pinned memory while a graph is captured, so some is had before.
        self._spare: Tensor | None = _room(count, device)

    def get(self, values: Any, captured: list[Any] | None) -> Tensor:
        """Return the device tensor of an array; `captured`: where a graph under capture keeps its tensors."""
        if self._tensor is not None and np.array_equal(values, self._values):
            tensor = self._tensor
            if captured is not None:
                captured.append(tensor)
        elif captured is None:
            tensor = upload(values, self._device)
            self._values, self._tensor = values, tensor
        else:
            host, self._spare = self._spare, None
            if host is None:
                host = _room(len(values), self._device)
            host.numpy()[:] = values
            tensor = move_to(host, self._device)
            captured += [host, tensor]
        if self._spare is None and captured is None:
            self._spare = _room(len(values), self._device)
        return tensor


class UpdatePlan:
    """The address table of one group on one device and its work items by variant of the kernel."""

    def __init__(
        self, bundles: Sequence[TensorGroup], rows: Any, aligned: Any, facts: Any, device: torch.device
    ) -> None:
        self.facts, self.size = facts, len(rows)
        items: dict[tuple[int, int, int, bool, bool], list[int]] = {}
        weights = [(bundle, weight) for bundle in bundles for weight in bundle.weights]
        for i, ((bundle, weight), alignments) in enumerate(zip(weights, aligned.T.tolist())):
            formats = (bundle.kind, GRADS[bundle.grad_dtype], bundle.state_kind)
            even = end = weight.numel()
            if bundle.widths is not None:
                (lines, blocks), width = storage.exponents_shape(weight), storage.width_of(weight)
                end = lines * blocks
                even = end if width % WIDE == 0 else end - 1 if lines == 1 else 0
            most = ITEM if bundle.widths is None else BLOCKS
            items.setdefault((*formats, *alignments), []).extend(_items_of(i, 0, even, most))
            items.setdefault((*formats, False, False), []).extend(_items_of(i, even, end, most))
        self.table = upload(rows.ravel(), device)
        self.items = {
            key: (upload(numbers, device), len(numbers) // 3) for key, numbers in items.items() if numbers
        }
        self.numbers = DeviceTable(self.size + HYPER, device)
        self.rows = torch.empty(self.size * 8, dtype=torch.float32, device=device)
        self.keys = torch.empty(self.size, dtype=torch.int32, device=device)


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
            numbers = items.setdefault((GRADS[dtype], aligned), [])
            for start in range(0, size, ITEM):
                numbers += [i, start, min(start + ITEM, size), self.count]
                self.count += 1
        self.items = {key: (upload(numbers, device), len(numbers) // 4) for key, numbers in items.items()}
        self.grads = DeviceTable(self.size, device)
        self.sums = torch.empty(self.count * 3, dtype=torch.float32, device=device)
        self.peaks = torch.empty(self.count, dtype=torch.int32, device=device)


def _items_of(index: int, first: int, end: int, most: int) -> Iterator[int]:
    for start in range(first, end, most):
        yield from (index, start, min(start + most, end))


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
            plans = [p for (plan_key, _), p in self._plans.items() if plan_key == key and fits(p)]
            if not plans:
                raise UnsupportedError(
                    "a CUDA graph can capture this step only after it ran outside of the graph with the same "
                    "parameters and gradient dtypes: take a few steps first, as torch's notes on graphs do"
                )
            self._captured.append(plans[-1])
            return plans[-1]
        plan = self._plans.get((key, stream))
        if plan is None or not fits(plan):
            plan = make()
            several = [plan_key for plan_key, p in self._plans.items() if p.size > 1]
            if plan.size > 1 and len(several) >= KEPT:
                del self._plans[several[0]]
            self._plans[key, stream] = plan
        return plan

    def _keeper(self, device: torch.device) -> list[Any] | None:
        return self._captured if capturing(device) else None

    @torch.no_grad()
    def update(
        self,
        bundles: Sequence[TensorGroup],
        factors: tuple[Number, Number | Clip],
        found_inf: bool | Tensor | None,
        out_of_range: Tensor | None,
        seed: int,
    ) -> None:
        """Update the bundles of one group on one device, without reading anything back.

        The inverse scale and the clip factor in `factors` multiply the gradients. `out_of_range` is set
        where a weight left the range of its master.
        """
        device, group, code = bundles[0].device, bundles[0].group, bundles[0].algorithm.code
        hyper, lr = _hyper_of(group, device)
        skip = None
        if isinstance(found_inf, Tensor):
            skip = move_to(found_inf, device, torch.bool).view(torch.uint8)
        tables = [bundle.table(LINES) for bundle in bundles]
        for bundle, table in zip(bundles, tables):
            if bundle.rounds_randomly:
                table[KEY] = bundle.base_keys(seed)
        whole = np.concatenate(tables, 1)
        rows, places = whole[ROW].T.copy(), whole[GRAD]
        stored_aligned = (whole[[WEIGHT, EXTRA, STATES, STATES + 1]] % WIDE == 0).all(0)
        aligned = np.stack((stored_aligned, places % WIDE == 0))  # whether wide loads can read each
        kinds = [(b.kind, b.grad_dtype, b.state_kind, b.elements, b.widths) for b in bundles]
        facts = kinds, rows.tobytes(), aligned.tobytes()  # of which a plan is made
        key = ("update", int(rows[0, 0]), len(places))
        plan: UpdatePlan = self._find(
            key,
            device,
            lambda p: p.facts == facts,
            lambda: UpdatePlan(bundles, rows, aligned, facts, device),
        )
        keep = self._keeper(device)
        if keep is not None:
            keep += [bundles, out_of_range]
        numbers = plan.numbers.get(np.concatenate((places, np.array(hyper).view(np.int64))), keep)
        grads, settings = numbers, numbers[plan.size :].view(torch.float64)
        sign = -1.0 if group["maximize"] else 1.0
        factor, inverse, clip, limit = _factors(*factors, sign, device)
        count = plan.size
        cuda.launch(
            kernels().scalars, device, -(-count // LANES), plan.table, plan.rows, plan.keys, settings,
            lr, skip, factor, inverse, clip, limit, count, ALGORITHM=code, LANES=LANES,
        )  # fmt: skip
        for (kind, grad, state, aligned, grad_aligned), (items, programs) in plan.items.items():
            cuda.launch(
                kernels().update, device, programs, plan.table, grads, items, plan.rows, plan.keys, skip,
                out_of_range, ALGORITHM=code, KIND=kind, GRAD=grad, STATE=state, ALIGNED=aligned,
                GRAD_ALIGNED=grad_aligned, TILE=TILE, num_warps=2 if state == L.STATE_8BIT else 4,
            )  # fmt: skip
        for bundle in bundles:
            increment_version(bundle.params)

    def measure(self, grads: Sequence[Tensor], inv_scale: Number) -> GradStats:
        """Return finite flag, norm and largest magnitude of flat gradients on a device, in one read of each.

        Squares are added up in fp32 within a work item (in three ranges, so that none overflows or vanishes)
        and in float64 over items, always in the same order: the same gradients give the same bits.
        """
        device = grads[0].device
        sizes, dtypes = tuple(map(Tensor.numel, grads)), tuple(map(_dtypes, grads))
        places = np.array(list(map(Tensor.data_ptr, grads)), np.int64)
        aligned: Any = places % WIDE == 0
        key = ("measure", sizes, dtypes, aligned.tobytes())
        plan: MeasurePlan = self._find(
            key, device, lambda p: True, lambda: MeasurePlan(sizes, dtypes, aligned.tolist(), device)
        )
        table = plan.grads.get(places, self._keeper(device))
        flags = torch.empty(2, dtype=torch.bool, device=device)
        norm_and_amax = torch.empty(2, dtype=torch.float32, device=device)
        for (grad, aligned), (items, programs) in plan.items.items():
            cuda.launch(
                kernels().measure, device, programs, table, items, plan.sums, plan.peaks,
                GRAD=grad, ALIGNED=aligned, TILE=TILE,
            )  # fmt: skip
        factor, inverse, _, _ = _factors(inv_scale, None, 1.0, device)
        cuda.launch(
            kernels().total, device, 1, plan.sums, plan.peaks, plan.count, factor, inverse,
            flags.view(torch.uint8), norm_and_amax, LANES=1024,
        )  # fmt: skip
        stats = KernelStats(flags[0], norm_and_amax[0], norm_and_amax[1])
        stats.found_inf = flags[1]
        return stats


class Triton(Backend):
    """Two launches measure the gradients of a device, two for each parameter group update it."""

    on_host = False

    def __init__(self, errors: RangeErrors) -> None:
        self._errors, self.plans = errors, Plans()

    def measure(self, groups: Sequence[TensorGroup], inv_scale: Scalar, params: Sequence[Tensor]) -> AnyStats:
        """Return the stats as 0-d tensors of the device."""
        grads = [grad for group in groups for grad in group.grads]
        return self.plans.measure(grads, inv_scale) if grads else measure([])

    def update(self, groups: Sequence[TensorGroup], decision: Decision, seed: int, measures: bool) -> bool:
        """Update all groups of a parameter group on a device in one launch for each way they are stored."""
        joined: dict[tuple[int, torch.device], list[TensorGroup]] = {}
        for group in groups:
            joined.setdefault((group.number, group.device), []).append(group)
        for (number, device), those in joined.items():
            bounded = any(group.kind == L.FP16_EXACT for group in those)
            flag = self._errors.flag(device) if bounded else None
            self.plans.update(those, decision.factors(number), decision.skip, flag, seed)
        return False


def _hyper_of(group: Group, device: torch.device) -> tuple[tuple[float, ...], Tensor | None]:
    """Return the arguments of the kernel `scalars`, and a learning rate that is on the device."""
    lr = group["lr"]
    on_device = isinstance(lr, Tensor) and device.type in ("cpu", lr.device.type)
    pair = group["betas"] if "betas" in group else (group["momentum"], group["dampening"])
    pair = tuple(map(float, pair))
    if "betas" in group:
        check_betas(pair)
    rest = group["weight_decay"], *pair, group.get("eps", 0.0), group.get("bias_correction", True)
    return (0.0 if on_device else float(lr), *map(float, rest)), lr.detach().to(device) if on_device else None


def _factors(
    inv_scale: Number, clip: Number | Clip, sign: float, device: torch.device
) -> tuple[float, Tensor | None, Tensor | None, float | None]:
    """Return factors multiplied in fp32, tensors as 0-d fp32 on the device, and the limit of a norm."""
    limit = None
    if isinstance(clip, Clip):
        limit = float(clip.limit) if _is_here(clip.norm, device) else None
        clip = clip_coefficient(*clip) if limit is None else clip.norm
    product, tensors = sign, list[Tensor | None]()
    for factor in (inv_scale, clip):
        if _is_here(factor, device):
            tensors.append(move_to(factor.detach(), device, torch.float32))
        else:
            tensors.append(None)
            product = product if factor is None else as_float32(product * as_float32(float(factor)))
    return product, tensors[0], tensors[1], limit


def _is_here(value: Any, device: torch.device) -> TypeIs[Tensor]:
    """Whether it is a tensor that a kernel on `device` can read, there or after a copy without waiting."""
    return isinstance(value, Tensor) and (value.device.type != "cpu" or device.type == "cpu")
