"""Uneven batches: ranks that have run out go on answering the session's collectives until all are done."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import ConfigError
from halfstep.torch_private import is_joining, joined_rank

if TYPE_CHECKING:
    from torch import nn


_ANSWERED: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def join(ddp: nn.Module, session: Any, **options: Any) -> Generator[None]:
    """Within, ranks may have different numbers of batches: `with hs.distributed.join(ddp, amp): ...`.

    torch's `ddp.join()` answers DDP's collectives for ranks that have run out, and knows nothing of the
    session's own (whether any rank found inf); here those are answered too, and the loss scale follows, so
    that scale and counts are the same on all ranks afterwards. Weights and fp32 masters are then
    those of the last rank with a batch; states of optimizers on ranks that ran out stay behind, so rebuild
    them or end the run here.
    `options` go to `torch.distributed.algorithms.Join` (`throw_on_early_termination`,
    `divide_by_initial_world_size`). One optimizer and no gradient accumulation within.
    """
    from torch.distributed.algorithms.join import Join, Joinable, JoinHook

    if not isinstance(ddp, Joinable):
        raise ConfigError(
            f"join got a {type(ddp).__name__}: pass the DistributedDataParallel and the session"
        )

    class Hook(JoinHook):
        def main_hook(self) -> None:
            session.step_without_batch()

        def post_hook(self, is_last_joiner: bool) -> None:
            session.take_masters(ddp, joined_rank(ddp))

    class Shadow(Joinable):
        def __init__(self) -> None:
            super().__init__()

        def join_hook(self, **kwargs: Any) -> JoinHook:
            return Hook()

        @property
        def join_device(self) -> torch.device:
            return session.device

        @property
        def join_process_group(self) -> Any:
            return ddp.process_group

    with Join([ddp, Shadow()], **options):
        _ANSWERED.add(ddp)
        try:
            yield
        finally:
            _ANSWERED.discard(ddp)


def joins_alone(ddp: Any) -> bool:
    """Whether `ddp` is inside torch's own join, in which nobody answers for the session."""
    return is_joining(ddp) and ddp not in _ANSWERED
