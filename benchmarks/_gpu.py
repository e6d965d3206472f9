"""What the parts of gpu.py share: rows, clocks that tell the device from the host, memory, launches, graphs.

A number with a spread is [median, least, most]. With HALFSTEP_GPU_TINY=1 everything is small and short, to
rehearse on a machine without a GPU; the numbers mean nothing then.
"""

import gc
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from halfstep.kernels.cuda import launch as cuda

Work = Callable[[], object]
Spread = list[float]
TINY = os.environ.get("HALFSTEP_GPU_TINY") == "1"
ROUNDS = 2 if TINY else 15
DEVICE = torch.device("cuda", 0)
CYCLES = 2_000_000
"""At least a millisecond of the device's clock."""
MIB = 2**20


def row(name: str, work: Callable[[], Any]) -> Any:
    """Print what `work` finds as a row; where it fails the error is the row, and the part goes on."""
    try:
        value = work()
    except Exception:
        value = {"error": traceback.format_exc()[-1800:]}
    _print(name, value)
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:  # after an illegal address nothing runs in this process any more
        _print("the device", {"error": f"lost: {error}"[:300]})
        sys.stdout.flush()
        os._exit(3)
    return value


def _print(name: str, value: Any) -> None:
    print("ROW " + json.dumps([name, value], default=str), flush=True)


def failed(value: Any) -> bool:
    """Whether a row says that something went wrong."""
    return isinstance(value, dict) and "error" in value


def spread(values: list[float], digits: int = 4) -> Spread:
    """Median, least and most."""
    return [round(of(values), digits) for of in (statistics.median, min, max)]


def host_ms(work: Work, rounds: int = ROUNDS) -> Spread:
    """Milliseconds until `work` is in the device's queue, which is empty before."""
    times: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize()
    return spread(times)


def device_ms(work: Work, rounds: int = ROUNDS) -> Spread:
    """Milliseconds that the device takes for `work`: it sleeps while the host fills its queue."""
    for _ in range(3):
        work()
    sleep, times = int(CYCLES * (5 + 2 * host_ms(work, 3)[0])), list[float]()
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(sleep)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(1.0 if TINY else start.elapsed_time(end))  # what rehearses has no time of its own
    return spread(times)


def steps_ms(work: Work, count: int, rounds: int = 3) -> Spread:
    """Milliseconds a step of `count` in a row, from an idle device to an idle device."""
    times: list[float] = []
    for _ in range(1 if TINY else rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(2 if TINY else count):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3 / (2 if TINY else count))
    return spread(times)


def memory(work: Work) -> dict[str, int]:
    """MiB of the device while `work` runs: the peak of all, and how far it is above what was held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {"peak_mib": round(peak / MIB), "peak_above_start_mib": round((peak - before) / MIB)}


def launches(work: Work) -> list[str]:
    """Kernels, copies and fills that `work` puts on the device, by name and time."""
    torch.cuda.synchronize()
    if TINY:  # what rehearses has no profiler
        work()
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            work()
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [f"{event.name[:60]} {event.device_time:.1f} us" for event in events]


def graph_ms(work: Work) -> Spread | str:
    """Milliseconds of a replay of `work` captured in a CUDA graph, or why it cannot be captured."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return device_ms(graph.replay)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def time_only() -> None:
    """In a rehearsal leave the kernels out: in Triton's interpreter a step can take half a minute."""
    if TINY:
        cuda.launch = lambda *args, **constants: None


def label_of_ours() -> str:
    """What the names of our rows begin with; where no kernel runs they say so, or nobody would see it."""
    return "halfstep IN PLAIN TORCH" if cuda.why_not(DEVICE) else "halfstep"


def gpt2(large: bool = False) -> Iterator[tuple[int, ...]]:
    """The parameters of GPT-2 small (124,439,808 elements in 148 tensors), or of 1.3 billion; layers tied."""
    width, layers, tokens, context = (2048, 24, 50257, 1024) if large else sizes()
    if TINY:
        width, layers, tokens, context = sizes()
    yield from ((tokens, width), (context, width))
    for _ in range(layers):
        for rows in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            yield from (rows, (rows[1],))
        yield from ((width,),) * 4
    yield from ((width,),) * 2


def sizes() -> tuple[int, int, int, int]:
    """Width, layers, tokens and context of GPT-2 small."""
    return (48, 1, 101, 64) if TINY else (768, 12, 50257, 1024)
