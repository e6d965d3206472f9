"""What every subcommand prints with: one console, tables that survive a pipe, strict JSON, fits to screen."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, Group
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


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], right: str = "", keys: int = 1
) -> Group:
    """A plain table; `right` names, separated by commas, the columns that hold numbers.

    Where the terminal is too narrow for all columns, several tables: each begins with the first `keys` ones.
    """
    from rich.console import Group
    from rich.text import Text

    numeric = right.split(",")
    shown = [[clean(cell) for cell in row] for row in rows]
    cells = [[row[place] for row in shown] for place in range(len(columns))]
    # The keys stay on one line where they leave half of the terminal to the rest.
    keyed = sum(_width(*one, whole=True) for one in zip(columns[:keys], cells)) * 2 <= console().width
    widths = [
        _width(column, cells[place], whole=column in numeric or (keyed and place < keys))
        for place, column in enumerate(columns)
    ]
    named = list(range(keys))
    parts: list[list[int]] = [[]]
    for place in range(keys, len(columns)):
        if parts[-1] and sum(widths[p] for p in (*named, *parts[-1], place)) > console().width:
            parts.append([])
        parts[-1].append(place)
    made = [_table([*named, *part], columns, shown, numeric, widths) for part in parts]
    return Group(*([Text(title)] if title else []), *made)


def _table(
    places: Sequence[int],
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    numeric: Sequence[str],
    widths: Sequence[int],
) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    fits = sum(widths[place] for place in places) <= console().width
    for place in places:
        whole = columns[place] in numeric
        made.add_column(
            columns[place],
            justify="right" if whole else "left",
            overflow="fold",
            no_wrap=whole,
            min_width=widths[place] - 3 if fits else None,
        )
    for row in rows:
        made.add_row(*(row[place] for place in places))
    return made


def _width(column: str, cells: Sequence[str | Text], whole: bool) -> int:
    """The least width of a column: its longest word, or text if `whole`, and three for rich."""
    texts = [column, *map(str, cells)]
    return 3 + max(len(text) if whole else max(map(len, text.split()), default=0) for text in texts)


def clean(text: str | Text) -> str | Text:
    """Text with its control characters written out: a name may hold what would move a terminal's cursor."""
    if not isinstance(text, str) or text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def print_json(data: object) -> None:
    """`data` on standard output as one JSON document; numbers unknown to JSON become "nan", "inf"."""
    print(json.dumps(_strict(data), indent=2, allow_nan=False))


def _strict(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {str(key): _strict(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(value) for value in data]
    return data
