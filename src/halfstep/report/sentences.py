"""The sentences of the report: what each setting did, and what bounds its step, from measured numbers."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.policy.levels import LEVELS
from halfstep.ratios import size_in_words, speed_in_words
from halfstep.report.comparison import SettingRow as Row
from halfstep.report.costs import costs

#: A setting whose step takes more than this share of fp32's does not pay.
PAYS = 0.98


def sentence(row: Row, base: Row | None, slow: Mapping[str, str]) -> str:
    """What the row's level did, what that bought against O0, and what bounds its step."""
    parts = [f"{LEVELS[row.level].summary}."]
    if row.dtype in slow:
        parts.append(
            f"{row.dtype} is slow on this device ({slow[row.dtype]}), so values are rounded to it "
            "and the arithmetic is fp32: the same numbers, no gain in speed."
        )
    parts.append(_against(row, base))
    parts.append(_scaling(row))
    parts.append(costs(row))
    return " ".join(part for part in parts if part)


def _against(row: Row, base: Row | None) -> str:
    if base is None or row is base:
        return ""
    found: list[str] = []
    if row.seconds and base.seconds:
        found.append(speed_in_words(row.seconds / base.seconds))
    for mine, its, what in (
        (row.peak_bytes, base.peak_bytes, "peak memory"),
        (row.saved_bytes, base.saved_bytes, "saved memory"),
    ):
        if mine and its:
            found.append(size_in_words(mine / its, what))
    slower = bool(row.seconds and base.seconds and row.seconds > PAYS * base.seconds)
    pays = " It does not pay here: fp32 is as fast; level auto would take the fastest." if slower else ""
    return f"Against O0: {', '.join(found)}.{pays}" if found else ""


def _scaling(row: Row) -> str:
    if row.failed:
        return f"A run failed: {row.failed.rstrip('.')}."
    if row.stopped:
        return f"A run was {row.stopped.rstrip('.')}."
    if row.diverged:
        return f"{row.diverged} of {len(row.runs)} runs diverged: the loss became NaN or infinite."
    scales = {scale for run in row.runs for scale in run.scales}
    if scales <= {1.0}:
        return ""
    skipped = f"{row.skipped} step" + ("" if row.skipped == 1 else "s")
    if len(scales) == 1:
        return f"The loss scale stayed at {scales.pop():,.0f}; {skipped} skipped."
    return f"The loss scale moved between {min(scales):,.0f} and {max(scales):,.0f}; {skipped} skipped."


def bounds(row: Row) -> list[str]:
    """The step's time, what bounds it, and what arithmetic, memory and latency would take, each alone."""
    bound = row.bound
    if not bound or not row.seconds:
        return []
    return [
        _time(row.seconds),
        bound.what,
        *map(_time, (bound.arithmetic, bound.memory, bound.latency)),
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.3g} µs"
