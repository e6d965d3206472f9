"""The page: each phenomenon beside what the paper reports, every number of ours taken from the results."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from halfstep.report.svg import HEIGHT, WIDTH, Line, line_chart

CLASSES = {
    "fp32": "level-O0",
    "mixed, dynamic scale": "level-O2",
    "mixed, no scale": "level-O1",
    "fp16 weights, no masters": "level-O3",
}
STYLE = """
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1.2rem; }
.said { border-left: 3px solid var(--rule); padding-left: .9rem; color: var(--quiet); }
.key span { margin-right: 1.2rem; } .key i { display: inline-block; width: 1.4em; height: .55em; background: var(--c);
  margin-right: .4em; border-radius: 2px; }
svg .count { fill: var(--O1); } svg .lost { fill: var(--bad); } svg .edge { stroke: var(--quiet); stroke-dasharray: 4 3; }
"""


def write_page(results: Mapping[str, Any], path: Path) -> None:
    """Write the one-file page; it asks for nothing from anywhere."""
    style = files("halfstep.report").joinpath("style.css").read_text(encoding="utf-8") + STYLE
    parts = [
        _masters(results["masters"]),
        _weight_gradients(results["weight_gradients"]),
        _activation_gradients(results["activation_gradients"]),
        _lost_updates(results["lost_updates"]),
        _accumulation(results["accumulation"]),
        _parity(results["parity"], results["seeds"], results["masters"]["start"]),
        _facts(results["facts"]),
    ]
    machine = results["machine"]
    where = f"torch {machine['torch']}, {machine['cpu']}, {results['seconds'] / 60:.1f} minutes"
    path.write_text(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Mixed Precision Training, re-created</title><style>{style}</style></head><body><main>"
        "<h1>Mixed Precision Training, re-created</h1>"
        "<p>Micikevicius et al., ICLR 2018 (arXiv 1710.03740), on networks and data small enough for a laptop: "
        "what the paper reports, what we saw, and why the two differ where they do.</p>"
        f"<p class='quiet'>{escape(where)}; {results['seeds']} seeds. fp16 arithmetic here rounds inputs and outputs "
        "to fp16 and accumulates in fp32, as the paper's tensor cores do.</p>"
        f"{''.join(parts)}</main></body></html>",
        encoding="utf-8",
    )


def _section(title: str, paper: str, ours: str, drawing: str) -> str:
    return (
        f"<h2>{escape(title)}</h2><div class='pair'><div><p class='said'><b>The paper.</b> {escape(paper)}</p>"
        f"<p><b>Here.</b> {escape(ours)}</p></div><figure>{drawing}</figure></div>"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _masters(result: Mapping[str, Any]) -> str:
    names = ["fp32", "mixed, dynamic scale", "fp16 weights, no masters"]
    lines = [Line(name, CLASSES[name], result["curves"][name]) for name in names]
    learned = {name: result["start"] - result["final"][name] for name in names}
    share = {name: learned[name] / learned["fp32"] for name in names}
    key = "".join(f"<span class='{CLASSES[name]}'><i></i>{escape(name)}</span>" for name in names)
    ours = (
        f"On {result['task']} the fp16 weights without masters end at a test loss of "
        f"{result['final'][names[2]]:.4g}, against {result['final']['fp32']:.4g} in fp32 and "
        f"{result['final'][names[1]]:.4g} with masters: they learn {_percent(share[names[2]])} of what fp32 learns, "
        f"with masters {_percent(share[names[1]])}. The task was chosen for updates far below fp16's spacing at the "
        "weights, so the loss here is larger than the paper's; where updates are large (the digit classifiers) "
        "masters matter less."
    )
    paper = (
        "Figure 2a: a Mandarin speech model whose weights are kept in fp16 ends 80 % worse in relative terms; with "
        "fp32 master weights it matches fp32. Updates too small for fp16's spacing are the cause."
    )
    drawing = line_chart(lines, x_label="step", y_label="training loss")
    return _section(
        "Master weights (figure 2a)", paper, ours, f"{drawing}<figcaption class='key'>{key}</figcaption>"
    )


def _histogram(lowest: int, exponents: Sequence[int], total: int, threshold: int, describe: str) -> str:
    """Bars of log10 counts by exponent; those below `threshold` in the colour of loss."""
    import math

    shown = [(lowest + i, n) for i, n in enumerate(exponents) if n]
    if not shown:
        return "<p class='quiet'>no finite values</p>"
    first, last = min(shown[0][0], threshold) - 1, max(shown[-1][0], threshold) + 1
    width, height = (WIDTH - 40) / (last - first + 1), HEIGHT - 60
    top = math.log10(max(n for _, n in shown)) + 0.3
    parts = []
    for exponent, n in shown:
        tall = max(2.0, math.log10(n + 1) / top * height)
        x, kind = 30 + (exponent - first) * width, "lost" if exponent < threshold else "count"
        title = f"2^{exponent}: {n:,} ({_percent(n / total)})"
        parts.append(
            f"<rect class='{kind}' x='{x:.1f}' y='{height + 20 - tall:.1f}' width='{max(1, width - 1):.1f}' "
            f"height='{tall:.1f}'><title>{escape(title)}</title></rect>"
        )
    edge = 30 + (threshold - first) * width
    parts.append(f"<line class='edge' x1='{edge:.1f}' x2='{edge:.1f}' y1='10' y2='{height + 20}'/>")
    for exponent in range(first - first % 8 + 8, last + 1, 8):
        x = 30 + (exponent - first + 0.5) * width
        parts.append(
            f"<text class='tick' x='{x:.1f}' y='{height + 38}' text-anchor='middle'>2^{exponent}</text>"
        )
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(describe, quote=True)}'>"
        f"{''.join(parts)}</svg>"
    )


def _weight_gradients(rows: Sequence[Mapping[str, Any]]) -> str:
    said = "; ".join(
        f"{row['name']} {_percent(row['below_2^-24'])} of the nonzero ones, of which a scale of 1024 leaves "
        f"{_percent(row['flushed_by_scale']['1024'])} at zero"
        for row in rows
    )
    shown = rows[0]
    ours = (
        f"Share of weight gradients whose exponent lies below -24: {said}. Shown: {shown['name']}. The share depends "
        "on how the loss is averaged and how far training has come, more than on the kind of network; fp16's true "
        "threshold is 2^-25 (ties to even), which the flushed shares use."
    )
    paper = (
        "Figure 2b: in the Mandarin speech model about 5 % of weight gradients have an exponent below -24 and would "
        "become zero in fp16."
    )
    return _section("Weight gradients (figure 2b)", paper, ours, _by_exponent(shown, "weight gradients"))


def _activation_gradients(result: Mapping[str, Any]) -> str:
    flushed, overflow = result["flushed_by_scale"], result["overflow_by_scale"]
    ours = (
        f"In the digit detector the largest activation gradient is below 2^{result['max_exponent'] + 1}, so "
        f"{result['unused_binades']} of fp16's binades above it are never used. Unscaled, {_percent(flushed['1'])} of "
        f"the nonzero gradients become zero in fp16; a scale of 8 leaves {_percent(flushed['8'])}, a scale of 1024 "
        f"{_percent(flushed['1024'])}, and of 65536 {_percent(flushed['65536'])} (with "
        f"{_percent(overflow['65536'])} overflowing). "
        f"{_percent(result['zeros'] / result['total'])} of all activation gradients are exactly zero (the paper's "
        "SSD: 67 %, because of its ReLUs; ours uses SiLU, which has no exact zeros)."
    )
    paper = (
        "Figure 3: the activation gradients of Multibox SSD use little of fp16's range; much of what lies below it "
        "matters. Training diverges in fp16 without a scale and matches fp32 once gradients are multiplied by 8."
    )
    drawing = _by_exponent(result, "activation gradients")
    return _section("Activation gradients and the loss scale (figure 3)", paper, ours, drawing)


def _by_exponent(found: Mapping[str, Any], what: str) -> str:
    drawing = _histogram(found["lowest"], found["exponents"], found["total"], -24, f"{what} by exponent")
    return drawing + "<figcaption>counts by exponent, logarithmic; red: below 2^-24</figcaption>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _lost_updates(rows: Sequence[Mapping[str, Any]]) -> str:
    up = min(row["ratio"] for row in rows if row["plus"] == 0)
    down = min(row["ratio"] for row in rows if row["minus"] == 0)
    ours = (
        f"At a power of two, an update that adds weight/ratio is lost from a ratio of {up} on, one that subtracts it "
        f"from {down} on: below a power of two fp16's values lie twice as close."
    )
    paper = (
        "Section 3.1: when a weight is at least 2048 times larger than its update, the update can become zero, since "
        "fp16 has 10 bits of mantissa and the weight's binary point is aligned with it."
    )
    table = _table(
        ("weight / update", "adding moves the weight", "subtracting moves it"),
        [(str(row["ratio"]), _percent(row["plus"]), _percent(row["minus"])) for row in rows],
    )
    return _section("Updates lost by ratio (section 3.1)", paper, ours, table)


def _accumulation(rows: Sequence[Mapping[str, Any]]) -> str:
    longest = rows[-1]
    ours = (
        f"For dot products of {longest['length']} positive terms the median relative error is "
        f"{_percent(longest['fp16'])} when sums are kept in fp16 and {_percent(longest['fp32'])} when they are kept in "
        "fp32 and rounded once: the fp16 sum stalls when a term falls below half its spacing."
    )
    paper = (
        "Section 3.3: some networks need fp16 products accumulated into fp32 to keep fp32's accuracy; tensor cores do "
        "this in hardware."
    )
    table = _table(
        ("length", "error, fp16 sums", "error, fp32 sums"),
        [(f"{row['length']:,}", _percent(row["fp16"]), _percent(row["fp32"])) for row in rows],
    )
    return _section("Accumulation (section 3.3)", paper, ours, table)


def _parity(rows: Sequence[Mapping[str, Any]], seeds: int, faint_start: float) -> str:
    names = list(rows[0]["cells"])
    body = []
    for row in rows:
        cells = [row["cells"][name] for name in names]
        body.append((row["task"], row["score"], *(_score(cell) for cell in cells)))
    faint = next(row for row in rows if "faint" in row["task"])
    learned = {name: faint_start - cell["mean"] for name, cell in faint["cells"].items()}
    share = learned["mixed, no scale"] / learned["fp32"]
    ours = (
        f"Mean and spread over {seeds} seeds. With a dynamic scale {_kept(rows, 'mixed, dynamic scale')} of {len(rows)} "
        "tasks end as good as fp32 or within two spreads of its seeds; without a scale "
        f"{_kept(rows, 'mixed, no scale')} do. Faint gradients need the scale: without it they learn "
        f"{_percent(share)} of what fp32 learns. We have no speech or translation task: no such data comes with a "
        "library."
    )
    paper = (
        "Tables 1 to 5: classification, detection, speech, translation, language modelling and a GAN reach fp32's "
        "accuracy; classification without any loss scale, SSD, the bigLSTM language model and others only with one."
    )
    text = _section("Parity (section 4)", paper, ours, "").replace("<figure></figure>", "")
    return text + _table(("task", "score", *names), body)


def _kept(rows: Sequence[Mapping[str, Any]], setting: str) -> int:
    """Tasks whose mean is no more than two fp32 spreads worse than fp32's."""
    kept = 0
    for row in rows:
        mine, fp32 = row["cells"][setting], row["cells"]["fp32"]
        loss = fp32["mean"] - mine["mean"] if row["more"] else mine["mean"] - fp32["mean"]
        kept += loss <= 2 * max(fp32["spread"], 1e-9)
    return kept


def _score(cell: Mapping[str, Any]) -> str:
    spread = f" ± {cell['spread']:.2g}" if cell["spread"] else ""
    skipped = f", {cell['skipped']} skipped" if cell["skipped"] else ""
    diverged = f", {cell['diverged']} diverged" if cell["diverged"] else ""
    return f"{cell['mean']:.4g}{spread}{skipped}{diverged}"


def _facts(facts: Mapping[str, float]) -> str:
    table = _table(("fact", "value"), [(name, f"{value:.10g}") for name, value in facts.items()])
    return f"<h2>The numbers behind it</h2>{table}"
