"""Many ranks as one run: reductions, gradients in 16 bits, shards in the order that works, uneven batches."""

from halfstep.distributed.hooks import Traffic, compress_hook, ordered_hook
from halfstep.distributed.joining import join, joins_alone
from halfstep.distributed.reduce import (
    all_ranks,
    gather,
    gather_on_first,
    joined,
    local_of,
    norms_of_stages,
    rank,
    shard_groups,
    started_by_torchrun,
    sums_over,
    whole_norms,
    world_size,
)
from halfstep.distributed.same_gradients import SameGradients
from halfstep.distributed.shards import ddp_around, first_element, is_ordered, is_sharded, shard
from halfstep.distributed.watchdog import watchdog

__all__ = [
    "SameGradients",
    "Traffic",
    "all_ranks",
    "compress_hook",
    "ddp_around",
    "first_element",
    "gather",
    "gather_on_first",
    "is_ordered",
    "is_sharded",
    "join",
    "joined",
    "joins_alone",
    "local_of",
    "norms_of_stages",
    "ordered_hook",
    "rank",
    "shard",
    "shard_groups",
    "started_by_torchrun",
    "sums_over",
    "watchdog",
    "whole_norms",
    "world_size",
]


def __dir__() -> list[str]:
    return __all__
