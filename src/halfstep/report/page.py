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
from halfstep.report.sentences import sentence
from halfstep.report.svg import Bar, Line, bar_chart, line_chart
from halfstep.report.table import cells, columns

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
        f"<p class='quiet'>{escape(about)}</p>{_table(recipe, slow)}{_legend(rows)}"
        f"<div class='charts'><div>{curves}</div><div>{bars}</div></div>"
        f"<ul class='levels'>{words}</ul></section>"
    )


def _classes(row: Mapping[str, Any]) -> str:
    own = row["label"] in (row["level"], f"{row['level']} {row['dtype']}")
    return f"level-{row['level']} dtype-{row['dtype']}" + ("" if own else " other-scale")


def _table(recipe: Mapping[str, Any], slow: Mapping[str, str]) -> str:
    metric = recipe["metric"]
    head = "".join(f"<th scope='col'>{escape(h)}</th>" for h in columns(metric))
    rows = (cells(row, metric, slow) for row in recipe["rows"])
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


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
    lines = []
    window = max(1, recipe["steps"] // 40)
    for row in recipe["rows"]:
        values = smooth(_average([run["losses"] for run in row["runs"] if run["losses"]]), window)
        points = [(i + 1.0, v) for i, v in _thin(values)]
        lines.append(Line(row["label"], _classes(row), points))
    chart = line_chart(lines, x_label="step", y_label="training loss", describe="training loss over steps")
    note = f"Mean over seeds, smoothed over {window} steps." if window > 1 else "Mean over seeds."
    return _chart("Training loss", chart, note)


def _thin(values: Sequence[float], most: int = 400) -> list[tuple[int, float]]:
    stride = max(1, math.ceil(len(values) / most))
    return [(i, values[i]) for i in range(0, len(values), stride)]


def _scale_figure(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        run = row["runs"][0]
        if any(scale != 1.0 for scale in run["scales"]):
            points = [(i + 1.0, scale) for i, scale in enumerate(run["scales"])]
            marks = [float(step) for step in run["skipped"]]
            lines.append(Line(row["label"], _classes(row), points, marks, steps=True))
    if not lines:
        return ""
    chart = line_chart(
        lines, x_label="step", y_label="loss scale", powers_of_two=True, describe="loss scale over steps"
    )
    return _chart("Loss scale", chart, "First seed. A red cross is a skipped step.")


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
    return f"<figure><h3>{escape(title)}</h3>{drawing}<figcaption>{escape(note)}</figcaption></figure>"
