"""Small SVG charts as strings: lines over steps and horizontal bars.

Colours and fonts come from the page's CSS classes (`level-O1`, `dtype-fp16`), so that one drawing serves
light and dark. Every text is escaped. Nothing here knows about training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 40


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


def _power_label(value: float) -> str:
    return f"2<tspan dy='-4' font-size='9'>{round(math.log2(value))}</tspan>"


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    powers_of_two: bool = False,
    describe: str = "",
    band: Sequence[tuple[float, float, float]] = (),
    marked: Sequence[float] = (),
) -> str:
    """Curves over steps; `powers_of_two` gives a logarithmic axis. Points not finite break a curve.

    `band`: (x, low, high) of a grey area behind them; `marked`: steps with a line across the chart.
    """
    kept = [(x, y) for line in lines for x, y in line.points if _drawable(y, powers_of_two)]
    kept += [(x, y) for x, low, high in band for y in (low, high) if kept]
    if not kept:
        return "<p class='quiet'>no finite values to draw</p>"
    x_low, x_high = min(x for x, _ in kept), max(x for x, _ in kept)
    y_low, y_high = min(y for _, y in kept), max(y for _, y in kept)
    if powers_of_two:
        y_low, y_high = y_low / 2, y_high * 2
    else:
        y_low, y_high = y_low - 0.04 * (y_high - y_low), y_high + 0.04 * ((y_high - y_low) or 1.0)
    scale: Callable[[float], float] = math.log2 if powers_of_two else float
    across = _mapper(x_low, x_high, _LEFT, WIDTH - _RIGHT)
    vertical = _mapper(scale(y_low), scale(y_high), HEIGHT - _BOTTOM, _TOP)

    def up(y: float) -> float:
        return vertical(scale(y))

    ticks = power_ticks(y_low, y_high) if powers_of_two else nice_ticks(y_low, y_high)
    parts = [
        _frame(across, up, nice_ticks(x_low, x_high, 6), ticks, powers_of_two),
        _axis_names(x_label, y_label),
    ]
    if band:
        parts.append(_area(band, across, up))
    parts += [_mark(across(x), x) for x in marked if x_low <= x <= x_high]
    parts.extend(_curve(line, across, up, powers_of_two) for line in lines)
    return _svg(WIDTH, HEIGHT, describe or f"{y_label} over {x_label}", parts)


def _area(
    band: Sequence[tuple[float, float, float]], across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    there = [f"{across(x):.1f} {up(high):.1f}" for x, _, high in band]
    back = [f"{across(x):.1f} {up(low):.1f}" for x, low, _ in reversed(band)]
    return f"<path class='band' d='M{'L'.join([*there, *back])}Z'/>"


def _mark(x: float, step: float) -> str:
    name = f"<text class='marked' x='{x - 5:.1f}' y='{_TOP + 10}' text-anchor='end'>step {step:g}</text>"
    return f"<line class='marked' x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP}' y2='{HEIGHT - _BOTTOM}'/>{name}"


def _drawable(y: float, logarithmic: bool) -> bool:
    return math.isfinite(y) and (not logarithmic or y > 0)


def _mapper(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _svg(width: float, height: float, describe: str, parts: Sequence[str]) -> str:
    return (
        f"<svg viewBox='0 0 {width:g} {height:g}' role='img' aria-label='{escape(describe, quote=True)}'>"
        + "".join(parts)
        + "</svg>"
    )


def _frame(
    across: Callable[[float], float],
    up: Callable[[float], float],
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    powers_of_two: bool,
) -> str:
    parts = []
    labels = [_power_label(tick) for tick in y_ticks] if powers_of_two else tick_labels(y_ticks)
    for tick, label in zip(y_ticks, labels):
        y = up(tick)
        parts.append(f"<line class='grid' x1='{_LEFT}' x2='{WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text class='tick' x='{_LEFT - 7}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>")
    for tick, label in zip(x_ticks, tick_labels(x_ticks)):
        x = across(tick)
        place = f"x='{x:.1f}' y='{HEIGHT - _BOTTOM + 16}' text-anchor='middle'"
        parts.append(f"<text class='tick' {place}>{label}</text>")
    base = HEIGHT - _BOTTOM
    parts.append(f"<line class='axis' x1='{_LEFT}' x2='{WIDTH - _RIGHT}' y1='{base}' y2='{base}'/>")
    return "".join(parts)


def _axis_names(x_label: str, y_label: str) -> str:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    return (
        f"<text class='name' x='{(WIDTH + _LEFT) / 2}' y='{HEIGHT - 6}' text-anchor='middle'>"
        f"{escape(x_label)}</text>"
        f"<text class='name' transform='translate(13 {middle}) rotate(-90)' text-anchor='middle'>"
        f"{escape(y_label)}</text>"
    )


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
            path.append((f"H{across(x):.1f}" if line.steps and y != before else "") + _to(across(x), up(y)))
        pen_up, before = False, y
    heights = dict(line.points)
    title = f"<title>{escape(line.name)}</title>"
    drawn = f"<path class='curve {line.classes}' d='{''.join(path)}'>{title}</path>"
    return drawn + "".join(
        f"<path class='skip {line.classes}' d='{_cross(across(x), up(heights[x]))}'>"
        f"<title>{escape(line.name)}: step {x:g} skipped</title></path>"
        for x in line.marks
        if x in heights and _drawable(heights[x], logarithmic)
    )


def _to(x: float, y: float) -> str:
    return f"L{x:.1f} {y:.1f}"


def _cross(x: float, y: float) -> str:
    return f"M{x - 3.5:.1f} {y - 3.5:.1f}l7 7m0 -7l-7 7"


def bar_chart(bars: Sequence[Bar], *, describe: str) -> str:
    """Horizontal bars on a common scale from zero, one row each; `inner` is drawn solid over a pale bar."""
    row, gap, text_width = 24, 8, 150
    label_width = 16 + 7 * max((len(bar.label) for bar in bars), default=0)
    top = max((bar.value for bar in bars if math.isfinite(bar.value)), default=0.0) or 1.0
    length = WIDTH - label_width - text_width
    parts: list[str] = []
    for index, bar in enumerate(bars):
        y = index * (row + gap)
        wide = max(1.0, bar.value / top * length)
        name = f"x='{label_width - 8}' y='{y + 16}' text-anchor='end'"
        pale = " pale" if bar.inner is not None else ""
        parts.append(f"<text class='label' {name}>{escape(bar.label)}</text>")
        parts.append(_block(label_width, y, wide, row, bar.classes + pale, f"{bar.label}: {bar.text}"))
        if bar.inner is not None:
            solid = max(1.0, bar.inner / top * length)
            parts.append(_block(label_width, y, solid, row, bar.classes, f"{bar.label}: {bar.text}"))
        end = f"x='{label_width + wide + 8:.1f}' y='{y + 16}'"
        parts.append(f"<text class='value' {end}>{escape(bar.text)}</text>")
    return _svg(WIDTH, len(bars) * (row + gap), describe, parts)


def _block(x: float, y: float, width: float, height: float, classes: str, title: str) -> str:
    return (
        f"<rect class='bar {classes}' x='{x}' y='{y}' width='{width:.1f}' height='{height}' rx='2'>"
        f"<title>{escape(title)}</title></rect>"
    )
