"""Clocks of a GPU that tell the device from the host, and the same calls on a CPU to rehearse with."""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], object]
CYCLES = 2_000_000
"""At least a millisecond of the device's clock."""


def median_ms(work: Callable[[], float], rounds: int) -> float:
    """The median of what `work` returns, in milliseconds."""
    return round(statistics.median(work() for _ in range(rounds)), 4)


def host_ms(clock: "Gpu", work: Work, rounds: int) -> float:
    """Milliseconds until `work` is in the device's queue, which is empty before."""

    def once() -> float:
        clock.synchronize()
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3

    return median_ms(once, rounds)


class Gpu:
    """The current CUDA device."""

    device = torch.device("cuda")
    backend = "triton"

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def facts(self) -> dict[str, Any]:
        """What a result says of the device."""
        import triton

        p = torch.cuda.get_device_properties(self.device)
        memory = f"{p.total_memory / 2**30:.0f} GiB"
        versions = {"cuda": torch.version.cuda, "triton": triton.__version__}
        return {"gpu": p.name, "multiprocessors": p.multi_processor_count, "memory": memory, **versions}

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def device_ms(self, work: Work, rounds: int) -> float:
        """Milliseconds that the device takes for `work`: it sleeps while the host fills its queue."""
        sleep = int(CYCLES * (5 + 2 * host_ms(self, work, 3)))

        def once() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(sleep)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end)

        return median_ms(once, rounds)

    def capture(self, work: Work) -> Work:
        """`work` in a CUDA graph: what replays it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def launches(self, work: Work) -> int:
        """Kernels, copies and fills that `work` puts on the device."""
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
            ) as profile:
                work()
                torch.cuda.synchronize()
            return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())

    def peak_mib(self, work: Work) -> float:
        """Memory that `work` has at most beside what is held before it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)

    def forget(self) -> None:
        """Give back memory that nothing uses."""
        torch.cuda.empty_cache()


class Rehearsal(Gpu):
    """A CPU that answers the same calls, so that every part is seen to run; its numbers mean nothing."""

    device = torch.device("cpu")

    def name(self) -> str:
        return "rehearsal"

    def facts(self) -> dict[str, Any]:
        return {"gpu": "none: a rehearsal on a CPU, whose numbers mean nothing"}

    def synchronize(self) -> None: ...

    def device_ms(self, work: Work, rounds: int) -> float:
        return host_ms(self, work, rounds)

    def capture(self, work: Work) -> Work:
        return work

    def launches(self, work: Work) -> int:
        work()
        return 0

    def peak_mib(self, work: Work) -> float:
        work()
        return 0.0

    def forget(self) -> None: ...
