"""Progress of long work on standard error: a bar on a terminal, else a line at least every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from halfstep.cli._output import console


class ShowProgress(Protocol):
    """Takes the name of what is going on and, where it is known, which share of the whole is done."""

    def __call__(self, name: str, share: float | None = None, /) -> None: ...


_EVERY = 10.0


@contextmanager
def progress(what: str, quiet: bool, every: float = _EVERY) -> Generator[ShowProgress]:
    """Show work that `what` names; without a terminal by lines such as `training text-gpt` unless `quiet`.

    Where nothing was printed for `every` seconds a line tells how far the work is, also within a long step.
    """
    if sys.stderr.isatty():
        from rich.progress import Progress

        with Progress(console=console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)

            def show(name: str, share: float | None = None, /) -> None:
                bar.update(task, description=name, completed=share, total=None if share is None else 1.0)

            yield show
    elif quiet:
        yield lambda name, share=None: None
    else:
        lines = _Lines(what, every)
        beat = threading.Thread(target=lines.beat, daemon=True)
        beat.start()
        try:
            yield lines.report
        finally:
            lines.ended.set()
            beat.join()


def time_left(seconds: float, share: float) -> str:
    """About how long the rest takes, where it goes on as fast as before."""
    rest = seconds / share * (1.0 - share)
    return f"about {rest / 60:.0f} min left" if rest >= 90 else f"about {rest:.0f} s left"


class _Lines:
    """A line where work begins, for each new name without a share, and after `every` silent seconds."""

    def __init__(self, what: str, every: float) -> None:
        self.what, self.every = what, every
        self.name = ""
        self.share: float | None = None
        self.started = self.printed = time.monotonic()
        self.ended = threading.Event()

    def report(self, name: str, share: float | None = None, /) -> None:
        if share is None and name != self.name:
            self._print(f"{self.what} {name}")
        elif not self.name:
            self._print(self.what)
        self.name, self.share = name, share

    def beat(self) -> None:
        while not self.ended.wait(max(0.01, self.printed + self.every - time.monotonic())):
            now = time.monotonic()
            if now - self.printed >= self.every:
                seconds = now - self.started
                parts = [f"{seconds:.0f} s"]
                if self.share and self.share < 1.0:
                    parts = [f"{100 * self.share:.0f} %", *parts, time_left(seconds, self.share)]
                self._print(f"  {self.name or self.what}: {', '.join(parts)}")

    def _print(self, line: str) -> None:
        self.printed = time.monotonic()
        print(line, file=sys.stderr, flush=True)
