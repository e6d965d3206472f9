"""The comparison table's headings and cells, the same on the terminal and in the page."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from halfstep.report.comparison import SettingRow


def columns(metric: str) -> tuple[str, ...]:
    """Headings for a recipe whose metric is "accuracy" or "loss"."""
    shown = "test accuracy %" if metric == "accuracy" else "test loss"
    return ("level", shown, "from O0", "ms/step", "samples/s", "peak MB", "saved MB", "skipped", "scale")


def cells(row: SettingRow, metric: str, slow: Mapping[str, str]) -> list[str]:
    """One row as text; `slow` holds the dtypes this device has no fast arithmetic for."""
    difference = row.difference
    return [
        row.label + (" (slow here)" if row.dtype in slow else ""),
        _final(row, metric),
        "" if difference is None or not isfinite(difference) else _value(difference, metric, sign="+"),
        _number(row.seconds, 1e3, 2) + _noise(row.noise),
        _number(row.samples_per_second, 1.0, 0),
        _number(row.peak_bytes, 1e-6, 1),
        _number(row.saved_bytes, 1e-6, 1),
        str(row.skipped),
        "none" if row.last_scale == 1.0 else _number(row.last_scale, 1.0, 0),
    ]


def _final(row: SettingRow, metric: str) -> str:
    if row.mean is None:
        return "stopped" if row.stopped else "failed"
    if not isfinite(row.mean):
        return "diverged"
    text = _value(row.mean, metric)
    if row.spread is not None:
        text += f" ± {_value(row.spread, metric, digits=2)}"
    return text + (" diverged" if row.diverged else "")


def _value(value: float, metric: str, sign: str = "", digits: int = 4) -> str:
    if metric == "accuracy":
        return f"{100.0 * value:{sign}.2f}"
    return f"{value:{sign}#.{digits}g}"


def _noise(noise: float | None) -> str:
    return "" if not noise else f" ± {50 * noise:.0f} %"


def _number(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f"{value * factor:,.{digits}f}"
