"""The words of reports: cells of tables, what each setting did and what bounds its step, and the verdict.

Headings and cells are the same on the terminal and in the page; every sentence is made from measured numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from statistics import median

from halfstep.policy.levels import LEVELS
from halfstep.policy.ops import TABLES, Rule
from halfstep.ratios import number, size_in_words, speed_in_words
from halfstep.report.comparison import OpCost, RecipeRows
from halfstep.report.comparison import SettingRow as Row


def columns(metric: str) -> tuple[str, ...]:
    """Headings for a recipe whose metric is "accuracy" or "loss"."""
    shown = "test accuracy %" if metric == "accuracy" else "test loss"
    return ("level", shown, "from O0", "ms/step", "samples/s", "peak MB", "saved MB", "skipped", "scale")


def cells(row: Row, metric: str, slow: Mapping[str, str]) -> list[str]:
    """One row as text; `slow` holds the dtypes this device has no fast arithmetic for."""
    difference = row.difference
    return [
        row.label + (" (slow here)" if row.dtype in slow else ""),
        _final(row, metric),
        "" if difference is None or not isfinite(difference) else _value(difference, metric, sign="+"),
        number(row.seconds, "{:,.2f}", 1e3) + (f" ± {50 * row.noise:.0f} %" if row.noise else ""),
        number(row.samples_per_second, "{:,.0f}"),
        number(row.peak_bytes, "{:,.1f}", 1e-6),
        number(row.saved_bytes, "{:,.1f}", 1e-6),
        str(row.skipped),
        "none" if row.last_scale == 1.0 else number(row.last_scale, "{:,.0f}"),
    ]


def _final(row: Row, metric: str) -> str:
    if row.mean is None:
        return "failed"
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


#: A setting whose step takes more than this share of fp32's does not pay.
PAYS = 0.98


def sentence(row: Row, base: Row | None, slow: Mapping[str, str]) -> str:
    """Return what the row's level did, what that bought against O0, and what bounds its step."""
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
    comparisons: list[str] = []
    if row.seconds and base.seconds:
        comparisons.append(speed_in_words(row.seconds / base.seconds))
    for mine, its, what in (
        (row.peak_bytes, base.peak_bytes, "peak memory"),
        (row.saved_bytes, base.saved_bytes, "saved memory"),
    ):
        if mine and its:
            comparisons.append(size_in_words(mine / its, what))
    slower = bool(row.seconds and base.seconds and row.seconds > PAYS * base.seconds)
    pays = " It does not pay here: fp32 is as fast; level auto would take the fastest." if slower else ""
    return f"Against O0: {', '.join(comparisons)}.{pays}" if comparisons else ""


def _scaling(row: Row) -> str:
    if row.failed:
        return f"A run failed: {row.failed.rstrip('.')}."
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


def costs(row: Row) -> str:
    """The row's costliest ops with their times and what would shorten them; "" where none were measured."""
    ops, whole = row.ops, row.profiled
    if not ops or not whole:
        return ""
    share = 100 * sum(op.seconds for op in ops) / whole
    summary = "; ".join(_op(op, row.dtype) for op in ops)
    count = "op that costs most is" if len(ops) == 1 else f"{len(ops)} ops that cost most are"
    return f"The {count} {share:.0f} % of a step: {summary}."


def _op(op: OpCost, dtype: str) -> str:
    where = f" in {op.module}" if op.module else ""
    against = ""
    if dtype != "fp32" and op.fp32 is not None:
        against = f" (fp32 {_time(op.fp32)})"
    return f"{op.op} {op.direction}{where} {_time(op.seconds)}{against}: {remedy(op, dtype)}"


def remedy(op: OpCost, dtype: str) -> str:
    """Return what would shorten one op, given its times in the dtype and in fp32."""
    if op.op == "cast":
        return "casts; O2 or neighbours in one dtype need fewer"
    if op.op == "accumulate gradients":
        return "larger batches and fewer backward passes a step"
    row = TABLES["halfstep"].get(op.op)
    low = row is not None and row.rule is Rule.LOW
    if dtype == "fp32":
        return f"16 bits may shorten it ({'O1 or O2' if low else 'O2'})"
    if op.fp32 is not None and op.seconds > 1.05 * op.fp32:
        return f"slower than in fp32; a plan rule full for {op.module or 'it'}, or level auto"
    if low:
        return "faster matrix arithmetic"
    return "bound by memory; fewer or smaller tensors, or torch.compile"


#: A level must be so much faster, or smaller, to be worth its name.
_FASTER, _SMALLER = 0.97, 0.9
#: O3 gives up masters: it must take this share of the next best time, or less.
_WORTH_NO_MASTERS = 0.9
#: Times of one step that differ by more than this from one part of the rounds to the next, for most of the
#: settings, say that the machine does other work.
BUSY = 0.25


def find_recommended(recipe: RecipeRows) -> Row | None:
    """The row that trains as well as O0's and pays; None where O0 stays, or where nothing can be said."""
    base, clock = recipe.base, _clock(recipe)
    if base is None or not base.seconds or clock is None:
        return None
    good = _good(recipe, base)
    if not good:
        return None
    times = {row.label: _ratio(clock(row), clock(base)) for row in good}
    best = min(good, key=lambda row: times[row.label])
    with_masters = [row for row in good if row.level != "O3"]
    if best.level == "O3" and with_masters:
        second = min(with_masters, key=lambda row: times[row.label])
        best = best if times[best.label] <= _WORTH_NO_MASTERS * times[second.label] else second
    return best if times[best.label] <= _FASTER else None


def _good(recipe: RecipeRows, base: Row) -> list[Row]:
    return [row for row in recipe.rows if row is not base and _as_good(row, base, recipe.metric)]


def verdict(recipe: RecipeRows) -> str:
    """`Recommended: O2 bf16. 1.4x faster, 15 % less memory, test loss within 0.012 of O0's (...): hs...`."""
    rows, base = recipe.rows, recipe.base
    if recipe.interrupted:
        return f"Interrupted: no verdict; {len(rows)} setting{'s' if len(rows) > 1 else ''} trained"
    if base is None:
        return "No verdict: compare with O0 (--level O0,...)"
    if base.failed or base.diverged:
        return f"No verdict: O0 itself {'failed' if base.failed else 'diverged'}"
    good = _good(recipe, base)
    if not good:
        return f"Keep fp32 (O0): no other setting trains as well ({len(rows) - 1} compared)"
    best = find_recommended(recipe)
    if best is not None:
        remark = f" ({busy(recipe)})" if busy(recipe) else ""
        return f"Recommended: {best.label}. {_gains(best, base, recipe)}{remark}: {code(best)}"
    small = min(good, key=lambda row: row.peak_bytes or float("inf"))
    if _clock(recipe) is None:
        return (
            f"Speed not judged: {busy(recipe)}. {small.label}: {_gains(small, base, recipe)}: {code(small)}"
        )
    if _ratio(small.peak_bytes, base.peak_bytes) <= _SMALLER:
        return f"Keep fp32 (O0): no setting here is faster. {small.label}: {_gains(small, base, recipe)}"
    return "Keep fp32 (O0): no setting here is faster"


def code(row: Row) -> str:
    """Return the call that trains at this row's setting."""
    return f'hs.prepare(model, optimizer, level="{row.level}", dtype="{row.dtype}")'


def busy(recipe: RecipeRows) -> str:
    """Return a warning where the times of interleaved rounds differ too much; empty where they do not."""
    noises = [row.noise for row in recipe.rows if row.noise is not None]
    noise = median(noises) if noises else 0.0  # other work slows every setting of a round
    if noise <= BUSY:
        return ""
    return f"the machine is busy: times differ by {100 * noise:.0f} % from round to round"


def _on_clock(row: Row) -> float | None:
    return row.seconds


def _of_processor(row: Row) -> float | None:
    return row.processor_seconds


def _clock(recipe: RecipeRows) -> Callable[[Row], float | None] | None:
    """Return by which time of a step settings are compared: of the clock, or of the processor if that varies.

    None where both vary.
    """
    if not busy(recipe):
        return _on_clock
    noises = [row.processor_noise for row in recipe.rows if row.processor_noise is not None]
    return _of_processor if noises and median(noises) <= BUSY else None


def _as_good(row: Row, base: Row, metric: str) -> bool:
    if row.failed or row.diverged or not row.seconds or row.difference is None:
        return False
    worse = -row.difference if metric == "accuracy" else row.difference
    return isfinite(worse) and worse <= _margin(row, base, metric)


def _margin(row: Row, base: Row, metric: str) -> float:
    """By how much a test metric may be worse than O0's: twice the spread over seeds, at least 0.005."""
    spreads = [x.spread for x in (row, base) if x.spread is not None and isfinite(x.spread)]
    least = 0.005 if metric == "accuracy" else 0.005 * abs(base.mean or 0.0)
    return max(2 * max(spreads, default=0.0), least)


def _ratio(mine: float | None, its: float | None) -> float:
    return mine / its if mine and its else 1.0


def _gains(row: Row, base: Row, recipe: RecipeRows) -> str:
    clock, gains = _clock(recipe), list[str]()
    if clock is not None:
        speed = speed_in_words(_ratio(clock(row), clock(base)))
        gains.append(f"{speed} by processor time" if clock is _of_processor else speed)
    memory = size_in_words(_ratio(row.peak_bytes, base.peak_bytes), "memory")
    margin = f"test {recipe.metric} within {_margin(row, base, recipe.metric):.2g} of O0's ({recipe.trained})"
    check = "; no masters: check a full run" if row.level == "O3" else ""
    return ", ".join([*gains, memory, f"{margin}{check}"])
