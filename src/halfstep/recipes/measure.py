"""Measuring a training step: time, peak memory, bytes saved for backward, and what bounds it.

Every figure comes from a step of its own, so that counting does not disturb timing. Times are taken in turns,
one step of each setting after the other, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from halfstep.report.comparison import Bound, OpCost
from halfstep.torch_private import TorchDispatchMode, schema_of
from halfstep.trees import tensors_in
from halfstep.tuning.engine import clock_of
from halfstep.tuning.op_times import StepTimes, without_remarks

Step = Callable[[], Any]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


#: So many rounds after each other make one time, their median: a single slow round says nothing.
_BLOCK = 3


def noise(seconds: Sequence[float]) -> float:
    """How far the medians of every three rounds after each other lie apart, as a share of their median.

    0 for less than six rounds, which make no two of them.
    """
    blocks = [median(seconds[i : i + _BLOCK]) for i in range(0, len(seconds) - _BLOCK + 1, _BLOCK)]
    return (max(blocks) - min(blocks)) / median(blocks) if len(blocks) > 1 else 0.0


def rounds_in_turn(
    steps: Sequence[Step], device: torch.device, rounds: int, warm_up: int = 2
) -> tuple[list[list[float]], list[list[float]]]:
    """Return seconds, and seconds of processor time, of each step in each of `rounds` rounds.

    In a round every step runs once. Processor time counts all threads of this process, and no other's.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    processor: list[list[float]] = [[] for _ in steps]
    for turn in range(warm_up + rounds):
        for step, times, own_times in zip(steps, seconds, processor):
            _wait(device)
            started, own_started = time.perf_counter(), time.process_time()
            step()
            _wait(device)
            if turn >= warm_up:
                times.append(time.perf_counter() - started)
                own_times.append(time.process_time() - own_started)
    return seconds, processor


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Storage address -> its bytes; tensors that share a storage count once."""
    sizes = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def bytes_saved_by(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Return bytes that autograd keeps between `forward` and backward, without the parameters themselves.

    Counted from the tensors handed to `torch.autograd.graph.saved_tensors_hooks`: each storage once, whole.
    """
    param_storages = storage_bytes(parameters)
    saved_storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved_storages.update(storage_bytes([tensor]))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    del loss
    return sum(size for address, size in saved_storages.items() if address not in param_storages)


@contextmanager
def memory_peak(resident: Iterable[Tensor], device: torch.device) -> Generator[list[int]]:
    """Peak bytes of tensors inside the block, allocator-exact: the one entry of the list, once it has ended.

    CUDA: its allocator's own peak. CPU: the `resident` tensors (weights, masters, optimizer states, batch),
    each storage once, plus the highest running sum of the allocations and releases that the profiler
    reports from torch's allocator meanwhile. Scratch space inside kernels and the process itself are left
    out.
    """
    peak: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.append(torch.cuda.max_memory_allocated(device))
        return
    before = sum(storage_bytes(resident).values())
    # acc_events: without it torch 2.11 warns in every process.
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with without_remarks(), watched as session:
        yield peak
    events: Any = session.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = highest = 0
    for _, change in changes:
        live += change
        highest = max(highest, live)
    peak.append(before + highest)


@dataclass(frozen=True)
class Work:
    """What one step does: floating-point operations by dtype, bytes read and written, ops dispatched."""

    flops: Mapping[str, int]
    bytes: int
    ops: int


_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

_CPU_FLOPS: Mapping[str, Callable[[Any, Tensor], int]] = {
    "mkldnn::_linear_pointwise": lambda args, out: 2 * out.numel() * args[0].shape[-1],
    _ATTENTION: lambda args, out: 4 * args[0].numel() * args[1].shape[-2],
    f"{_ATTENTION}_backward": lambda args, out: 10 * args[1].numel() * args[2].shape[-2],
}
"""(arguments, first output) -> operations of CPU kernels that torch's flop_registry does not know.

Attention: two products forward, five backward (one is recomputed), counted whole also where it is causal.
"""


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry

        self.registry: Mapping[Any, Any] = flop_registry
        self.flops: dict[str, int] = defaultdict(int)
        self.bytes = self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        if func.is_view or not outputs:
            return out
        self.ops += 1
        self.bytes += sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        formula, ours = self.registry.get(func.overloadpacket), _CPU_FLOPS.get(schema_of(func).name)
        if formula is not None or ours is not None:
            dtype = next(t.dtype for t in inputs if t.is_floating_point())
            count = formula(*args, **kwargs, out_val=out) if formula else ours(args, outputs[0])  # type: ignore[misc]
            self.flops[str(dtype).removeprefix("torch.")] += count
        return out


def work_of(step: Step) -> Work:
    """Count one step's work op by op, at the level of aten calls (fused kernels count as one op)."""
    with _Counter() as counter:
        step()
    return Work(dict(counter.flops), counter.bytes, counter.ops)


def _best(action: Step, device: torch.device, least: int = 5, budget: float = 0.05) -> float:
    # The best of many: other processes can only make a sample slower.
    action()
    clock, best = clock_of(device), float("inf")
    until = time.perf_counter() + budget
    while least > 0 or time.perf_counter() < until:
        least -= 1
        started = clock()
        action()
        best = min(best, clock() - started)
    return best


@lru_cache(maxsize=16)
def matmul_rate(device: torch.device, dtype: str, size: int = 768) -> float:
    """Measured floating-point operations a second of a square matmul of `size` in `dtype`."""
    a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    return 2 * size**3 / _best(lambda: a @ a, device)


@lru_cache(maxsize=16)
def copy_rate(device: torch.device, elements: int = 1 << 22) -> float:
    """Measured bytes a second (read plus written) of an fp32 copy of `elements`."""
    a = torch.ones(elements, device=device)
    b = torch.empty_like(a)
    return 8 * elements / _best(lambda: b.copy_(a), device)


@lru_cache(maxsize=4)
def op_latency(device: torch.device, calls: int = 300) -> float:
    """Measured seconds of one op on a tensor too small to matter."""
    a = torch.ones(8, device=device)

    def run() -> None:
        for _ in range(calls):
            a.add(1.0)

    return _best(run, device) / calls


def costliest(times: StepTimes, full: StepTimes | None, count: int = 5) -> list[OpCost]:
    """The ops that cost most of a step, each with its seconds in fp32 (None where that is not known)."""
    fp32_seconds = {} if full is None else {op.key: op.seconds for op in full.ops}
    return [OpCost(**vars(op), fp32=fp32_seconds.get(op.key)) for op in times.ops[:count]]


def find_bound(work: Work, device: torch.device) -> Bound:
    """A roofline with three roofs: work divided by this device's measured matmul, copy and dispatch speeds.

    The copy speed is taken at the step's mean tensor size, since small tensors stay in the cache.
    """
    mean = work.bytes // max(1, 8 * work.ops)
    elements = min(1 << 22, max(1 << 10, 1 << mean.bit_length()))
    return Bound(
        arithmetic=sum(count / matmul_rate(device, dtype) for dtype, count in work.flops.items()),
        memory=work.bytes / copy_rate(device, elements),
        latency=work.ops * op_latency(device),
        flops=sum(work.flops.values()),
        bytes=work.bytes,
        ops=work.ops,
    )
