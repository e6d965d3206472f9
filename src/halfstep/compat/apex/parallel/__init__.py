"""`apex.parallel` names over torch's own: wrap a model after `amp.initialize`."""

from __future__ import annotations

import atexit
import gc
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from halfstep.compat.apex.parallel.LARC import LARC
from halfstep.errors import UnsupportedError
from halfstep.torch_private import pytree

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

_CHANNEL_LAST = (
    "channel_last=True: here a batch norm of [N, C, ...] runs in either memory format: leave it out, keep "
    "the shape and give the model memory_format=torch.channels_last"
)


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm with Apex's arguments; `fuse_relu` applies a ReLU, after adding `z` where given.

    Raises:
        UnsupportedError: channel_last=True, which means another shape there.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        if channel_last:
            raise UnsupportedError(_CHANNEL_LAST)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """[N, C, ...]."""
        output = super().forward(input)
        output = output if z is None else output + z
        return output.relu() if self.fuse_relu else output


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """The module with every batch norm in it replaced by torch's SyncBatchNorm, its numbers kept.

    Raises:
        UnsupportedError: channel_last=True, which means another shape there.
    """
    if channel_last:
        raise UnsupportedError(_CHANNEL_LAST)
    return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def _sum_hook(always_fp32: bool, average: bool, predivide: float) -> Any:
    """A communication hook: gradients over `predivide`, summed, times predivide / ranks to average."""

    def sum_as_apex(state: Any, bucket: Any) -> Any:
        gradients: Tensor = bucket.buffer()
        sent = (gradients.float() if always_fp32 else gradients).div_(predivide)
        factor = predivide / dist.get_world_size(state) if average else 1.0

        def finish(done: Any) -> Tensor:
            total: Tensor = done.value()[0].mul_(factor)
            return total if total.dtype == gradients.dtype else gradients.copy_(total)

        work: Any = dist.all_reduce(sent, group=state, async_op=True)
        return work.get_future().then(finish)

    atexit.register(gc.collect)  # a DDP model with a Python hook that outlives the interpreter aborts
    # DDP compares annotations with the classes themselves, which string annotations are not.
    sum_as_apex.__annotations__ = {}
    return sum_as_apex


_AT_DEFAULT: dict[str, Any] = {
    "shared_param": None,
    "allreduce_trigger_params": None,
    "retain_allreduce_buffers": False,
    "num_allreduce_streams": 1,
    "allreduce_communicators": None,
    "gradient_average_split_factor": None,
    "prof": False,
}
"""Apex's further options, which torch's DDP refuses beyond their defaults."""


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DDP with Apex's arguments.

    `delay_allreduce=True` sends all gradients at the end of a backward, in one bucket; `message_size` is the
    number of elements in a bucket otherwise. `allreduce_always_fp32`, `gradient_predivide_factor` and
    `gradient_average=False` make the sum as Apex does, by a communication hook; without them torch's own is
    made, which divides by the number of ranks first. torch's own arguments are taken as well.

    Raises:
        TypeError: Apex's options of streams and buffers, where they are not at their defaults.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        allreduce_always_fp32: bool = False,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        **options: Any,
    ) -> None:
        for name, default in _AT_DEFAULT.items():
            if options.get(name) in (default, None):
                options.pop(name, None)
        size = max(message_size * 4 / 2**20, 1e-3)
        if delay_allreduce:
            size = 1 + sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20
        options.setdefault("bucket_cap_mb", size)
        super().__init__(module, **options)
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            hook = _sum_hook(allreduce_always_fp32, gradient_average, gradient_predivide_factor)
            self.register_comm_hook(options.get("process_group"), hook)


class Reducer:
    """Averages gradients over the ranks when asked, not during backward.

    Args:
        module_or_grads_list: a module, whose parameters become rank 0's now and whose gradients `reduce`
            averages; or gradients, in lists, tuples and dicts.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if self.module is not None else pytree.tree_leaves(module_or_grads_list)
        if self.module is not None:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.data, 0)

    def reduce(self) -> None:
        """Average now. Ranks must hold gradients of the same parameters."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        for gradient in grads:
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """The group of `group_size` neighbouring ranks that this rank's batch statistics are shared in.

    0 means all ranks, which is None. All ranks must call this together.

    Raises:
        ValueError: a size that does not divide the number of ranks.
    """
    return dist.new_subgroups(group_size)[0] if group_size else None  # pyright: ignore[reportReturnType]
