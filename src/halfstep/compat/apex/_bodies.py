"""What must hold in the body of `amp.scale_loss`: no step of its optimizers, a backward of its loss."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import Tensor

from halfstep.compat.apex._account import Account
from halfstep.errors import HalfstepWarning


@contextmanager
def no_steps(accounts: Sequence[Account]) -> Generator[None]:
    """Within, a step of these optimizers is an error: their gradients carry the scale."""
    for account in accounts:
        account.inside += 1
    try:
        yield
    finally:
        for account in accounts:
            account.inside -= 1


@contextmanager
def backward_of(scaled: Tensor, told: set[str]) -> Generator[None]:
    """Say once that no backward of the scaled loss ran within: the gradients are unscaled all the same."""
    ran: list[bool] = []

    def note(gradient: Tensor) -> None:
        ran.append(True)

    hook = scaled.register_hook(note) if scaled.requires_grad else None
    yield
    if hook is None:
        return
    hook.remove()
    if not ran and "unseen" not in told:
        told.add("unseen")
        warnings.warn(
            "no backward of the scaled loss ran inside amp.scale_loss, yet the gradients are now divided by "
            "its scale: write scaled_loss.backward() inside, not loss.backward() (said once)",
            HalfstepWarning,
            stacklevel=5,
        )
