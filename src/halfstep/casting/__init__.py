"""Ops under a precision policy: the `autocast` region and what goes with it."""

from halfstep.casting.context import active_policy, autocast, disabled
from halfstep.casting.custom_function import custom_bwd, custom_fwd
from halfstep.casting.frozen import frozen_weights

__all__ = [
    "active_policy",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "disabled",
    "frozen_weights",
]
