"""`halfstep formats`: the number formats as a table, or how each of them stores the numbers given."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Annotated

import tyro
from rich.text import Text

from halfstep.cli._options import Flag, with_metavar
from halfstep.cli._output import console, print_json, table
from halfstep.errors import ConfigError
from halfstep.formats import FORMATS, Format, Stored, describe

_FACTS = (
    "name",
    "bits",
    "exponent_bits",
    "mantissa_bits",
    "max",
    "smallest_normal",
    "smallest_subnormal",
    "epsilon",
    "has_inf",
)
_FIELD_STYLES = ("bold red", "green", "cyan")
_STATUS_STYLES = {"underflow": "red", "overflow": "red", "nan": "red", "subnormal": "yellow"}


def run(
    numbers: tyro.conf.Positional[Annotated[tuple[str, ...], with_metavar("[NUMBER ...]")]] = (),
    json: Flag = False,
) -> None:
    """Show the number formats, or how each stores a number.

    Args:
        numbers: Numbers to store: 0.1, 1e-8, 1/3, 0x1p-24, nan, inf, -0. Without any: the table of formats.
        json: Print JSON instead of tables.
    """
    if not numbers:
        return _print_formats(json)
    values = [(text, parse_number(text)) for text in numbers]
    if json:
        return print_json([_as_json(text, value) for text, value in values])
    for text, value in values:
        _print_number(text, value)
    return None


def parse_number(text: str) -> float | Fraction:
    """Return the number that was written, exactly; a float for nan, infinities and zeros.

    Raises:
        ConfigError: it is no number, or one with more digits than anybody means.
    """
    try:
        if "0x" in text.lower():
            return float.fromhex(text)
        rough = float(Fraction(text)) if "/" in text else float(text)
        if math.isnan(rough) or "inf" in text.lower():
            return rough
        if len(text) > 1000 or ("/" not in text and abs(Decimal(text).adjusted()) > 5000):
            raise ConfigError(f"{text[:40]!r} is beyond what can be shown; give an exponent within 5000")
        exact = Fraction(text)
    except (ValueError, ZeroDivisionError, OverflowError, InvalidOperation) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{text!r} is not a number; expected one like 0.1, 1e-8, 1/3, 0x1p-24, nan, inf or -0"
        ) from error
    if exact == 0:
        return -0.0 if text.strip().startswith("-") else 0.0
    return exact


def _print_formats(json: bool) -> None:
    if json:
        return print_json([{name: getattr(f, name) for name in _FACTS} for f in FORMATS.values()])
    columns = ("format", "bits", "layout", "max", "smallest normal", "smallest subnormal", "epsilon", "inf")
    cells = [_format_cells(f) for f in FORMATS.values()]
    right = "bits,max,smallest normal,smallest subnormal,epsilon"
    out = console()
    out.print(table("Number formats", columns, cells, right))
    out.print("layout: [bold red]s[/]ign, [green]e[/]xponent, [cyan]m[/]antissa.", end=" ")
    out.print("tf32 is how fp32 matrices can be multiplied; no tensor holds it.")
    out.print("Half the smallest subnormal, or less, becomes zero (ties to even).")
    return None


def _format_cells(f: Format) -> list[str | Text]:
    layout = _color_fields(("1", str(f.exponent_bits), str(f.mantissa_bits)), ("s", "e", "m"))
    numbers = (f.max, f.smallest_normal, f.smallest_subnormal, f.epsilon)
    return [f.name, str(f.bits), layout, *(f"{x:.6g}" for x in numbers), "yes" if f.has_inf else "no"]


def _color_fields(fields: tuple[str, ...], suffixes: tuple[str, ...] = ("", "", "")) -> Text:
    text = Text()
    for field, suffix, style in zip(fields, suffixes, _FIELD_STYLES):
        text.append((" " if text else "") + field + suffix, style)
    return text


def _print_number(text: str, value: float | Fraction) -> None:
    stored = [describe(value, f) for f in FORMATS.values()]
    columns = ("format", "stored value", "absolute error", "relative error", "spacing", "what happened")
    out = console()
    right = "stored value,absolute error,relative error,spacing"
    out.print(table(f"{text} as each format stores it", columns, [_value_cells(s) for s in stored], right))
    patterns = [[s.format.name, _color_fields((s.sign, s.exponent, s.mantissa))] for s in stored]
    out.print(table("", ("format", "sign exponent mantissa"), patterns))


def _value_cells(s: Stored) -> list[str | Text]:
    errors = ["" if math.isnan(e) else f"{e:.3g}" for e in (s.absolute_error, s.relative_error, s.spacing)]
    return [s.format.name, repr(s.value), *errors, Text(explain(s), _STATUS_STYLES.get(s.status, ""))]


def explain(s: Stored) -> str:
    """Return what a format did to a number, in a few words."""
    f = s.format
    texts = {
        "exact": "exact",
        "rounded": "rounded",
        "subnormal": f"subnormal: below {f.smallest_normal:.3g}, fewer bits",
        "underflow": f"underflow: zero up to {f.smallest_subnormal / 2:.3g}",
        "overflow": f"overflow: beyond {f.max:.6g}" + ("" if f.has_inf else ", and no infinity"),
        "infinity": "exact",
        "nan": "not a number",
    }
    return texts[s.status]


def _as_json(text: str, value: float | Fraction) -> dict[str, object]:
    formats = {}
    for f in FORMATS.values():
        s = describe(value, f)
        formats[f.name] = {
            "value": s.value,
            "bits": f"{s.sign} {s.exponent} {s.mantissa}",
            "absolute_error": s.absolute_error,
            "relative_error": s.relative_error,
            "spacing": s.spacing,
            "status": s.status,
        }
    return {"given": text, "formats": formats}
