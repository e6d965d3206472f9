"""The doctor's report as one HTML page: offline, escaped, usable by keyboard, readable at 200 modules.

The heat map is drawn in the browser from numbers embedded as JSON, since the loss-scale slider moves it;
everything else is plain HTML and SVG. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from halfstep.errors import ConfigError
from halfstep.formats import FORMATS
from halfstep.report.page import write_page
from halfstep.report.svg import Line, line_chart

_KINDS = {
    "activation": "activations",
    "activation_grad": "activation gradients",
    "gradient": "weight gradients",
    "weight": "weights",
    "update": "updates",
}
_SHOWN = 8


class Writable(Protocol):
    """A document of the doctor, which gives its own plain values."""

    def as_dict(self) -> dict[str, Any]:
        """The document as plain values."""
        ...


def write_doctor(document: Mapping[str, Any] | Writable, path: str | Path) -> Path:
    """Write the page of `render_doctor` to `path`, whole or not at all; ConfigError where impossible."""
    return write_page(render_doctor(document), path)


def render_doctor(document: Mapping[str, Any] | Writable) -> str:
    """The page for a document of the doctor, or for what `halfstep doctor --json` prints."""
    if not isinstance(document, Mapping):
        if not hasattr(document, "as_dict"):
            raise ConfigError(f"a report of {type(document).__name__}: expected the doctor's document")
        document = document.as_dict()
    resources = files("halfstep.report")
    style = "".join(resources.joinpath(n).read_text(encoding="utf-8") for n in ("style.css", "doctor.css"))
    script = resources.joinpath("doctor.js").read_text(encoding="utf-8")
    sections = [
        ("verdict", "Verdict", _verdict(document)),
        ("first-bad-op", "First bad op", _bad_ops(document)),
        ("beside", "The bad step beside the last good one", _beside(document)),
        ("values", "Where the values lie", _heat_map(document)),
        ("headroom", "Headroom over time", _headroom(document)),
        ("scale", "Loss scale and skipped steps", _scale(document)),
        ("dtypes", "Which op ran in which dtype", _dtypes(document)),
        ("lint", "Lint", _lint(document)),
    ]
    shown = [(anchor, title, body) for anchor, title, body in sections if body]
    links = "".join(f"<a href='#{anchor}'>{escape(title)}</a>" for anchor, title, _ in shown)
    bodies = "".join(
        f"<section id='{anchor}' aria-labelledby='{anchor}-title'>"
        f"<h2 id='{anchor}-title'>{escape(title)}</h2>{body}</section>"
        for anchor, title, body in shown
    )
    target = escape(document["target"])
    state = "healthy" if document["healthy"] else "not healthy"
    badge = f"<span class='badge {'good' if document['healthy'] else 'ill'}'>{state}</span>"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>halfstep doctor: {target}</title><style>{style}</style></head><body><main>"
        f"<h1>{target} {badge}</h1>"
        f"<p class='headline'>{escape(document.get('headline', ''))}</p>"
        f"<p class='quiet'>{document['steps']} steps watched · torch {escape(document['torch'])}</p>"
        f"<nav aria-label='sections'>{links}</nav>{bodies}</main>"
        f"<script type='application/json' id='numbers'>{_embedded(document)}</script>"
        f"<script>{script}</script></body></html>"
    )


def _embedded(document: Mapping[str, Any]) -> str:
    """The heat map's numbers; `<` is written so that no text in them can close the script element."""
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
                    "scale": _finite(math.log2(sample["scale"])) if sample["scale"] > 0 else 0,
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
    """A tensor's name, with the class of the module it comes out of."""
    kind = series.get("class", "")
    return f"{series['path']} ({kind})" if kind else series["path"]


def _beside(document: Mapping[str, Any]) -> str:
    """Largest magnitudes at the first fault's step and at the last good step before it."""
    found = document.get("beside") or {}
    if not found:
        return ""
    order = {"input": 0, "result": 1, "gradient": 2}
    listed: list[Mapping[str, Any]] = list(found["rows"])
    listed.sort(key=lambda row: order[row["kind"]])
    rows = "".join(_beside_row(row) for row in listed[:60])
    heads = ("", "largest of", f"step {found['good'] + 1} (good)", f"step {found['bad'] + 1} (bad)", "")
    head = "".join(f"<th scope='col'>{escape(h)}</th>" for h in heads)
    return (
        f"<div class='scroll tall' tabindex='0'><table class='beside'><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _beside_row(row: Mapping[str, Any]) -> str:
    good, bad = (None if row[k] is None else float(row[k]) for k in ("good", "bad"))
    word = ""
    if bad is not None and not math.isfinite(bad):
        word = "NaN" if math.isnan(bad) else "inf"
    elif good and bad is not None and bad > 100 * good:
        word = f"{bad / good:.2g} times"
    elif good and bad == 0:
        word = "all zero"
    shown = ["" if x is None else f"{x:.4g}" for x in (good, bad)]
    cells = "".join(f"<td>{escape(x)}</td>" for x in shown)
    mark = f"<td class='bad'>{escape(word)}</td>" if word else "<td></td>"
    return f"<tr><td>{row['kind']}</td><td><code>{escape(row['path'])}</code></td>{cells}{mark}</tr>"


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _verdict(document: Mapping[str, Any]) -> str:
    told = document["verdict"][1:]
    items = "".join(f"<li><pre>{escape(line)}</pre></li>" for line in told)
    notes = "".join(f"<p class='quiet'>{escape(note)}</p>" for note in document["notes"])
    if not told:
        items = "<li>No inf or NaN, no vanished gradients, nothing that lint knows.</li>"
    return f"<ul class='verdict'>{items}</ul>{notes}"


def _bad_ops(document: Mapping[str, Any]) -> str:
    return "".join(_bad_op(bad) for bad in document["bad"])


def _bad_op(bad: Mapping[str, Any]) -> str:
    module = bad["module"] or f"root module {bad['module_class']}".strip()
    if bad["underflow"]:
        head = f"{bad['op']} flushes to zero"
    elif bad["origin"]:
        head = f"{bad['op']} gives the first value that is not finite"
    else:
        head = f"{bad['op']} reads a value that was not finite before the step"
    facts = [
        ("phase", escape(bad["phase"])),
        ("module", f"<code>{escape(module)}</code>"),
        ("kernel", f"<code>{escape(bad['aten'])}</code>"),
        ("line", f"<code>{escape(bad['where'])}</code> <code class='line'>{escape(bad['code'])}</code>"),
        ("inputs", _tensors(bad["inputs"])),
        ("results", _tensors(bad["outputs"])),
        ("cause", escape(bad["cause"]["text"])),
        ("hidden", escape(bad["hidden"])),
        ("spoiled", escape(bad["spoiled"])),
        ("reached", escape(_few(bad["reached"]))),
        ("passed on by", escape(_few(bad["passed_on"]))),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts if text)
    cures = "".join(
        f"<li><span class='tag {_tag(c['status'])}'>{escape(c['status'])}</span> {escape(c['text'])}"
        + (f" <code>{escape(c['code'])}</code>" if c["code"] else "")
        + "</li>"
        for c in bad["cures"]
    )
    harmless = "<p class='quiet'>The step was skipped and nothing lasting is spoiled.</p>"
    return (
        f"<article class='card{'' if bad['harmless'] else ' grave'}'>"
        f"<h3>Step {bad['step'] + 1}, {escape(bad['phase'])}: {escape(head)}</h3>"
        f"{harmless if bad['harmless'] else ''}<dl>{rows}</dl>"
        f"<h4>Cures, cheapest first</h4><ol class='cures'>{cures}</ol></article>"
    )


def _tag(status: str) -> str:
    return {"works": "good", "untried": "open"}.get(status, "ill")


def _few(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> str:
    return "<br>".join(
        f"<code>{escape(t['what'])}</code> largest magnitude {float(t['max_abs']):.4g}" for t in tensors[:6]
    )


def _heat_map(document: Mapping[str, Any]) -> str:
    """The frame that the script fills in: choices, slider, axis, rows."""
    present = {s["kind"] for s in document.get("series", []) if s["samples"]}
    if not present:
        return ""
    kinds = "".join(f"<option value='{k}'>{escape(t)}</option>" for k, t in _KINDS.items() if k in present)
    fmt = document.get("format", "fp16")
    chosen = fmt if fmt in ("fp16", "bf16", "e4m3fn", "e5m2") else "fp16"
    formats = "".join(
        f"<option{' selected' if name == chosen else ''}>{name}</option>"
        for name in ("fp16", "bf16", "e4m3fn", "e5m2")
    )
    return (
        "<p>One row a tensor, one column a power of two; the stronger the colour, the more "
        "of its values have that magnitude. The bands above are what each format can hold; the part "
        "outside the chosen one is shaded. Scaling multiplies the values, which moves the windows the "
        "other way.</p>"
        "<div class='controls'>"
        f"<label>show <select id='kind'>{kinds}</select></label>"
        f"<label>in <select id='format'>{formats}</select></label>"
        "<label>scale 2<sup id='power'>0</sup> "
        "<input id='scale' type='range' min='-32' max='32' step='1' value='0' "
        "aria-label='loss scale as a power of two'></label>"
        "<button id='best' type='button'>scale that loses least</button>"
        "<label>find <input id='find' type='search' placeholder='part of a name'></label></div>"
        "<p id='told' class='quiet' role='status'></p>"
        "<div id='heat' class='heat' role='listbox' tabindex='0' aria-label='tensors, one row each; "
        "arrow keys move'></div><p id='detail' class='detail' role='status'></p>"
        "<noscript><p>The heat map needs JavaScript; all else on this page does not.</p></noscript>"
    )


def _headroom(document: Mapping[str, Any]) -> str:
    series = [s for s in document.get("series", []) if s["kind"] == "activation" and len(s["steps"]) > 1]
    if not series:
        return ""
    top = FORMATS[document.get("format", "fp32")].max
    bits = [
        (
            _label(s),
            [(float(x), math.log2(top / y)) for x, y in zip(s["steps"], s["max_abs"]) if _positive(y)],
        )
        for s in series
    ]
    bits = sorted((b for b in bits if b[1]), key=lambda b: min(y for _, y in b[1]))[:_SHOWN]
    lines = [Line(path, f"k{i}", points) for i, (path, points) in enumerate(bits)]
    chart = line_chart(
        lines, x_label="step", y_label="bits left", describe="headroom in bits over steps",
        marked=_marked(document, -1.0),
    )  # fmt: skip
    legend = "".join(
        "<li><svg viewBox='0 0 26 10' aria-hidden='true'>"
        f"<path class='curve k{i}' d='M0 5H26'/></svg>{escape(path)}</li>"
        for i, (path, _) in enumerate(bits)
    )
    ahead = "".join(f"<li>{escape(f)}</li>" for f in document.get("forecasts", []))
    told = f"<ul>{ahead}</ul>" if ahead else f"<p class='quiet'>{escape(_way_out(series, bits))}</p>"
    note = f"The {len(bits)} tightest of {len(series)} modules' outputs, in {document.get('format')}."
    return f"{_figure(chart, note)}<ul class='legend'>{legend}</ul>{told}{_lost(document)}"


def _marked(document: Mapping[str, Any], shift: float = 0.0) -> list[float]:
    """The first fault's step, to be drawn in every chart."""
    bad = [b["step"] + 1.0 + shift for b in document["bad"] if not b["harmless"]]
    return bad[:1]


def _way_out(series: Sequence[Mapping[str, Any]], bits: Sequence[tuple[str, Any]]) -> str:
    left = [_label(s) for s in series if any(not _positive(y) and y != 0 for y in s["max_abs"])]
    if left:
        return f"Left the format, so that the curve ends: {_few(left)}."
    low = [path for path, points in bits if points[-1][1] < 1.0 or points[-1][1] < points[0][1] - 4.0]
    if low:
        return f"Falling, or at the edge: {_few(low)}."
    return "No tensor is on its way out of the format."


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _lost(document: Mapping[str, Any]) -> str:
    lost = document.get("lost", [])
    if not lost or not any(n["share"] > 0.001 for n in lost):
        return ""
    last = lost[-1]
    text = (
        f"{last['share']:.1%} of the updates at step {last['step'] + 1} were lost to rounding; most in "
        f"{last['worst']} ({last['worst_share']:.1%})."
    )
    return f"<p>{escape(text)}</p>"


def _scale(document: Mapping[str, Any]) -> str:
    history = document.get("history", [])
    skips = [n for n in history if not n["taken"]]
    if not history or (not skips and all(n["scale"] == 1.0 for n in history)):
        return ""
    points = [(n["step"] + 1.0, float(n["scale"])) for n in history]
    line = Line("loss scale", "k0", points, [n["step"] + 1.0 for n in skips], steps=True)
    if len({n["scale"] for n in history}) == 1 and not skips:
        return f"<p>The loss scale stayed at {history[0]['scale']:,.0f}; no step was skipped.</p>"
    chart = line_chart(
        [line], x_label="step", y_label="loss scale", powers_of_two=True, marked=_marked(document)
    )
    causes = {bad["step"]: bad for bad in document["bad"]}
    rows = "".join(
        f"<tr><td>{_range(run)}</td><td>{run[0]['scale']:g}</td><td><code>{escape(run[0]['worst'])}</code></td>"
        f"<td>{escape(_cause(next((causes[n['step']] for n in run if n['step'] in causes), None)))}</td></tr>"
        for run in _runs(skips)
    )
    table = (
        "<div class='scroll' tabindex='0'><table class='left'><thead><tr><th scope='col'>skipped step</th>"
        "<th scope='col'>scale at first</th><th scope='col'>worst gradient</th>"
        "<th scope='col'>first bad op</th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div>"
    )
    note = "A red cross is a skipped step." if skips else "No step was skipped."
    return _figure(chart, note) + (table if skips else "")


def _figure(chart: str, note: str) -> str:
    plot = f"<div class='plot' tabindex='0'>{chart}</div>"
    return f"<figure>{plot}<figcaption>{escape(note)}</figcaption></figure>"


def _runs(skips: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Skipped steps that follow each other."""
    runs: list[list[Mapping[str, Any]]] = []
    for note in skips:
        if runs and runs[-1][-1]["step"] + 1 == note["step"]:
            runs[-1].append(note)
        else:
            runs.append([note])
    return runs


def _range(run: Sequence[Mapping[str, Any]]) -> str:
    first, last = run[0]["step"] + 1, run[-1]["step"] + 1
    return str(first) if first == last else f"{first} to {last}"


def _cause(bad: Mapping[str, Any] | None) -> str:
    if bad is None:
        return "not traced"
    return f"{bad['phase']}: {bad['op']} in {bad['module'] or 'the root module'}"


def _dtypes(document: Mapping[str, Any]) -> str:
    counts = document["counts"]
    if not counts:
        return ""
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
    groups = "".join(f"<th scope='colgroup' colspan='{n}'>{p}</th>" for p, n in spans if n)
    heads = "".join(f"<th scope='col'>{escape(d)}</th>" for _, d in columns)
    body = "".join(
        f"<tr><th scope='row'>{escape(op)}</th>"
        + "".join(f"<td class='d-{escape(d, quote=True)}'>{cells.get((p, d), '')}</td>" for p, d in columns)
        + "</tr>"
        for op, cells in sorted(table.items(), key=lambda x: -sum(x[1].values()))
    )
    return (
        "<p>Kernels of one step, by the op that called them.</p>"
        "<div class='scroll tall' tabindex='0'><table class='ops'>"
        f"<thead><tr><th rowspan='2' scope='col'>op</th>{groups}</tr><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _lint(document: Mapping[str, Any]) -> str:
    if not document["lint"]:
        return "<p class='quiet'>Nothing found.</p>"
    items = "".join(
        f"<li><b>{escape(f['rule'])}</b> <code>{escape(f['where'])}</code>: {escape(f['text'])}. "
        f"<i>{escape(f['cure'])}</i></li>"
        for f in document["lint"]
    )
    return f"<ul>{items}</ul>"
