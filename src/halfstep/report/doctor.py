"""The doctor's report as one HTML page: offline, escaped, usable by keyboard, readable at 200 modules.

The heat map is drawn in the browser from numbers embedded as JSON, since the loss-scale slider moves it;
everything else is plain HTML and SVG. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError
from halfstep.formats import FORMATS
from halfstep.report.svg import Line, line_chart
from halfstep.report.template import fill, text_of, write_page

_KINDS = {
    "activation": "activations",
    "activation_grad": "activation gradients",
    "gradient": "weight gradients",
    "weight": "weights",
    "update": "updates",
}
_SHOWN = 8
#: Bits of headroom below which a tensor is at the edge of its format.
_EDGE = 1.0


def write_doctor(document: Any, path: str | Path) -> Path:
    """Write the page of `render_doctor` to `path`, whole or not at all; ConfigError where impossible."""
    return write_page(render_doctor(document), path)


def render_doctor(document: Any) -> str:
    """Return the page for a document of the doctor, or for what `halfstep doctor --json` prints."""
    if not isinstance(document, Mapping):
        if not hasattr(document, "as_dict"):
            raise ConfigError(f"a report of {type(document).__name__}: expected the doctor's document")
        document = document.as_dict()
    context = {
        "document": document,
        "style": text_of("style.css") + text_of("doctor.css"),
        "script": text_of("doctor.js"),
        "numbers": _embed(document),
        "tags": {"works": "good", "untried": "open"},
        "heat": _heat_map(document),
        "headroom": _headroom(document),
        "scale": _scale(document),
        "dtypes": _dtypes(document),
    }
    return fill("doctor.html", context, few=_few)


def _embed(document: Mapping[str, Any]) -> str:
    """Return the heat map's numbers; `<` is written so that no text in them can close the script element."""
    rows: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for series in document.get("series", []):
        if series["samples"]:
            sample = series["samples"][-1]
            rows[series["kind"]].append(
                {
                    "path": _label(series),
                    "dtype": sample["dtype"],
                    "first": sample["first"],
                    "counts": list(sample["counts"]),
                    "zeros": sample["zeros"],
                    "bad": sample["infs"] + sample["nans"],
                    "scale": math.log2(sample["scale"]) if 0 < sample["scale"] < math.inf else 0,
                }
            )
    formats = {
        f.name: {
            "low": f.min_exponent - f.mantissa_bits,
            "normal": f.min_exponent,
            "high": f.max_exponent,
            "exact": f.mantissa_bits,
        }
        for f in FORMATS.values()
        if f.name in ("fp16", "bf16", "e4m3fn", "e5m2")
    }
    data = {"rows": rows, "formats": formats, "format": document.get("format", "fp16")}
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _label(series: Mapping[str, Any]) -> str:
    """Return a tensor's name, with the class of the module it comes out of."""
    kind = series.get("class", "")
    return f"{series['path']} ({kind})" if kind else series["path"]


def _few(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _heat_map(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the choices that the script draws by."""
    present = {s["kind"] for s in document.get("series", []) if s["samples"]}
    if not present:
        return None
    formats = ("fp16", "bf16", "e4m3fn", "e5m2")
    fmt = document.get("format", "fp16")
    return {
        "step": max(s["samples"][-1]["step"] for s in document["series"] if s["samples"]) + 1,
        "kinds": [(k, t) for k, t in _KINDS.items() if k in present],
        "formats": formats,
        "chosen": fmt if fmt in formats else "fp16",
    }


def _headroom(document: Mapping[str, Any]) -> dict[str, Any] | None:
    series = [s for s in document.get("series", []) if s["kind"] == "activation" and len(s["steps"]) > 1]
    if not series:
        return None
    top = FORMATS[document.get("format", "fp32")].max
    bits = [
        (
            _label(s),
            [(x + 1.0, math.log2(top / y)) for x, y in zip(s["steps"], s["amax"]) if _positive(y)],
        )
        for s in series
    ]
    bits = sorted((b for b in bits if b[1]), key=lambda b: min(y for _, y in b[1]))[:_SHOWN]
    lines = [Line(path, f"k{i}", points) for i, (path, points) in enumerate(bits)]
    chart = line_chart(
        lines, x_label="step", y_label="bits left", marked=_fault_marks(document), danger=_EDGE
    )
    return {
        "chart": chart,
        "note": f"The {len(bits)} tightest of {len(series)} modules' outputs, in {document.get('format')}. "
        "Red: less than one bit left.",
        "legend": [path for path, _ in bits],
        "ahead": document.get("forecasts", []),
    }


def _fault_marks(document: Mapping[str, Any]) -> list[float]:
    """Return the first fault's step, counted from 1, to be drawn in every chart."""
    bad = [b["step"] + 1.0 for b in document["bad"] if not b["harmless"]]
    return bad[:1]


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _scale(document: Mapping[str, Any]) -> dict[str, Any] | None:
    history = document.get("history", [])
    skips = [n for n in history if not n["taken"]]
    if not history or (not skips and all(n["scale"] == 1.0 for n in history)):
        return None
    points = [(n["step"] + 1.0, float(n["scale"])) for n in history]
    line = Line("loss scale", "k0", points, [n["step"] + 1.0 for n in skips], steps=True)
    if len({n["scale"] for n in history}) == 1 and not skips:
        return {"constant": f"The loss scale stayed at {history[0]['scale']:,.0f}; no step was skipped."}
    chart = line_chart(
        [line], x_label="step", y_label="loss scale", powers_of_two=True, marked=_fault_marks(document)
    )
    grouped = groupby(enumerate(skips), key=lambda pair: pair[1]["step"] - pair[0])
    runs = [[note for _, note in pairs] for _, pairs in grouped]  # skipped steps that follow each other
    causes = {bad["step"]: bad for bad in document["bad"]}
    rows = [
        (
            " to ".join(dict.fromkeys(str(n["step"] + 1) for n in (run[0], run[-1]))),
            f"{run[0]['scale']:g}",
            run[0]["worst"],
            _cause(next((causes[n["step"]] for n in run if n["step"] in causes), None)),
        )
        for run in runs
    ]
    note = "A red cross is a skipped step." if skips else "No step was skipped."
    return {"constant": "", "chart": chart, "note": note, "rows": rows}


def _cause(bad: Mapping[str, Any] | None) -> str:
    if bad is None:
        return "not traced"
    return f"{bad['phase']}: {bad['op']} in {bad['module'] or bad['module_class'] or 'the script'}"


def _dtypes(document: Mapping[str, Any]) -> dict[str, Any] | None:
    counts = document["counts"]
    if not counts:
        return None
    dtypes = sorted(
        {c["dtype"] for c in counts}, key=lambda d: list(FORMATS).index(d) if d in FORMATS else 99
    )
    phases = [
        p for p in ("forward", "recompute", "backward", "optimizer") if any(c["phase"] == p for c in counts)
    ]
    table: dict[str, dict[tuple[str, str], int]] = {}
    for c in counts:
        cells = table.setdefault(c["op"], {})
        cells[c["phase"], c["dtype"]] = cells.get((c["phase"], c["dtype"]), 0) + c["count"]
    columns = [(p, d) for p in phases for d in dtypes if any((p, d) in cells for cells in table.values())]
    spans = [(p, sum(1 for q, _ in columns if q == p)) for p in phases]
    return {
        "phases": [(p, n) for p, n in spans if n],
        "columns": columns,
        "rows": [
            (op, [(d, cells.get((p, d), "")) for p, d in columns])
            for op, cells in sorted(table.items(), key=lambda x: -sum(x[1].values()))
        ],
    }
