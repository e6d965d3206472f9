"""`prepare` and the session it gives: checked steps over autocast, conversion, masters and loss scale."""

from halfstep.session.prepare import prepare, tune
from halfstep.session.registry import revert
from halfstep.session.session import Session

__all__ = [
    "Session",
    "prepare",
    "revert",
    "tune",
]
