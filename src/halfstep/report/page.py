"""The report as one HTML page: no script, no request to anywhere, every text escaped."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError
from halfstep.report.sentences import bounds, sentence
from halfstep.report.svg import Bar, Line, bar_chart, line_chart
from halfstep.report.table import cells, columns
from halfstep.report.verdict import busy, verdict

_MACHINE = {
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


def write_report(document: Mapping[str, Any], path: str | Path) -> Path:
    """Write the page of `render` to `path`, whole or not at all; ConfigError where that is impossible."""
    return write_page(render(document), path)


def write_page(page: str, path: str | Path) -> Path:
    """Write a finished page to `path`, whole or not at all; ConfigError where that is impossible."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the report {path}: {error}") from error
    return path


def render(document: Mapping[str, Any]) -> str:
    """The page for what `halfstep train --json` prints: {"machine": {...}, "recipes": [...]}."""
    style = files("halfstep.report").joinpath("style.css").read_text(encoding="utf-8")
    recipes = document["recipes"]
    slow = document["machine"].get("slow", {})
    links = "".join(f"<a href='#{escape(r['name'], quote=True)}'>{escape(r['name'])}</a>" for r in recipes)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>halfstep: {escape(', '.join(r['name'] for r in recipes))}</title>"
        f"<style>{style}</style></head>"
        "<body><main><h1>Training in several precisions</h1>"
        f"<p class='quiet'>{_machine(document['machine'])}</p>"
        + (f"<nav>{links}</nav>" if len(recipes) > 1 else "")
        + "".join(_section(recipe, slow) for recipe in recipes)
        + "</main></body></html>"
    )


def _machine(machine: Mapping[str, Any]) -> str:
    words = [f"{words} {machine[key]}".strip() for key, words in _MACHINE.items() if machine.get(key)]
    return escape(" · ".join(words))


def _section(recipe: Mapping[str, Any], slow: Mapping[str, str]) -> str:
    rows = recipe["rows"]
    base = next((row for row in rows if row["level"] == "O0"), None)
    seeds = f"{recipe['seeds']} seed" + ("s" if recipe["seeds"] > 1 else "")
    about = (
        f"{recipe['about']}; {recipe['data']}, batches of {recipe['batch_size']}, "
        f"{recipe['steps']} steps, {seeds}"
    )
    words = "".join(
        f"<li class='level-{row['level']}'><b>{escape(row['label'])}</b>: "
        f"{escape(sentence(row, base, slow))}</li>"
        for row in rows
    )
    curves, bars = _loss_figure(recipe) + _scale_figure(rows), _time_figure(recipe) + _memory_figure(rows)
    return (
        f"<section id='{escape(recipe['name'], quote=True)}'><h2>{escape(recipe['name'])}</h2>"
        f"<p class='headline'>{escape(verdict(recipe))}</p>{_busy(recipe)}"
        f"<p class='quiet'>{escape(about)}</p>{_table(recipe, slow)}{_legend(rows)}"
        f"<div class='charts'><div>{curves}</div><div>{bars}</div></div>"
        f"{_bounds(rows)}<details><summary>What each setting does</summary>"
        f"<ul class='levels'>{words}</ul></details></section>"
    )


def _busy(recipe: Mapping[str, Any]) -> str:
    told = busy(recipe)
    return f"<p class='loud'>{escape(told)}</p>" if told else ""


def _bounds(rows: Sequence[Mapping[str, Any]]) -> str:
    """What bounds each step, as one small table."""
    found = [(row["label"], bounds(row)) for row in rows]
    body = "".join(
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(c)}</td>' for c in cells)}</tr>"
        for label, cells in found
        if cells
    )
    if not body:
        return ""
    heads = ("level", "step", "bounded by", "arithmetic", "memory", "latency")
    head = "".join(f"<th scope='col'>{h}</th>" for h in heads)
    return (
        "<h3>What bounds a step</h3><div class='scroll' tabindex='0'><table><thead><tr>"
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
        "<p class='quiet'>Time that each of the three would take alone, at this device's measured speeds.</p>"
    )


def _classes(row: Mapping[str, Any]) -> str:
    own = row["label"] in (row["level"], f"{row['level']} {row['dtype']}")
    return f"level-{row['level']} dtype-{row['dtype']}" + ("" if own else " other-scale")


def _table(recipe: Mapping[str, Any], slow: Mapping[str, str]) -> str:
    metric = recipe["metric"]
    head = "".join(f"<th scope='col'>{escape(h)}</th>" for h in columns(metric))
    rows = (cells(row, metric, slow) for row in recipe["rows"])
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='scroll' tabindex='0'>{table}</div>"


def _cell(text: str) -> str:
    bad = " class='bad'" if "failed" in text or "diverged" in text else ""
    return f"<td{bad}>{escape(text)}</td>"


def _legend(rows: Sequence[Mapping[str, Any]]) -> str:
    items = "".join(
        "<li><svg viewBox='0 0 26 10' aria-hidden='true'>"
        f"<path class='curve {_classes(row)}' d='M0 5H26'/></svg>{escape(row['label'])}</li>"
        for row in rows
    )
    return f"<ul class='legend'>{items}</ul>"


def _average(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean over seeds at each step, where every seed got that far."""
    length = min((len(curve) for curve in curves), default=0)
    return [_mean([curve[i] for curve in curves]) for i in range(length)]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values, fewer at the ends; a value that is not finite spoils its window."""
    half = window // 2
    return [_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _loss_figure(recipe: Mapping[str, Any]) -> str:
    """Losses over steps; beside O0, what each has more than it, with the band that seeds make."""
    window = max(1, recipe["steps"] // 40)
    smoothed = {
        row["label"]: smooth(_average([run["losses"] for run in row["runs"] if run["losses"]]), window)
        for row in recipe["rows"]
    }
    note = f"Mean over seeds, smoothed over {window} steps." if window > 1 else "Mean over seeds."
    lines = [
        Line(row["label"], _classes(row), [(i + 1.0, v) for i, v in _thin(smoothed[row["label"]])])
        for row in recipe["rows"]
    ]
    chart = line_chart(lines, x_label="step", y_label="training loss", describe="training loss over steps")
    return _difference_figure(recipe, smoothed, window, note) + _chart("Training loss", chart, note)


def _difference_figure(
    recipe: Mapping[str, Any], smoothed: Mapping[str, Sequence[float]], window: int, note: str
) -> str:
    base = next((row for row in recipe["rows"] if row["level"] == "O0"), None)
    others = [row for row in recipe["rows"] if row is not base]
    if base is None or not others:
        return ""
    zero = smoothed[base["label"]]
    lines: list[Line] = []
    for row in others:
        pairs = [(i, v - zero[i]) for i, v in enumerate(smoothed[row["label"]]) if i < len(zero)]
        stride = max(1, math.ceil(len(pairs) / 400))
        lines.append(Line(row["label"], _classes(row), [(i + 1.0, v) for i, v in pairs[::stride]]))
    curves = [smooth(run["losses"], window) for run in base["runs"] if run["losses"]]
    band = _band(curves)
    if band:
        note = f"{note} Grey: how far O0's own seeds lie apart (two standard errors of their mean)."
    chart = line_chart(
        lines, x_label="step", y_label="loss minus O0's", describe="loss minus O0's", band=band
    )
    return _chart("Training loss minus O0's", chart, note)


def _band(curves: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """(step, low, high) of the mean's uncertainty around zero; nothing for one seed."""
    length = min((len(c) for c in curves), default=0)
    if len(curves) < 2:
        return []
    stride = max(1, math.ceil(length / 200))
    found: list[tuple[float, float, float]] = []
    for i in range(0, length, stride):
        values = [c[i] for c in curves]
        if all(map(math.isfinite, values)):
            wide = 2 * statistics.stdev(values) / math.sqrt(len(values))
            found.append((i + 1.0, -wide, wide))
    return found


def _thin(values: Sequence[float], most: int = 400) -> list[tuple[int, float]]:
    stride = max(1, math.ceil(len(values) / most))
    return [(i, values[i]) for i in range(0, len(values), stride)]


def _scale_figure(rows: Sequence[Mapping[str, Any]]) -> str:
    lines: list[Line] = []
    constant: list[str] = []
    for row in rows:
        run = row["runs"][0]
        if len(set(run["scales"])) == 1 and run["scales"][0] != 1.0 and not run["skipped"]:
            constant.append(f"{row['label']} stayed at {run['scales'][0]:,.0f}")
        elif any(scale != 1.0 for scale in run["scales"]):
            points = [(i + 1.0, scale) for i, scale in enumerate(run["scales"])]
            marks = [float(step) for step in run["skipped"]]
            lines.append(Line(row["label"], _classes(row), points, marks, steps=True))
    told = f"<p class='quiet'>Loss scale: {escape('; '.join(constant))}.</p>" if constant else ""
    if not lines:
        return told
    chart = line_chart(
        lines, x_label="step", y_label="loss scale", powers_of_two=True, describe="loss scale over steps"
    )
    return _chart("Loss scale", chart, "First seed. A red cross is a skipped step.") + told


def _time_figure(recipe: Mapping[str, Any]) -> str:
    bars = [
        Bar(row["label"], _classes(row), row["seconds"] * 1e3, f"{row['seconds'] * 1e3:,.2f} ms")
        for row in recipe["rows"]
        if row["seconds"]
    ]
    note = "Median of steps taken in turns, one of each level after the other."
    return _chart("Time of a step", bar_chart(bars, describe="milliseconds a step"), note) if bars else ""


def _memory_figure(rows: Sequence[Mapping[str, Any]]) -> str:
    bars = [
        Bar(
            row["label"],
            _classes(row),
            row["peak_bytes"],
            f"{row['peak_bytes'] / 1e6:,.1f}, saved {row['saved_bytes'] / 1e6:,.1f} MB",
            inner=row["saved_bytes"],
        )
        for row in rows
        if row["peak_bytes"]
    ]
    note = "Pale: peak of all tensors during a step. Solid: kept for backward, parameters not counted."
    return _chart("Memory", bar_chart(bars, describe="megabytes"), note) if bars else ""


def _chart(title: str, drawing: str, note: str) -> str:
    plot = f"<div class='plot' tabindex='0'>{drawing}</div>"
    return f"<figure><h3>{escape(title)}</h3>{plot}<figcaption>{escape(note)}</figcaption></figure>"
