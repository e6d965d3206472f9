"""Who else sees a step of an optimizer: torch's hooks and its profiler."""

import torch

from halfstep.torch_private import global_step_post_hooks, global_step_pre_hooks, profiling, step_hooks


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook runs around the step, or a profiler."""
    return bool(any(step_hooks(optimizer)) or global_step_pre_hooks or global_step_post_hooks or profiling())
