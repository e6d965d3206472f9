"""Progress of long work on standard error: a bar on a terminal, else a line at least every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from halfstep.cli._output import console

Tell = Callable[[str], None]
"""Hears the name of what is going on, once for each step of it."""

_EVERY = 10.0


@contextmanager
def progress(what: str, total: int | None, quiet: bool, every: float = _EVERY) -> Generator[Tell]:
    """Show `total` steps of work; without a terminal by lines such as `training text-gpt O1` unless `quiet`.

    Where nothing was printed for `every` seconds a line tells how far the work is, also within a long step.
    `total` is None where nobody knows it.
    """
    if sys.stderr.isatty():
        from rich.progress import MofNCompleteColumn, Progress

        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda name: bar.update(task, advance=1, description=name)
    elif quiet:
        yield lambda name: None
    else:
        lines = _Lines(what, total, every)
        beat = threading.Thread(target=lines.beat, daemon=True)
        beat.start()
        try:
            yield lines.report
        finally:
            lines.ended.set()
            beat.join()


def _time_left(seconds: float, done: int, total: int | None) -> str:
    """About how long the rest takes, where each step takes as long as those before."""
    if not total or not done:
        return ""
    rest = seconds / done * (total - done)
    return f", about {rest / 60:.0f} min left" if rest >= 90 else f", about {rest:.0f} s left"


class _Lines:
    """A line for each name that begins, and one whenever `every` seconds passed without any."""

    def __init__(self, what: str, total: int | None, every: float) -> None:
        self.what, self.total, self.every = what, total, every
        self.name = ""
        self.done = 0
        self.started = self.printed = time.monotonic()
        self.ended = threading.Event()

    def report(self, name: str) -> None:
        self.done += 1
        if name != self.name:
            self.name = name
            self._print(f"{self.what} {name}")

    def beat(self) -> None:
        while not self.ended.wait(max(0.01, self.printed + self.every - time.monotonic())):
            now = time.monotonic()
            if now - self.printed >= self.every:
                seconds = now - self.started
                share = "" if self.total is None else f"step {self.done} of {self.total} in all, "
                rest_text = _time_left(seconds, self.done, self.total)
                self._print(f"  {self.name or self.what}: {share}{seconds:.0f} s{rest_text}")

    def _print(self, line: str) -> None:
        self.printed = time.monotonic()
        print(line, file=sys.stderr, flush=True)
