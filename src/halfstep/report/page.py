"""The report as one HTML page: no script, no request to anywhere, every text escaped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from halfstep.report.comparison import Comparison, RecipeRows, SettingRow
from halfstep.report.svg import Line, line_chart
from halfstep.report.template import fill, text_of, write_page
from halfstep.report.words import bounds, cells, columns, find_recommended, sentence, verdict

T = TypeVar("T")

_MACHINE = {
    "command": "",
    "date": "",
    "halfstep": "halfstep",
    "torch": "torch",
    "device": "on",
    "cpu": "",
    "gpu": "",
    "isa": "",
    "threads": "threads:",
    "float32_matmul_precision": "fp32 matmul precision:",
}
"""Facts of the machine shown at the top, with the word before each."""


def write_report(document: Comparison, path: str | Path) -> Path:
    """Write the page of `render` to `path`, whole or not at all; ConfigError where that is impossible."""
    return write_page(render(document), path)


_Figure = dict[str, str]
"""A chart, drawn already (its texts are escaped): `title`, `drawing` and `note`."""


def render(document: Comparison) -> str:
    """Return the page of what `halfstep train` found."""
    context = {
        "style": text_of("style.css"),
        "machine": _machine(document.machine),
        "recipes": [_section(recipe, document.slow) for recipe in document.recipes],
    }
    return fill("train.html", context)


def _machine(machine: Mapping[str, Any]) -> str:
    return " · ".join(
        f"{words} {machine[key]}".strip() for key, words in _MACHINE.items() if machine.get(key)
    )


def _section(recipe: RecipeRows, slow: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page shows of one recipe."""
    rows, metric = recipe.rows, recipe.metric
    scales, constant = _scale_figure(rows)
    best = find_recommended(recipe)
    row_bounds = [(row.label, bounds(row)) for row in rows]
    return {
        "name": recipe.name,
        "verdict": verdict(recipe),
        "best": "" if best is None else f": {best.label}",
        "about": f"{recipe.about}; {recipe.data}, batches of {recipe.batch_size}, {recipe.trained}",
        "columns": columns(metric),
        "cells": [(cells(row, metric, slow), row is best) for row in rows],
        "rows": [
            {
                "label": row.label,
                "level": row.level,
                "classes": _classes(row),
                "sentence": sentence(row, recipe.base, slow),
            }
            for row in rows
        ],
        "curves": [*_loss_figures(recipe), *scales],
        "constant_scales": "; ".join(constant),
        "bars": [*_time_figure(rows), *_memory_figure(rows)],
        "bounds": [(label, shown) for label, shown in row_bounds if shown],
    }


def _classes(row: SettingRow) -> str:
    is_default = row.label in (row.level, f"{row.level} {row.dtype}")
    return f"level-{row.level} dtype-{row.dtype}" + ("" if is_default else " other-scale")


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values, fewer at the ends; a nonfinite value makes its window so."""
    half = window // 2
    return [_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _loss_figures(recipe: RecipeRows) -> list[_Figure]:
    """Losses over steps; beside O0, what each has more than it, with the band that seeds make."""
    window = max(1, recipe.steps // 40)
    note = f"Mean over seeds, smoothed over {window} steps." if window > 1 else "Mean over seeds."
    smoothed = {}
    for row in recipe.rows:
        curves = [run.losses for run in row.runs if run.losses]
        smoothed[row.label] = smooth([_mean(values) for values in zip(*curves)], window)
    lines = [Line(row.label, _classes(row), _thin(smoothed[row.label])) for row in recipe.rows]
    chart = line_chart(lines, x_label="step", y_label="training loss")
    whole: _Figure = {"title": "Training loss", "drawing": chart, "note": note}
    base = recipe.base
    others = [row for row in recipe.rows if row is not base]
    if base is None or not others:
        return [whole]
    lines = []
    for row in others:
        differences = [v - its for v, its in zip(smoothed[row.label], smoothed[base.label])]
        lines.append(Line(row.label, _classes(row), _thin(differences)))
    band = _band([smooth(run.losses, window) for run in base.runs if run.losses])
    if band:
        note = f"{note} Grey: how far O0's own seeds lie apart (two standard errors of their mean)."
    chart = line_chart(lines, x_label="step", y_label="loss minus O0's", band=band)
    return [{"title": "Training loss minus O0's", "drawing": chart, "note": note}, whole]


def _band(curves: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """(step, low, high) of the mean's uncertainty around zero; nothing for one seed."""
    if len(curves) < 2:
        return []
    band: list[tuple[float, float, float]] = []
    for step, values in _thin(list(zip(*curves))):
        if all(map(math.isfinite, values)):
            wide = 2 * statistics.stdev(values) / math.sqrt(len(values))
            band.append((step, -wide, wide))
    return band


def _thin(values: Sequence[T]) -> list[tuple[float, T]]:
    """(step, value) of at most 400 of them."""
    stride = max(1, math.ceil(len(values) / 400))
    return [(i + 1.0, values[i]) for i in range(0, len(values), stride)]


def _scale_figure(rows: Sequence[SettingRow]) -> tuple[list[_Figure], list[str]]:
    """Return the chart of scales that moved, and what the others stayed at."""
    lines: list[Line] = []
    constant: list[str] = []
    for row in rows:
        run = row.runs[0]
        if len(set(run.scales)) == 1 and run.scales[0] != 1.0 and not run.skipped:
            constant.append(f"{row.label} stayed at {run.scales[0]:,.0f}")
        elif any(scale != 1.0 for scale in run.scales):
            points = [(i + 1.0, scale) for i, scale in enumerate(run.scales)]
            marks = [float(step) for step in run.skipped]
            lines.append(Line(row.label, _classes(row), points, marks, steps=True))
    if not lines:
        return [], constant
    chart = line_chart(lines, x_label="step", y_label="loss scale", powers_of_two=True)
    note = "First seed. A red cross is a skipped step."
    return [{"title": "Loss scale", "drawing": chart, "note": note}], constant


def _bars(
    title: str, measured: str, note: str, rows: Sequence[tuple[SettingRow, str, Mapping[str, float]]]
) -> list[dict[str, Any]]:
    """Bars on a common scale from zero, each below its row's label and text; parts by their CSS class."""
    most = max((value for *_, parts in rows for value in parts.values()), default=0.0)
    bars = [
        {
            "label": row.label,
            "classes": _classes(row),
            "text": text,
            "parts": {name: f"{100 * value / most:.1f}%" for name, value in parts.items()},
        }
        for row, text, parts in rows
    ]
    return [{"title": title, "measured": measured, "note": note, "bars": bars}] if bars else []


def _time_figure(rows: Sequence[SettingRow]) -> list[dict[str, Any]]:
    shown = [(row, f"{row.seconds * 1e3:,.2f} ms", {"": row.seconds}) for row in rows if row.seconds]
    note = "Median step time, measured in interleaved rounds."
    return _bars("Time of a step", "milliseconds a step", note, shown)


def _memory_figure(rows: Sequence[SettingRow]) -> list[dict[str, Any]]:
    shown = [
        (
            row,
            f"{row.peak_bytes / 1e6:,.1f}, saved {row.saved_bytes / 1e6:,.1f} MB",
            {"pale": row.peak_bytes, "": row.saved_bytes},
        )
        for row in rows
        if row.peak_bytes and row.saved_bytes is not None
    ]
    note = "Pale: peak of all tensors during a step. Solid: kept for backward, parameters not counted."
    return _bars("Memory", "megabytes", note, shown)
