"""A small thread pool for kernels that release the interpreter lock; it has as many threads as torch uses.

Numba's own `parallel=True` brings a second OpenMP runtime next to torch's; these threads only exist while
more than one is asked for, and are made anew in a forked child.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="halfstep")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)


def run_ranges(kernel: Callable[..., Any], sizes: Sequence[int], *args: Any) -> None:
    """Call `kernel(first, last, *args)` over items 0..len(sizes)-1, in parts of about equal total size."""
    threads = min(torch.get_num_threads(), len(sizes))
    if threads <= 1:
        kernel(0, len(sizes), *args)
        return
    cuts, goal, done = [0], sum(sizes) / threads, 0.0
    for i, size in enumerate(sizes):
        done += size
        if done >= goal * len(cuts) and len(cuts) < threads:
            cuts.append(i + 1)
    cuts.append(len(sizes))
    parts = list(itertools.pairwise(cuts))
    waiting = [_workers(threads - 1).submit(kernel, a, b, *args) for a, b in parts[1:] if a < b]
    kernel(*parts[0], *args)
    for future in waiting:
        future.result()
