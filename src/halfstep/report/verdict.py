"""The one sentence that a comparison ends in: which level to take, what it brings, how to write it."""

from __future__ import annotations

from math import isfinite
from statistics import median

from halfstep.report.comparison import RecipeRows
from halfstep.report.comparison import SettingRow as Row

#: A level must be so much faster, or smaller, to be worth its name.
_FASTER, _SMALLER = 0.97, 0.9
#: Times of one step that differ by more than this from one part of the rounds to the next, for most of the
#: settings, say that the machine does other work.
BUSY = 0.25


def verdict(recipe: RecipeRows) -> str:
    """`take O2 bf16: same accuracy, 0.71 of the time, 0.85 of the memory: hs.prepare(...)`."""
    rows, base, metric = recipe.rows, recipe.base, recipe.metric
    if base is None or not base.seconds:
        return "no verdict: compare with O0 (--level O0,...)"
    good = [row for row in rows if row is not base and _as_good(row, base, metric)]
    if not good:
        return f"O0: nothing here trains as well ({_count(len(rows) - 1)} compared)"
    best = min(good, key=lambda row: row.seconds or float("inf"))
    if _ratio(best.seconds, base.seconds) <= (0.9 if busy(recipe) else 1.0) * _FASTER:
        return f"take {best.label}: same {metric}, {_gains(best, base)}: {code(best)}"
    small = min(good, key=lambda row: row.peak_bytes or float("inf"))
    if _ratio(small.peak_bytes, base.peak_bytes) <= _SMALLER:
        return f"O0: nothing here is faster; {small.label} has the same {metric} in {_gains(small, base)}"
    return "O0: nothing here is faster"


def code(row: Row) -> str:
    """The call that trains at this row's setting."""
    return f'hs.prepare(model, optimizer, level="{row.level}", dtype="{row.dtype}")'


def busy(recipe: RecipeRows) -> str:
    """A warning where the rounds that were timed in turns differ too much; empty where they do not."""
    found = [row.noise for row in recipe.rows if row.noise is not None]
    noise = median(found) if found else 0.0  # other work slows every setting that is timed in turns
    if noise <= BUSY:
        return ""
    return f"this machine is busy: times differ by {100 * noise:.0f} % from round to round"


def _as_good(row: Row, base: Row, metric: str) -> bool:
    if row.failed or row.diverged or row.stopped or not row.seconds or row.difference is None:
        return False
    spreads = [x.spread for x in (row, base) if x.spread is not None and isfinite(x.spread)]
    margin = max(
        2 * max(spreads, default=0.0), 0.005 if metric == "accuracy" else 0.005 * abs(base.mean or 0.0)
    )
    worse = -row.difference if metric == "accuracy" else row.difference
    return isfinite(worse) and worse <= margin


def _ratio(mine: float | None, its: float | None) -> float:
    return mine / its if mine and its else 1.0


def _gains(row: Row, base: Row) -> str:
    time, memory = _ratio(row.seconds, base.seconds), _ratio(row.peak_bytes, base.peak_bytes)
    return f"{time:.2f} of the time, {memory:.2f} of the memory"


def _count(n: int) -> str:
    return f"{n} setting" + ("" if n == 1 else "s")
