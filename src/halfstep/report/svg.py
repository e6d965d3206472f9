"""Small charts as strings: lines over steps as SVG, horizontal bars as a list.

Colours and fonts come from the page's CSS classes (`level-O1`, `dtype-fp16`), so that one drawing serves
light and dark. Every text is escaped. Nothing here knows about training.

Lines are drawn twice, for a page and for a phone (`wide`, `narrow`): the page's CSS shows the one that fits,
so that text is as large on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_RIGHT, _TOP, _BOTTOM = 14, 14, 40
#: Points of a curve that show their value under the pointer.
_DOTS = 40


@dataclass(frozen=True)
class _Canvas:
    """Room for one drawing, in the units that are pixels where it fits: `ticks` along x and y."""

    name: str
    width: int
    height: int
    left: int
    ticks: tuple[int, int]

    @property
    def base(self) -> int:
        """Where the horizontal axis lies."""
        return self.height - _BOTTOM


_WIDE = _Canvas("wide", 640, 300, 58, (6, 5))
_NARROW = _Canvas("narrow", 330, 250, 52, (4, 5))


@dataclass(frozen=True)
class Line:
    """A named curve: points (x, y) in data units, its CSS classes, and x positions to mark on it."""

    name: str
    classes: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[float] = ()
    steps: bool = False


@dataclass(frozen=True)
class Bar:
    """A labelled bar; `text` is written at its end, `inner` is the part drawn solid."""

    label: str
    classes: str
    value: float
    text: str
    inner: float | None = None


def number(value: float) -> str:
    """A tick label: at most three significant digits, no needless zeros."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        exponent = math.floor(math.log10(abs(value)))
        mantissa = f"{value / 10**exponent:.3g}"
        return f"{mantissa}e{exponent}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) that cover [low, high] inside."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    rough = span / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5) if m * power >= rough), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)]


def power_ticks(low: float, high: float) -> list[float]:
    """Powers of two inside [low, high], thinned to at most eight."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    stride = max(1, math.ceil((last - first + 1) / 8))
    return [2.0**k for k in range(first, last + 1, stride)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels of the fewest digits that tell neighbouring ticks apart."""
    labels = [number(tick) for tick in ticks]
    digits = 0
    while len(set(labels)) < len(set(ticks)) and digits < 12:
        digits += 1
        labels = [f"{tick:,.{digits}f}" for tick in ticks]
    return labels


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    powers_of_two: bool = False,
    band: Sequence[tuple[float, float, float]] = (),
    marked: Sequence[float] = (),
    danger: float | None = None,
) -> str:
    """Curves over steps; `powers_of_two` gives a logarithmic axis. Points not finite break a curve.

    `band`: (x, low, high) of a grey area behind them; `marked`: steps with a line across the chart;
    `danger`: the axis starts at 0 or below, and the part below this is red.
    """
    kept = [(x, y) for line in lines for x, y in line.points if _drawable(y, powers_of_two)]
    kept += [(x, y) for x, low, high in band for y in (low, high) if kept]
    if not kept:
        return "<p class='quiet'>no finite values to draw</p>"
    x_low, x_high = min(x for x, _ in kept), max(x for x, _ in kept)
    y_low, y_high = min(y for _, y in kept), max(y for _, y in kept)
    if danger is not None:
        y_low, y_high = min(0.0, y_low), max(y_high, 2 * danger)
    elif powers_of_two:
        y_low, y_high = y_low / 2, y_high * 2
    else:
        y_low, y_high = y_low - 0.04 * (y_high - y_low), y_high + 0.04 * ((y_high - y_low) or 1.0)
    scale: Callable[[float], float] = math.log2 if powers_of_two else float
    told = escape(f"{y_label} by {x_label}", quote=True)

    def drawn(on: _Canvas) -> str:
        across = _mapper(x_low, x_high, on.left, on.width - _RIGHT)
        vertical = _mapper(scale(y_low), scale(y_high), on.base, _TOP)

        def up(y: float) -> float:
            return vertical(scale(y))

        ticks = power_ticks(y_low, y_high) if powers_of_two else nice_ticks(y_low, y_high, on.ticks[1])
        parts = [
            _frame(on, across, up, nice_ticks(x_low, x_high, on.ticks[0]), ticks, powers_of_two),
            f"<text class='name' x='{(on.width + on.left) / 2}' y='{on.height - 6}' text-anchor='middle'>"
            f"{escape(x_label)}</text>",
            f"<text class='name' transform='translate(13 {(_TOP + on.base) / 2}) rotate(-90)' "
            f"text-anchor='middle'>{escape(y_label)}</text>",
        ]
        if danger is not None:
            parts.append(_area([(x, y_low, danger) for x in (x_low, x_high)], across, up, "danger"))
        if band:
            parts.append(_area(band, across, up))
        parts += [_mark(on, across(x), x) for x in marked if x_low <= x <= x_high]
        parts.extend(_curve(line, across, up, powers_of_two) for line in lines)
        size = f"viewBox='0 0 {on.width:g} {on.height:g}'"
        return f"<svg class='{on.name}' {size} role='img' aria-label='{told}'>{''.join(parts)}</svg>"

    return f"<div>{drawn(_WIDE)}{drawn(_NARROW)}</div>"


def _area(
    band: Sequence[tuple[float, float, float]],
    across: Callable[[float], float],
    up: Callable[[float], float],
    name: str = "band",
) -> str:
    there = [f"{across(x):.1f} {up(high):.1f}" for x, _, high in band]
    back = [f"{across(x):.1f} {up(low):.1f}" for x, low, _ in reversed(band)]
    return f"<path class='{name}' d='M{'L'.join([*there, *back])}Z'/>"


def _mark(on: _Canvas, x: float, step: float) -> str:
    before = x - 5 > on.left + 60
    at = f"x='{x - 5 if before else x + 5:.1f}' y='{_TOP + 10}' text-anchor='{'end' if before else 'start'}'"
    name = f"<text class='marked' {at}>step {step:g}</text>"
    return f"<line class='marked' x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP}' y2='{on.base}'/>{name}"


def _drawable(y: float, logarithmic: bool) -> bool:
    return math.isfinite(y) and (not logarithmic or y > 0)


def _mapper(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _frame(
    on: _Canvas,
    across: Callable[[float], float],
    up: Callable[[float], float],
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    powers_of_two: bool,
) -> str:
    parts = []
    ends = f"x1='{on.left}' x2='{on.width - _RIGHT}'"
    labels = tick_labels(y_ticks)
    if powers_of_two:
        labels = [f"2<tspan dy='-4' font-size='9'>{round(math.log2(tick))}</tspan>" for tick in y_ticks]
    for tick, label in zip(y_ticks, labels):
        y = up(tick)
        parts.append(f"<line class='grid' {ends} y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text class='tick' x='{on.left - 7}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>")
    for tick, label in zip(x_ticks, tick_labels(x_ticks)):
        place = f"x='{across(tick):.1f}' y='{on.base + 16}' text-anchor='middle'"
        parts.append(f"<text class='tick' {place}>{label}</text>")
    parts.append(f"<line class='axis' {ends} y1='{on.base}' y2='{on.base}'/>")
    return "".join(parts)


def _curve(
    line: Line, across: Callable[[float], float], up: Callable[[float], float], logarithmic: bool
) -> str:
    path: list[str] = []
    pen_up, before = True, 0.0
    for x, y in line.points:
        if not _drawable(y, logarithmic):
            pen_up = True
            continue
        if pen_up:
            path.append(f"M{across(x):.1f} {up(y):.1f}")
        else:
            aside = f"H{across(x):.1f}" if line.steps and y != before else ""
            path.append(f"{aside}L{across(x):.1f} {up(y):.1f}")
        pen_up, before = False, y
    heights = dict(line.points)
    stride = max(1, len(line.points) // _DOTS)
    dots = "".join(
        f"<circle class='dot {line.classes}' cx='{across(x):.1f}' cy='{up(y):.1f}' r='4'>"
        f"<title>{escape(line.name)}, step {x:g}: {y:.4g}</title></circle>"
        for x, y in line.points[::stride]
        if _drawable(y, logarithmic)
    )
    title = f"<title>{escape(line.name)}</title>"
    drawn = f"<path class='curve {line.classes}' d='{''.join(path)}'>{title}</path>"
    return (
        drawn
        + dots
        + "".join(
            f"<path class='skip {line.classes}' "
            f"d='M{across(x) - 3.5:.1f} {up(heights[x]) - 3.5:.1f}l7 7m0 -7l-7 7'>"
            f"<title>{escape(line.name)}: step {x:g} skipped</title></path>"
            for x in line.marks
            if x in heights and _drawable(heights[x], logarithmic)
        )
    )


def bar_chart(bars: Sequence[Bar], *, describe: str) -> str:
    """Horizontal bars on a common scale from zero, each below its label; `inner` is solid over a pale bar."""
    most = max((bar.value for bar in bars if math.isfinite(bar.value)), default=0.0) or 1.0
    rows: list[str] = []
    for bar in bars:
        drawn = [("", bar.value)] if bar.inner is None else [("pale", bar.value), ("", bar.inner)]
        parts = "".join(f"<i class='{name}' style='width:{100 * x / most:.1f}%'></i>" for name, x in drawn)
        text = f"<span>{escape(bar.label)}</span><span>{escape(bar.text)}</span>"
        rows.append(f"<li class='{bar.classes}'>{text}<div>{parts}</div></li>")
    return f"<ul class='bars' aria-label='{escape(describe, quote=True)}'>{''.join(rows)}</ul>"
