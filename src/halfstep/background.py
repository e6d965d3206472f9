"""Work that goes on in a thread while training does, one piece at a time; its error is never lost.

The thread is no daemon: an interpreter that ends waits for a file that is being written. An error that
nobody has asked for by then is told on standard error.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from typing import Any


class Background:
    """At most one piece of work under way; the next one, or `wait`, raises the error of the one before."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._watching = False

    def start(self, work: Callable[[], Any]) -> None:
        """Begin `work` in a thread, after the piece before it is done."""
        self.wait()
        if not self._watching:
            self._watching = True
            atexit.register(self._tell)
        self._thread = threading.Thread(target=self._run, args=(work,), name="halfstep saves", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is under way; raises what the last piece raised, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error

    def _tell(self) -> None:
        if self._error is not None:
            print(f"halfstep: {self._error}", file=sys.stderr)
