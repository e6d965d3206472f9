"""How many of our files a call enters, and how often: what a reader has to know and to follow."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import halfstep

PACKAGE = str(Path(halfstep.__file__).parent)


def profile(call: Callable[[], Any], see: Callable[[str, FrameType, str, Any], None]) -> None:
    """Run a call; `see` is told file, frame, event and value where one of our functions begins or returns."""

    def hook(frame: FrameType, event: str, value: Any) -> None:
        name = frame.f_code.co_filename
        if event in ("call", "return") and name.startswith(PACKAGE):
            see(name[len(PACKAGE) + 1 :], frame, event, value)

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(before)


def files_of(call: Callable[[], Any], counts: Callable[[FrameType, Any], bool] | None = None) -> set[str]:
    """The files of halfstep in which a call returns from a frame that counts; by default each does."""
    entered: set[str] = set()

    def see(name: str, frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and (counts is None or counts(frame, value)):
            entered.add(name)

    profile(call, see)
    return entered


def visits_of(call: Callable[[], Any]) -> int:
    """The uninterrupted stays in one file of halfstep that a call is made of."""
    stays: list[str] = []

    def see(name: str, *_: Any) -> None:
        if stays[-1:] != [name]:
            stays.append(name)

    profile(call, see)
    return len(stays)
