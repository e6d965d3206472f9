"""Ops under a precision policy: the `autocast` region and what goes with it."""

from halfstep.casting.context import active_policy, autocast, disabled
from halfstep.casting.functions import custom_bwd, custom_fwd, frozen_weights

__all__ = [
    "active_policy",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "disabled",
    "frozen_weights",
]
