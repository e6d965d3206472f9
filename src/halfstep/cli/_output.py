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
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
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
