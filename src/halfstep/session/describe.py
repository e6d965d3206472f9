"""What `print(session)` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfstep.casting.kernel_facts import does_not_pay
from halfstep.casting.kernel_probes import measurements
from halfstep.formats import dtype_name
from halfstep.policy.levels import LOW_DTYPES

if TYPE_CHECKING:
    from halfstep.session.session import Session


def one_line(session: Session) -> str:
    """Level, policy, optimizers, scale and counts."""
    kinds = ", ".join(type(one).__name__ for one in session.optimizers) or "none"
    return (
        f"Session(level={session.level.name}, policy={session.policy}, optimizers=[{kinds}], "
        f"loss_scale={_scales(session)}, steps={session.steps}, skips={session.skips.total})"
    )


def _scales(session: Session) -> str:
    """The loss scale, or the list of several losses'."""
    return str(session.loss_scale if len(session.loss_scales) == 1 else list(session.loss_scales))


def in_words(session: Session) -> str:
    """The same for people, with the layout, and what "auto" measured or that the level does not pay."""
    level, policy = session.level, session.policy
    kinds = ", ".join(type(one).__name__ for one in session.optimizers) or "no optimizer"
    read = ", ".join(f"{scale.read():g}" for scale in session.loss_scales)
    lines = [
        f"{level.name} ({level.summary}): {policy} on {session.device}, {type(session.loss_scale).__name__}",
        f"{kinds}: {session.steps} steps, {session.skips.total} skipped, loss scale {read}",
    ]
    if session.layout:
        lines.append("convolution weights in channels_last")
    low = policy.compute_dtype in LOW_DTYPES and session.device.type == "cpu"
    if session.tuning is not None:
        lines.append(session.tuning.reason)
    elif low and session.kernels.measures:
        name = dtype_name(policy.compute_dtype)
        lines.append(does_not_pay(measurements.known(), name, torch.get_num_threads()) or "")
    return "\n".join(line for line in lines if line)
