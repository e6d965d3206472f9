"""What every subcommand prints with: one console, tables that survive a pipe, strict JSON, fits to screen."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def console(stderr: bool = False) -> Console:
    """A rich console; where there is no terminal (and no COLUMNS) lines are left long, not cut."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            # rich would end the process; main() decides that.
            raise

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or os.environ.get("COLUMNS") else 160
    return Quiet(stderr=stderr, width=wide, highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], right: str = "") -> Table:
    """A plain table; `right` names, separated by commas, the columns that hold numbers."""
    from rich import box
    from rich.table import Table

    numeric = right.split(",")
    shown = [[clean(cell) for cell in row] for row in rows]
    if _too_wide(columns, shown, numeric):
        return _records(title, columns, shown)
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        whole = column in numeric
        made.add_column(column, justify="right" if whole else "left", overflow="fold", no_wrap=whole)
    for row in shown:
        made.add_row(*row)
    return made


def clean(text: str | Text) -> str | Text:
    """Text with its control characters written out: a name may hold what would move a terminal's cursor."""
    if not isinstance(text, str) or text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _too_wide(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], numeric: Sequence[str]) -> bool:
    """Whether some cell would have to be broken inside a word for all columns to stand side by side."""
    width = console().width

    def needs(text: str, whole: bool) -> int:
        return len(text) if whole else max(map(len, text.split()), default=0)

    total = 0
    for place, column in enumerate(columns):
        whole = column in numeric
        cells = [needs(str(row[place]), whole) for row in rows]
        total += max([needs(column, whole), *cells]) + 3  # a space on each side, and rich's line between two
    return total - 1 > width


def _records(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """The rows one below the other, a line for each value: for a terminal too narrow for the table."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows:
        made.add_row(row[0], "", style="bold")
        for column, cell in zip(columns[1:], row[1:]):
            if str(cell):
                made.add_row(f"  {column}", cell)
    return made


def print_json(data: object) -> None:
    """`data` on standard output as one JSON document; numbers JSON lacks become "nan", "inf", "-inf"."""
    print(json.dumps(_strict(data), indent=2, allow_nan=False))


def _strict(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {str(key): _strict(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(value) for value in data]
    return data
