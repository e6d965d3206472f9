"""Who else sees a step of an optimizer: torch's hooks and its profiler."""

import torch
from torch.optim.optimizer import (  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook runs around the step, or a profiler."""
    return bool(
        optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
        or optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()  # pyright: ignore
    )
