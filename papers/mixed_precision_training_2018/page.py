"""The page: each phenomenon beside what the paper reports, every number of ours taken from the results."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from halfstep.report.svg import Line, line_chart

WIDTH, HEIGHT = 640, 300
CLASSES = {
    "fp32": "level-O0 below",
    "mixed, dynamic scale": "level-O2 above",
    "mixed, no scale": "level-O1",
    "fp16 weights, no masters": "level-O3",
    "mixed, scale 1": "level-O3",
    "mixed, scale 8": "level-O1",
    "mixed, scale 128": "scale-128 dotted",
    "fp32 sums": "level-O0 below",
    "fp16 sums": "level-O3 above",
}
STYLE = """
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1.2rem; }
.said { border-left: 3px solid var(--rule); padding-left: .9rem; color: var(--quiet); }
.key span { margin-right: 1.2rem; white-space: nowrap; } .key i { display: inline-block; width: 1.4em; height: .55em; background: var(--c);
  margin-right: .4em; border-radius: 2px; }
.below svg, svg .curve.below { stroke-width: 5; opacity: .4; } svg .curve.above { stroke-dasharray: 7 4; }
.scale-128 { --c: var(--good, #2a8); } svg .curve.dotted { stroke-dasharray: 2 3; }
svg .range { fill: var(--O2); opacity: .12; } svg .shifted { fill: none; stroke: var(--O3); stroke-width: 1.4; }
.scroll td, .scroll th { white-space: normal; } .shots { display: flex; flex-wrap: wrap; gap: 1rem; } .shots svg { width: 300px; height: auto; }
svg .box { fill: none; stroke: var(--bad); stroke-width: .5; } svg .boxname { font-size: 3px; fill: var(--bad); }
svg .count { fill: var(--O1); } svg .lost { fill: var(--bad); } svg .edge { stroke: var(--quiet); stroke-dasharray: 4 3; }
"""


def write_page(results: Mapping[str, Any], path: Path) -> None:
    """Write the one-file page; it asks for nothing from anywhere."""
    style = files("halfstep.report").joinpath("style.css").read_text(encoding="utf-8") + STYLE
    parts = [
        _masters(results["masters"]),
        _language_model(results["language_model"]),
        _detector(results["detector"]),
        _weight_gradients(results["weight_gradients"]),
        _activation_gradients(results["activation_gradients"]),
        _lost_updates(results["lost_updates"]),
        _accumulation(results["accumulation"]),
        _sums(results["sums"]),
        _pictures(results["pictures"]),
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
    learned = {name: result["start"] - result["final"][name] for name in names}
    share = {name: learned[name] / learned["fp32"] for name in names}
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
    return _section("Master weights (figure 2a)", paper, ours, _curves(result["curves"]))


def _curves(curves: Mapping[str, Any]) -> str:
    """Training losses by name; fp32 lies below, broad and pale, so that what runs along it stays to be seen."""
    lines = [Line(name, CLASSES[name], points) for name, points in curves.items()]
    key = "".join(f"<span class='{CLASSES[name]}'><i></i>{escape(name)}</span>" for name in curves)
    drawing = line_chart(lines, x_label="step", y_label="training loss")
    return f"{drawing}<figcaption class='key'>{key}</figcaption>"


def _language_model(result: Mapping[str, Any]) -> str:
    final, lost = result["final"], result["flushed"]
    scaled = [name for name in final if name != "fp32"]
    ends = ", ".join(f"{name.removeprefix('mixed, ')} {final[name]:.3f}" for name in scaled)
    ours = (
        f"An LSTM over the words of Python's own source, with a vocabulary of 4096 and a step of half a million tokens "
        f"(each micro-batch's loss is divided by {result['micro_batches']}; one of them is drawn). Mean loss of the "
        f"last 8 steps: fp32 {final['fp32']:.3f}; mixed with {ends}. The share of logit gradients that fp16 makes "
        f"zero: {_percent(lost['mixed, scale 1'])} at scale 1, {_percent(lost['mixed, scale 8'])} at 8, "
        f"{_percent(lost['mixed, scale 128'])} at 128, {_percent(lost['mixed, dynamic scale'])} at the dynamic scale. "
        "The softmax pushes every other word down a little; those pushes are what vanishes first, so that words are "
        "only pulled up, and the loss rises."
    )
    paper = (
        "Figure 5: the bigLSTM language model (vocabulary 793 thousand) follows fp32 with a loss scale "
        "of 128 and diverges from it after 300 thousand iterations without one."
    )
    return _section(
        "A language model that needs its scale (figure 5)", paper, ours, _curves(result["curves"])
    )


def _detector(result: Mapping[str, Any]) -> str:
    ends = ", ".join(
        f"{name} {result['final'][name]:.2f} (mAP {result['score'][name]:.1f} %)" for name in result["final"]
    )
    ours = (
        "The digit detector with its loss averaged over the pixels of a picture, a short training. Mean loss of the "
        f"last 8 steps: {ends}. One seed, so that the mAP says which ones learn at all, not which is best."
    )
    paper = (
        "Table 2: Multibox SSD reaches a mAP of 76.9 % in fp32, diverges in mixed precision without a scale and reaches "
        "77.1 % with a scale of 8; Faster R-CNN 69.1 %, 68.6 % and 69.7 %."
    )
    return _section("A detector that needs its scale (table 2)", paper, ours, _curves(result["curves"]))


def _sums(result: Mapping[str, Any]) -> str:
    accuracy, apart = result["accuracy"], result["native and pseudo"]
    ours = (
        f"A digit classifier (784-64-10) whose every product, forward and backward, keeps its running sum in fp16 "
        f"ends at {accuracy['fp16 sums']:.1f} % of test digits, against {accuracy['fp32 sums']:.1f} % with fp32 sums "
        "of the same fp16 values: sums of a few hundred terms of both signs lose little, those of thousands of one "
        "sign (the table above) lose all. Native fp16 kernels of this machine beside fp32 kernels on rounded values "
        f'("pseudo fp16"): training losses are at most {apart["largest"]:.2g} apart, in the last ten steps '
        f"{apart['at the end']:.2g} on average."
    )
    paper = (
        "Section 3.3: with fp16 products that are not accumulated in fp32 some networks do not match fp32's accuracy. "
        'Section 4.3: the speech models were trained on older GPUs in "pseudo fp16", fp32 arithmetic on fp16 values.'
    )
    return _section("Training with fp16 sums (section 3.3)", paper, ours, _curves(result["curves"]))


def _pictures(result: Mapping[str, Any]) -> str:
    """What the GAN draws and what the detector finds, in fp32 and mixed."""
    shots = []
    for setting, drawn in result["generated"].items():
        shots.append(_figure(f"generated digits, {setting}", _digits(drawn)))
    for setting, found in result["found"].items():
        shots.append(_figure(f"detected digits, {setting}", _boxes(found)))
    paper = "Figure 6: faces drawn by a DCGAN trained in fp32 and in mixed precision look alike."
    ours = (
        "Digits drawn by the small DCGAN of the table below, and the boxes of its detector on one held-out photograph, "
        "each trained once in fp32 and once mixed with a dynamic scale, from the same seed. After a few hundred steps "
        "of rounding the two are different networks, of one quality."
    )
    return _section("Pictures and boxes (figure 6)", paper, ours, "").replace(
        "<figure></figure>", f"<div class='shots'>{''.join(shots)}</div>"
    )


def _figure(title: str, drawing: str) -> str:
    return f"<figure>{drawing}<figcaption>{escape(title)}</figcaption></figure>"


def _pixels(image: Sequence[Sequence[float]], left: int, top: int, white: float) -> str:
    return "".join(
        f"<rect x='{left + x}' y='{top + y}' width='1.05' height='1.05' fill='rgb({v},{v},{v})'/>"
        for y, row in enumerate(image)
        for x, v in ((x, round(255 * max(0.0, min(1.0, value / white)))) for x, value in enumerate(row))
    )


def _digits(drawn: Sequence[Any]) -> str:
    cells = (_pixels(image, i % 6 * 9, i // 6 * 9, 1.0) for i, image in enumerate(drawn))
    return f"<svg viewBox='0 0 54 18' role='img' aria-label='generated digits'>{''.join(cells)}</svg>"


def _boxes(found: Mapping[str, Any]) -> str:
    size = len(found["image"])
    parts = [_pixels(found["image"], 0, 0, 255.0)]
    for confidence, kind, x, y, w, h in found["boxes"]:
        left, top = (x - w / 2) * size, (y - h / 2) * size
        parts.append(
            f"<rect class='box' x='{left:.1f}' y='{top:.1f}' width='{w * size:.1f}' height='{h * size:.1f}'/>"
            f"<text class='boxname' x='{left:.1f}' y='{top - 0.5:.1f}'>{int(kind)} {100 * confidence:.0f} %</text>"
        )
    return f"<svg viewBox='0 0 {size} {size}' role='img' aria-label='detected digits'>{''.join(parts)}</svg>"


def _histogram(
    lowest: int,
    exponents: Sequence[int],
    total: int,
    threshold: int,
    describe: str,
    shifts: Sequence[int] = (),
) -> str:
    """Shares by exponent on a logarithmic axis, fp16's range shaded; `shifts`: the same times 2^shift, outlined."""
    shown = [(lowest + i, n) for i, n in enumerate(exponents) if n]
    if not shown:
        return "<p class='quiet'>no finite values</p>"
    first, last = min(shown[0][0], threshold) - 1, max(shown[-1][0], 15) + 1
    width, height, left = (WIDTH - 84) / (last - first + 1), HEIGHT - 60, 74
    decades = 8

    def across(exponent: float) -> float:
        return left + (exponent - first) * width

    def down(count: float) -> float:
        share = max(count / total, 10.0**-decades)
        return 20 - math.log10(share) / decades * height

    parts = [
        f"<rect class='range' x='{across(-24):.1f}' y='20' width='{40 * width:.1f}' height='{height}'>"
        "<title>what fp16 holds, subnormals included: 2^-24 to 2^15</title></rect>"
    ]
    for decade in range(0, decades, 2):
        y = 20 + decade / decades * height
        label = f"{10.0 ** (2 - decade):g} %"
        parts.append(f"<text class='tick' x='{left - 6}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>")
    for exponent, n in shown:
        kind = "lost" if exponent < threshold else "count"
        title = f"2^{exponent}: {n:,} ({_percent(n / total)})"
        parts.append(
            f"<rect class='{kind}' x='{across(exponent):.1f}' y='{down(n):.1f}' width='{max(1, width - 1):.1f}' "
            f"height='{max(1.0, height + 20 - down(n)):.1f}'><title>{escape(title)}</title></rect>"
        )
    for shift in shifts:
        path = " ".join(f"{across(e + shift + 0.5):.1f},{down(n):.1f}" for e, n in shown if e + shift <= last)
        parts.append(f"<polyline class='shifted' points='{path}'><title>times {2**shift}</title></polyline>")
    every = 8 if last - first < 80 else 16
    for exponent in range(first - first % every + every, last + 1, every):
        x = across(exponent + 0.5)
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
    first, last = shown["below_by_step"][0][1], shown["below_by_step"][-1][1]
    ours = (
        f"Share of weight gradients whose exponent lies below -24: {said}. Shown: {shown['name']} over "
        f"{shown['steps']} steps, which take it from {_percent(first)} to {_percent(last)}: the share grows as a "
        "training converges and its gradients shrink, and depends on how the loss is averaged; text-gpt is far from "
        "converged, digits-faint was made for tiny gradients. fp16's true threshold is 2^-25 (ties to even), which "
        "the flushed shares use."
    )
    paper = (
        "Figure 2b: in the Mandarin speech model about 5 % of weight gradients, sampled over the whole training, have "
        "an exponent below -24 and would become zero in fp16."
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
        "Figure 3: 67 % of the activation gradients of Multibox SSD are zero, the others use little of fp16's range, "
        "and what lies just below it matters. Training diverges in fp16 without a scale and matches fp32 once gradients "
        "are multiplied by 8."
    )
    drawing = _by_exponent(result, "activation gradients", (3, 10))
    return _section("Activation gradients and the loss scale (figure 3)", paper, ours, drawing)


def _by_exponent(found: Mapping[str, Any], what: str, shifts: Sequence[int] = ()) -> str:
    described = f"{what} by exponent"
    drawing = _histogram(found["lowest"], found["exponents"], found["total"], -24, described, shifts)
    moved = "".join(f"; outlined: times {2**shift}" for shift in shifts)
    return drawing + (
        "<figcaption>share of all values by exponent, logarithmic; shaded: what fp16 holds; red: below it"
        f"{moved}</figcaption>"
    )


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
        body.append((row["task"], row["score"], *(_score(cell) for cell in cells), row["paper"]))
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
        "Tables 1 to 3 and figures 4 to 6: classification, detection, speech (English 2.20 to 1.99, Mandarin 15.82 to "
        "15.01 character errors), translation, language modelling and a GAN reach fp32's accuracy; classification "
        "without any loss scale, SSD, the bigLSTM language model and others only with one."
    )
    text = _section("Parity (section 4)", paper, ours, "").replace("<figure></figure>", "")
    return text + _table(("task", "score", *names, "the paper: fp32, mixed"), body)


def _kept(rows: Sequence[Mapping[str, Any]], setting: str) -> int:
    """Tasks that fp32 has learned and whose mean is no more than two fp32 spreads, or 2 % of that, worse."""
    kept = 0
    for row in rows:
        mine, fp32 = row["cells"][setting], row["cells"]["fp32"]
        sign = 1 if row["more"] else -1
        learned, worse = sign * (fp32["mean"] - row["nothing"]), sign * (fp32["mean"] - mine["mean"])
        if not (math.isfinite(learned) and learned > (0.1 * abs(row["nothing"]) or 1.0)):
            continue  # where fp32 learns nothing, nothing is shown by equal scores
        kept += math.isfinite(worse) and worse <= max(2 * fp32["spread"], 0.02 * learned)
    return kept


def _score(cell: Mapping[str, Any]) -> str:
    spread = f" ± {cell['spread']:.2g}" if cell["spread"] else ""
    skipped = f", {cell['skipped']} skipped" if cell["skipped"] else ""
    diverged = f", {cell['diverged']} diverged" if cell["diverged"] else ""
    return f"{cell['mean']:.4g}{spread}{skipped}{diverged}"


def _facts(facts: Mapping[str, float]) -> str:
    table = _table(("fact", "value"), [(name, f"{value:.10g}") for name, value in facts.items()])
    return f"<h2>The numbers behind it</h2>{table}"
