"""Bits left before overflow: how they are counted, how they move over the steps, when they run out.

Headroom of a tensor in a format is log2(largest number / largest magnitude): 3 means that it may grow
eightfold. A forecast fits a line through the latest headrooms and is made only where the trend is clear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.formats import Format, format_of

#: Points a forecast looks back on, and the least it needs.
WINDOW, LEAST = 32, 6
#: Headroom in bits beyond which a forecast would be a guess.
FAR = 10.0
#: A trend counts when its slope is this many standard errors from zero.
CLEAR = 4.0


def headroom(amax: float, fmt: str | Format) -> float:
    """Bits between `amax` and the largest number of `fmt`; inf for 0, -inf where it is not finite."""
    fmt = format_of(fmt)
    if not math.isfinite(amax):
        return -math.inf
    return math.log2(fmt.max / amax) if amax > 0 else math.inf


@dataclass(frozen=True)
class Trend:
    """A line through log2(largest magnitude): `slope` in bits a step, `now` its value at the last step."""

    slope: float
    error: float
    now: float

    @property
    def clear(self) -> bool:
        """Whether the slope is more than noise."""
        return abs(self.slope) > CLEAR * self.error and abs(self.slope) > 1e-9


def trend(steps: Sequence[int], amax: Sequence[float]) -> Trend | None:
    """Least-squares line through the last WINDOW finite, nonzero points; None with fewer than LEAST."""
    points = [(s, math.log2(m)) for s, m in zip(steps, amax) if m > 0 and math.isfinite(m)][-WINDOW:]
    if len(points) < LEAST:
        return None
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    error = math.sqrt(rest / (n - 2) / spread)
    return Trend(slope, error, mean_y + slope * (points[-1][0] - mean_x))


@dataclass(frozen=True)
class Forecast:
    """`path` leaves the range of `format` in about `steps` steps if it goes on as it does."""

    path: str
    kind: str
    format: str
    steps: int

    def __str__(self) -> str:
        what = "" if self.kind == "activation" else f" ({self.kind})"
        return f"{self.path}{what} overflows {self.format} in about {self.steps} steps"


def forecast(
    path: str, kind: str, steps: Sequence[int], amax: Sequence[float], fmt: Format
) -> Forecast | None:
    """When the tensor outgrows `fmt`; None without a clear trend upward, or beyond 6 times what was seen."""
    line = trend(steps, amax)
    if line is None or not line.clear or line.slope <= 0 or math.log2(fmt.max) - line.now > FAR:
        return None
    lately = trend(steps[-LEAST:], amax[-LEAST:])
    if lately is None or lately.slope < line.slope / 2:
        return None  # the growth of early training, which flattens out
    left = (math.log2(fmt.max) - line.now) / line.slope
    seen = steps[-1] - steps[max(0, len(steps) - WINDOW)]
    if not 0 < left < 6 * seen:
        return None
    digits = max(0, math.floor(math.log10(max(left, 1))) - 1)
    return Forecast(path, kind, fmt.name, max(1, round(left, -digits).__trunc__()))
