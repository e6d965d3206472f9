"""Measurements kept on disk between processes: rows by name in one JSON file, replaced whole.

Nobody depends on it: what cannot be read, or is not as it was written, is measured again.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast


def read_rows(file: Path, sound: Callable[[dict[str, Any]], bool]) -> dict[str, dict[str, Any]]:
    """The rows of a file that are `sound`; none where it is missing or not ours."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    rows = cast("dict[str, Any]", data).items()
    return {name: row for name, row in rows if isinstance(row, dict) and sound(cast("dict[str, Any]", row))}


def write_rows(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the file in one move; where the folder cannot be written, the next process measures again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem)
        try:
            with os.fdopen(handle, "w") as stream:
                json.dump(rows, stream)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
