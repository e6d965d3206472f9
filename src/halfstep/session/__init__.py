"""`prepare` and the session it gives: checked steps over autocast, conversion, masters and loss scale."""

from halfstep.session.prepare import prepare, tune
from halfstep.session.session import Session
from halfstep.session.setup import revert

__all__ = [
    "Session",
    "prepare",
    "revert",
    "tune",
]
