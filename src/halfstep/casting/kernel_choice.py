"""Which implementation a LOW op takes: classes of ops, choices as data, and how a choice follows from times.

A policy says which numbers an op gives; by which of several implementations is decided here, per class of op
(its kind, dtype, geometry, size, threads, and what needs a gradient) and direction, from measured times, from
a file, or by one word. The implementations are in `kinds/`, the measuring in `kernel_probes.py`.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import threading
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, cast

from halfstep.casting.kinds import KINDS
from halfstep.casting.kinds.kind import NATIVE, ROUNDED, SIZES, Choice, OpClass, sizes
from halfstep.distributed import world_size
from halfstep.errors import CheckpointError, ConfigError
from halfstep.torch_private import all_op_names

#: Another way replaces torch's own kernel where it takes at most this share of its time.
MARGIN = 0.8

#: What a choice may be made of. `rounded`: inputs rounded to the dtype, fp32 arithmetic, output rounded.
IMPLEMENTATIONS = ("native", "rounded", "onednn", "channels_last", "rounded_channels_last")
NEEDS = ("", "i", "w", "iw", "*", "iw*")
DIRECTIONS = ("forward", "input", "weight")
WORDS = ("measured", "native", "rounded")
VARIABLE = "HALFSTEP_KERNELS"

Times = Mapping[str, float | None]
"""Seconds by implementation; None for one that was not run, being hopeless at the smallest size."""


_FIELDS = ("op", "dtype", "geometry", "size", "threads", "needs")


@dataclass(frozen=True)
class Row:
    """One line of a table: which ops (None: any), what needs a gradient, the choice, and why.

    `needs`: "" for none, "i" for the input, "w" for the weight, "iw" for both; with "*" after it the op
    runs by one way in all directions (recurrent layers, ops inside compiled code).
    """

    choice: Choice
    op: str | None = None
    dtype: str | None = None
    geometry: str | None = None
    size: str | None = None
    threads: int | None = None
    needs: str | None = None
    why: str = ""

    def fits(self, cls: OpClass, needs: str) -> bool:
        """Whether it speaks of this class."""
        conditions = (getattr(self, name) for name in _FIELDS)
        return all(w is None or w == g for w, g in zip(conditions, (*astuple(cls), needs), strict=True))

    @property
    def exact(self) -> tuple[OpClass, str] | None:
        """The one class it speaks of; None where it leaves something open."""
        values: list[Any] = [getattr(self, name) for name in _FIELDS]
        return None if None in values else (OpClass(*values[:-1]), values[-1])

    @property
    def fits_all(self) -> bool:
        """Whether it speaks of every op there is."""
        return all(getattr(self, name) is None for name in _FIELDS)


def directions(needs: str) -> tuple[str, ...]:
    """Return the directions that run where `needs` says what needs a gradient."""
    return ("forward", *(d for d in ("input", "weight") if d[0] in needs))


def decide(times: Mapping[str, Times], overhead: float, margin: float = MARGIN) -> tuple[Choice, str]:
    """Return the choice that follows from measured times by direction, and its reason.

    A direction leaves `native` for the fastest other way where that takes at most `margin` of native's time.
    Leaving costs `overhead` seconds once an op (Python stands around the kernels then): where all that is won
    is less, everything stays native.
    """
    picked: dict[str, str] = {}
    won, reasons = 0.0, list[str]()
    for direction, row in times.items():
        native = row.get("native")
        others = {name: t for name, t in row.items() if t is not None and name != "native"}
        best = min(others, key=lambda name: others[name], default="native")
        if best == "native" or (native is not None and others[best] > margin * native):
            continue
        picked[direction] = best
        won += float("inf") if native is None else native - others[best]
        share = "a small part" if native is None else f"{others[best] / native:.2f}"
        reasons.append(f"{direction}: {best} at {share} of native")
    if picked and won <= overhead:
        return NATIVE, "what another way would win is less than calling it costs"
    return Choice(**picked), "; ".join(reasons) or f"nothing at {margin:.2f} of native or less"


def decide_whole(times: Mapping[str, Times], overhead: float, margin: float = MARGIN) -> tuple[Choice, str]:
    """Return the same for an op that is rounded in every direction or in none."""
    native, ours = ([row.get(name) for row in times.values() if row] for name in ("native", "rounded"))
    native_time = sum(math.inf if t is None else t for t in native)
    rounded_time = sum(math.inf if t is None else t for t in ours)
    if rounded_time <= margin * native_time and rounded_time + overhead < native_time:
        return ROUNDED, f"as a whole: rounded at {rounded_time / native_time:.2f} of native"
    return NATIVE, f"as a whole, rounded is not at {margin:.2f} of native or less"


class KernelTable:
    """Choices by class of op; a class that it does not know is measured, or native where nothing measures.

    Safe to share between threads. `measure` gives the times of one class and direction; None never measures.
    `pays` has the last word on a choice that follows from them: a layer is more than these.
    `measured`: without `measure`, its rows are all that was measured elsewhere, so that nothing new is met.
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        measure: Callable[[OpClass, str], Times] | None = None,
        overhead: Callable[[], float] = lambda: 0.0,
        name: str = "given",
        measured: bool = False,
        pays: Callable[[OpClass, str, Choice], bool] = lambda cls, needs, choice: True,
    ) -> None:
        self.name = name
        self.measured = measured or measure is not None
        self._measure, self._overhead, self._pays = measure, overhead, pays
        self._known: dict[tuple[OpClass, str], Row] = {}
        self._open: list[Row] = []
        self._lock = threading.RLock()
        for row in rows:
            if row.exact is None:
                self._open.append(row)
            else:
                self._known[row.exact] = row

    def __repr__(self) -> str:
        rows = self.rows
        other = sum(not row.choice.is_native for row in rows)
        return f"KernelTable({self.name!r}: {len(rows)} rows, {other} of them another way than native)"

    def choose(self, cls: OpClass, needs: str) -> Choice:
        """Return the choice for a class: known, by the first fitting open row, or measured now."""
        return self.row(cls, needs).choice

    def row(self, cls: OpClass, needs: str) -> Row:
        """Return the same with its reason."""
        with self._lock:
            key = cls, needs
            fitting = (row for row in self._open if row.fits(cls, needs))
            entry = self._known.get(key) or next(fitting, None)
            if entry is None and self._measure is not None:
                choice, why = self._decide_class(self._measure, cls, needs)
                entry = self._known[key] = Row(choice, **asdict(cls), needs=needs, why=why)
            return entry or Row(NATIVE, why="not in this table")

    def _decide_class(
        self, measure: Callable[[OpClass, str], Times], cls: OpClass, needs: str
    ) -> tuple[Choice, str]:
        if not cls.size:
            return NATIVE, "nothing stands for this op"
        times = {d: measure(cls, d) for d in directions(needs)}
        if needs.endswith("*"):
            return decide_whole(times, self._overhead())
        choice, why = decide(times, self._overhead())
        if choice.is_native or self._pays(cls, needs, choice):
            return choice, why
        return NATIVE, f"called as a layer it does not pay ({why})"

    @property
    def rows(self) -> tuple[Row, ...]:
        """What was given or measured for one class each, then what was given for any."""
        with self._lock:
            exact_rows = sorted(self._known.items(), key=lambda item: item[0])
        return (*(row for _, row in exact_rows), *self._open)

    @property
    def measures(self) -> bool:
        """Whether a class that it does not know is measured."""
        return self._measure is not None

    def with_rows(self, rows: Iterable[Row]) -> KernelTable:
        """Return a table with these choices that goes on as this one for classes they do not speak of.

        It is this one where they are its own: each table is held for good by the regions that ran under it.
        """
        theirs = tuple(rows)
        stored_rows = [None if row.exact is None else self._known.get(row.exact) for row in theirs]
        if all(
            stored_row is not None and stored_row.choice == row.choice
            for stored_row, row in zip(stored_rows, theirs)
        ):
            return self
        broad = [row for row in theirs if row.exact is None]
        mine = [
            row
            for row in (() if self.measures else self.rows)  # what measures finds its own again
            if row.exact is None or not any(other.fits(*row.exact) for other in broad)
        ]
        exact = [r for r in (*mine, *theirs) if r.exact is not None]  # of two for one class the later holds
        last = [row for row in mine if row.exact is None]
        arguments = self._measure, self._overhead, "pinned", self.measured, self._pays
        return KernelTable((*exact, *broad, *last), *arguments)

    @property
    def digest(self) -> str:
        """What it was made with, in short: equal for tables that choose alike."""
        if self.name in WORDS:
            return self.name
        text = repr([replace(row, why="") for row in self.rows])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- by which names choices speak of ops ---

DTYPES = ("bf16", "fp16")


def check_row(number: int, row: Mapping[str, Any]) -> None:
    """Refuse a row of a file that can fit no op.

    Raises:
        ValueError: an op, dtype, geometry or size that there is none of, with the nearest that there is.
    """
    op, geometry = row.get("op"), row.get("geometry")
    if op is not None and "::" in op:  # an op without a kind has neither geometry nor size
        names = all_op_names() if op.startswith("aten::") else (op,)
        _check(number, "op", op, names)
        shapes, extents = ("",), ("",)
    else:
        _check(number, "op", op, KINDS)
        shapes = tuple(g for name, kind in KINDS.items() if op in (None, name) for g in kind.geometries)
        extents = sizes(geometry) if geometry in shapes else SIZES
    _check(number, "dtype", row.get("dtype"), DTYPES)
    _check(number, "geometry", geometry, shapes)
    _check(number, "size", row.get("size"), extents)


def _check(number: int, key: str, value: str | None, allowed: Collection[str]) -> None:
    if value is None or value in allowed:
        return
    near = difflib.get_close_matches(value, list(allowed), n=1)
    short = list(dict.fromkeys(allowed)) if len(allowed) < 60 else ["the name of an overload of torch's"]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"kernel row {number} has {key} = {value!r}; expected {', '.join(map(repr, short))}{hint}"
    )


# --- as plain values and from a file -----------------------------------------------------------------------


def to_plain(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return rows as dicts of strings and numbers, for a state dict or TOML."""
    return [
        {name: getattr(row, name) for name in _FIELDS if getattr(row, name) is not None}
        | {name: getattr(row.choice, name) for name in DIRECTIONS}
        | ({"why": row.why} if row.why else {})
        for row in rows
    ]


def from_plain(values: object) -> tuple[Row, ...]:
    """Return the rows of `to_plain`.

    Raises:
        ValueError: what is not such rows; the message says which entry and why.
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"expected a list of kernel rows, got {type(values).__name__}")
    return tuple(_row(i, v) for i, v in enumerate(cast("Sequence[object]", values), 1))


def _row(number: int, value: object) -> Row:
    if not isinstance(value, Mapping):
        raise ValueError(f"kernel row {number} is a {type(value).__name__}, expected keys and values")
    fields = dict(cast("Mapping[str, Any]", value))
    allowed = (*_FIELDS, *DIRECTIONS, "why")
    if stray := sorted(set(fields) - set(allowed)):
        raise ValueError(f"kernel row {number} has {stray[0]!r}; expected some of {', '.join(allowed)}")
    for name in ("op", "dtype", "geometry", "size", "needs", "why"):
        if not isinstance(fields.get(name, ""), str):
            raise ValueError(f"kernel row {number} has {name} = {fields[name]!r}; expected text")
    _check(number, "needs", fields.get("needs"), NEEDS)
    for direction in DIRECTIONS:
        _check(number, direction, fields.get(direction), IMPLEMENTATIONS)
    if not isinstance(fields.get("threads", 1), int):
        raise ValueError(f"kernel row {number} has threads = {fields['threads']!r}; expected a number")
    choice = Choice(**{d: fields.pop(d) for d in DIRECTIONS if d in fields})
    return Row(choice, **fields)


def read_toml(path: str | Path) -> tuple[Row, ...]:
    """Return the rows of a TOML file.

    Raises:
        ConfigError: a file that cannot be read, or rows that cannot.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        if stray := sorted(set(data) - {"format", "kernel"}):
            raise ValueError(f"it has {stray[0]!r}; expected format = 1 and tables [[kernel]]")
        if data.get("format") != 1:
            raise ValueError(f"format = {data.get('format')!r}, this version reads format = 1")
        rows = from_plain(data.get("kernel", []))
        for number, row in enumerate(to_plain(rows), 1):
            check_row(number, row)
        return rows
    except (OSError, ValueError) as error:
        raise ConfigError(f"kernels file {str(path)!r}: {error}") from error


# --- which table is in force -------------------------------------------------------------------------------

Kernels = str | os.PathLike[str] | KernelTable | None
_tables: dict[str, KernelTable] = {
    "native": KernelTable([Row(NATIVE, why="asked for")], name="native"),
    "rounded": KernelTable([Row(ROUNDED, why="asked for")], name="rounded"),
}
_files: dict[tuple[str, int], KernelTable] = {}


def install_measured(table: KernelTable) -> None:
    """Set what the word `measured` stands for; `kernel_probes` does it, tests may."""
    _tables["measured"] = table


def table_of(kernels: Kernels = None) -> KernelTable:
    """Return the table that a word, a path or None names; None asks the environment, else takes `measured`.

    Raises:
        ConfigError: neither a word nor a readable file of choices.
    """
    if isinstance(kernels, KernelTable):
        return kernels
    source = "kernels"
    if kernels is None:
        kernels, source = os.environ.get(VARIABLE) or "measured", VARIABLE
    if not isinstance(kernels, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"kernels={kernels!r:.60}: expected {', '.join(map(repr, WORDS))}, a TOML file or a KernelTable"
        )
    word = os.fspath(kernels)
    if word in _tables:
        return _tables[word]
    path = Path(word)
    if not path.is_file():
        raise ConfigError(
            f"{source}={word!r}: expected {', '.join(map(repr, WORDS))} or a TOML file; no such file"
        )
    key = (str(path.resolve()), path.stat().st_mtime_ns)
    if key not in _files:
        _files[key] = KernelTable(read_toml(path), name=str(path))
    return _files[key]


def dump_table(table: KernelTable) -> list[dict[str, Any]]:
    """What a session's state keeps of its table: its rows, and one for the rest unless it is measured."""
    rows = [replace(row, why="") for row in table.rows]
    if not table.measured and not any(row.fits_all for row in rows):
        rows.append(Row(NATIVE))
    return to_plain(rows)


def load_table(state: object, table: KernelTable) -> KernelTable:
    """Return the table of a saved session: its choices, and its rest.

    A saved session that measured goes on measuring the classes it never met: by `table` where that measures,
    or where ranks must agree; by this machine otherwise.

    Raises:
        CheckpointError: what is no such state.
    """
    try:
        rows = from_plain(state)
    except ValueError as error:
        raise CheckpointError(f"the kernels of a session state cannot be read: {error}") from error
    if any(row.fits_all for row in rows):
        same = to_plain(rows) == to_plain(table.rows) and not table.measures
        return table if same else KernelTable(rows, name="pinned")
    agreed = table.measured or world_size() > 1
    return (table if agreed else table_of("measured")).with_rows(rows)
