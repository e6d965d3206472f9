"""Small charts as strings: lines over steps as SVG.

Colours and fonts come from the page's CSS classes (`level-O1`, `dtype-fp16`), so that one drawing serves
light and dark. Every text is escaped. Nothing here knows about training.

A drawing is as wide as the page gives it, and small enough that its text is legible on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 420, 250
_LEFT, _RIGHT, _TOP, _BASE = 70, _WIDTH - 10, 12, _HEIGHT - 38
#: Points of a curve that show their value under the pointer.
_DOTS = 40

Place = Callable[[float], float]
"""Where a value lies on the drawing."""


@dataclass(frozen=True)
class Line:
    """A named curve: points (x, y) in data units, its CSS classes, and x positions to mark on it."""

    name: str
    classes: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[float] = ()
    steps: bool = False


def number(value: float) -> str:
    """Return a tick label: as many digits as round numbers need."""
    return f"{value:,.6g}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) that cover [low, high] inside."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5) if m * power >= rough), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)]


def power_ticks(low: float, high: float) -> list[float]:
    """Powers of two inside [low, high], thinned to at most eight."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    stride = max(1, math.ceil((last - first + 1) / 8))
    return [2.0**k for k in range(first, last + 1, stride)]


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
    points = [(x, y) for line in lines for x, y in line.points if _drawable(y, powers_of_two)]
    points += [(x, y) for x, low, high in band for y in (low, high) if points]
    if not points:
        return "<p class='quiet'>no finite values to draw</p>"
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    if danger is not None:
        y_low, y_high = min(0.0, y_low), max(y_high, 2 * danger)
    elif powers_of_two:
        y_low, y_high = y_low / 2, y_high * 2
    else:
        y_low, y_high = y_low - 0.04 * (y_high - y_low), y_high + 0.04 * ((y_high - y_low) or 1.0)
    scale: Place = math.log2 if powers_of_two else float
    across, vertical = (
        _mapper(x_low, x_high, _LEFT, _RIGHT),
        _mapper(scale(y_low), scale(y_high), _BASE, _TOP),
    )

    def up(y: float) -> float:
        return vertical(scale(y))

    ticks = power_ticks(y_low, y_high) if powers_of_two else nice_ticks(y_low, y_high)
    parts = [
        _frame(across, up, nice_ticks(x_low, x_high), ticks, powers_of_two),
        f"<text class='name' x='{(_RIGHT + _LEFT) / 2}' y='{_HEIGHT - 6}' text-anchor='middle'>"
        f"{escape(x_label)}</text>",
        f"<text class='name' transform='translate(13 {(_TOP + _BASE) / 2}) rotate(-90)' "
        f"text-anchor='middle'>{escape(y_label)}</text>",
    ]
    if danger is not None:
        parts.append(_area([(x, y_low, danger) for x in (x_low, x_high)], across, up, "danger"))
    if band:
        parts.append(_area(band, across, up))
    parts += [_mark(across(x), x) for x in marked if x_low <= x <= x_high]
    parts += [_curve(line, across, up, powers_of_two) for line in lines]
    label = escape(f"{y_label} by {x_label}", quote=True)
    size = f"viewBox='0 0 {_WIDTH} {_HEIGHT}'"
    return f"<svg class='chart' {size} role='img' aria-label='{label}'>{''.join(parts)}</svg>"


def _area(band: Sequence[tuple[float, float, float]], across: Place, up: Place, name: str = "band") -> str:
    upper_edge = [f"{across(x):.1f} {up(high):.1f}" for x, _, high in band]
    lower_edge = [f"{across(x):.1f} {up(low):.1f}" for x, low, _ in reversed(band)]
    return f"<path class='{name}' d='M{'L'.join([*upper_edge, *lower_edge])}Z'/>"


def _mark(x: float, step: float) -> str:
    before = x - 5 > _LEFT + 60
    at = f"x='{x - 5 if before else x + 5:.1f}' y='{_TOP + 10}' text-anchor='{'end' if before else 'start'}'"
    name = f"<text class='marked' {at}>step {step:g}</text>"
    return f"<line class='marked' x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP}' y2='{_BASE}'/>{name}"


def _drawable(y: float, logarithmic: bool) -> bool:
    return math.isfinite(y) and (not logarithmic or y > 0)


def _mapper(low: float, high: float, start: float, end: float) -> Place:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _frame(
    across: Place, up: Place, x_ticks: Sequence[float], y_ticks: Sequence[float], powers_of_two: bool
) -> str:
    parts = []
    ends = f"x1='{_LEFT}' x2='{_RIGHT}'"
    for tick in y_ticks:
        label = number(tick)
        if powers_of_two:
            label = f"2<tspan dy='-4' font-size='9'>{round(math.log2(tick))}</tspan>"
        parts.append(f"<line class='grid' {ends} y1='{up(tick):.1f}' y2='{up(tick):.1f}'/>")
        place = f"x='{_LEFT - 7}' y='{up(tick) + 4:.1f}' text-anchor='end'"
        parts.append(f"<text class='tick' {place}>{label}</text>")
    for tick in x_ticks:
        place = f"x='{across(tick):.1f}' y='{_BASE + 16}' text-anchor='middle'"
        parts.append(f"<text class='tick' {place}>{number(tick)}</text>")
    parts.append(f"<line class='axis' {ends} y1='{_BASE}' y2='{_BASE}'/>")
    return "".join(parts)


def _curve(line: Line, across: Place, up: Place, logarithmic: bool) -> str:
    """Return the curve, dots that show their values under the pointer, and a cross at each mark."""
    path: list[str] = []
    before: float | None = None
    for x, y in line.points:
        if not _drawable(y, logarithmic):
            before = None
            continue
        corner = f"H{across(x):.1f}" if line.steps and before not in (None, y) else ""
        path.append(f"{'M' if before is None else corner + 'L'}{across(x):.1f} {up(y):.1f}")
        before = y
    drawn = {x: (across(x), up(y), y) for x, y in line.points if _drawable(y, logarithmic)}
    name = escape(line.name)
    parts = [f"<path class='curve {line.classes}' d='{''.join(path)}'><title>{name}</title></path>"]
    for x in [x for x, _ in line.points][:: max(1, len(line.points) // _DOTS)]:
        if x in drawn:
            at = f"cx='{drawn[x][0]:.1f}' cy='{drawn[x][1]:.1f}' r='4'"
            value = f"<title>{name}, step {x:g}: {drawn[x][2]:.4g}</title>"
            parts.append(f"<circle class='dot {line.classes}' {at}>{value}</circle>")
    for x in line.marks:
        if x in drawn:
            cross = f"M{drawn[x][0] - 3.5:.1f} {drawn[x][1] - 3.5:.1f}l7 7m0 -7l-7 7"
            skipped = f"<title>{name}: step {x:g} skipped</title>"
            parts.append(f"<path class='skip {line.classes}' d='{cross}'>{skipped}</path>")
    return "".join(parts)
