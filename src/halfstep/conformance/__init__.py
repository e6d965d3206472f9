"""A battery of checks for new devices, and a probe of what torch's own casting does."""

from halfstep.conformance.battery import GROUPS, Check, run_battery

__all__ = [
    "GROUPS",
    "Check",
    "run_battery",
]
