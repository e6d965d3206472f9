"""Ratios of times and sizes, and numbers that may be missing, as reports, tables and verdicts write them."""


def speed_in_words(ratio: float) -> str:
    """A time as a share of another in words: 0.5 is `2.0x faster`."""
    if 0.98 < ratio < 1.02:
        return "as fast"
    return f"{1 / ratio:.2g}x faster" if ratio < 1 else f"{ratio:.2g}x slower"


def size_in_words(ratio: float, what: str) -> str:
    """A size as a share of another in words: 0.6 is `40 % less memory`."""
    percent = round(100 * (ratio - 1))
    if percent == 0:
        return f"the same {what}"
    return f"{abs(percent)} % {'less' if percent < 0 else 'more'} {what}"


def number(value: float | None, text: str, factor: float = 1.0) -> str:
    """A number as `text` formats it; empty where it was not measured."""
    return "" if value is None else text.format(value * factor)
