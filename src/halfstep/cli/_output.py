"""What every subcommand prints with: one console, tables that survive a pipe, strict JSON, fits to screen."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from halfstep.formats import dtype_name


class _Quiet(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the process; main() decides that.
        raise


def console(stderr: bool = False) -> Console:
    """Return a rich console; where there is no terminal (and no COLUMNS) lines are left long, not cut."""
    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or os.environ.get("COLUMNS") else 160
    return _Quiet(stderr=stderr, width=wide, highlight=False)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], right: str = "", keys: int = 1
) -> Group:
    """Return a plain table; `right` names, separated by commas, the columns that hold numbers.

    Where the terminal is too narrow for all columns, several tables: each begins with the first `keys` ones.
    """
    numeric, width = right.split(","), console().width
    cells = [[clean(cell) for cell in row] for row in rows]
    least: list[int] = []
    for place, column in enumerate(columns):
        texts = [column, *(str(row[place]) for row in cells)]
        # What names a row stays on one line where the names leave half of the terminal to the rest.
        whole = column in numeric or (place < keys and 2 * keys * max(map(len, texts)) <= width)
        words = texts if whole else " ".join(texts).split()
        least.append(max(map(len, words), default=0))
    parts: list[list[int]] = [[]]
    for place in range(keys, len(columns)):
        # rich draws three characters between columns.
        if parts[-1] and sum(least[p] + 3 for p in (*range(keys), *parts[-1], place)) > width:
            parts.append([])
        parts[-1].append(place)
    drawn: list[Any] = [Text(title)] if title else []
    for part in parts:
        rich_table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for place in (*range(keys), *part):
            whole = columns[place] in numeric
            rich_table.add_column(
                columns[place],
                justify="right" if whole else "left",
                overflow="fold",
                no_wrap=whole,
                min_width=min(least[place], width // 2),
            )
        for row in cells:
            rich_table.add_row(*(row[place] for place in (*range(keys), *part)))
        drawn.append(rich_table)
    return Group(*drawn)


def clean(text: str | Text) -> str | Text:
    """Text with its control characters written out: a name may hold what would move a terminal's cursor."""
    if not isinstance(text, str) or text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def print_json(data: object) -> None:
    """`data` on standard output as one JSON document; numbers unknown to JSON become "nan", "inf".

    Dtypes and rules are given by name.
    """
    print(json.dumps(_strict(data), indent=2, allow_nan=False))


def _strict(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, torch.dtype):
        return dtype_name(data)
    if isinstance(data, Enum):
        return data.value
    if isinstance(data, dict):
        return {str(key): _strict(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(value) for value in data]
    return data
