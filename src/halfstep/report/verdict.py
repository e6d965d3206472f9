"""The one sentence that a comparison ends in: which level to take, what it brings, how to write it."""

from __future__ import annotations

from math import isfinite
from statistics import median

from halfstep.ratios import size_in_words, speed_in_words
from halfstep.report.comparison import RecipeRows
from halfstep.report.comparison import SettingRow as Row

#: A level must be so much faster, or smaller, to be worth its name.
_FASTER, _SMALLER = 0.97, 0.9
#: O3 gives up masters: it must take this share of the next best time, or less.
_WORTH_NO_MASTERS = 0.9
#: Times of one step that differ by more than this from one part of the rounds to the next, for most of the
#: settings, say that the machine does other work.
BUSY = 0.25


def verdict(recipe: RecipeRows) -> str:
    """`Recommended: O2 bf16. 1.4x faster, 15 % less memory, test loss within 0.012 of O0's (...): hs...`."""
    rows, base, metric = recipe.rows, recipe.base, recipe.metric
    if base is None or not base.seconds:
        return "No verdict: compare with O0 (--level O0,...)"
    good = [row for row in rows if row is not base and _as_good(row, base, metric)]
    if not good:
        return f"Keep fp32 (O0): no other setting trains as well ({_count(len(rows) - 1)} compared)"
    if busy(recipe):
        return f"No verdict on speed: {busy(recipe)}. Run it again when the machine is quiet"
    best = min(good, key=_time)
    with_masters = [row for row in good if row.level != "O3"]
    if best.level == "O3" and with_masters:
        second = min(with_masters, key=_time)
        best = best if _time(best) <= _WORTH_NO_MASTERS * _time(second) else second
    if _ratio(best.seconds, base.seconds) <= _FASTER:
        return f"Recommended: {best.label}. {_gains(best, base, recipe)}: {code(best)}"
    small = min(good, key=lambda row: row.peak_bytes or float("inf"))
    if _ratio(small.peak_bytes, base.peak_bytes) <= _SMALLER:
        return f"Keep fp32 (O0): no setting here is faster. {small.label}: {_gains(small, base, recipe)}"
    return "Keep fp32 (O0): no setting here is faster"


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
    worse = -row.difference if metric == "accuracy" else row.difference
    return isfinite(worse) and worse <= _margin(row, base, metric)


def _margin(row: Row, base: Row, metric: str) -> float:
    """By how much a test metric may be worse than O0's: twice the spread over seeds, at least 0.005."""
    spreads = [x.spread for x in (row, base) if x.spread is not None and isfinite(x.spread)]
    least = 0.005 if metric == "accuracy" else 0.005 * abs(base.mean or 0.0)
    return max(2 * max(spreads, default=0.0), least)


def _time(row: Row) -> float:
    return row.seconds or float("inf")


def _ratio(mine: float | None, its: float | None) -> float:
    return mine / its if mine and its else 1.0


def _gains(row: Row, base: Row, recipe: RecipeRows) -> str:
    speed = speed_in_words(_ratio(row.seconds, base.seconds))
    memory = size_in_words(_ratio(row.peak_bytes, base.peak_bytes), "memory")
    margin = f"test {recipe.metric} within {_margin(row, base, recipe.metric):.2g} of O0's ({recipe.trained})"
    check = "; no masters: check a full run" if row.level == "O3" else ""
    return f"{speed}, {memory}, {margin}{check}"


def _count(n: int) -> str:
    return f"{n} setting" + ("" if n == 1 else "s")
