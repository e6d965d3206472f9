"""What the doctor found, as a tree of plain values, and its verdict in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from halfstep.formats import FORMATS, Format

if TYPE_CHECKING:
    from halfstep.numerics.cures import Cure
    from halfstep.numerics.trace import BadOp, Trace
    from halfstep.numerics.watch import Watch


def document_of(
    label: str,
    seen: Watch | None,
    traces: Sequence[tuple[int, Trace]],
    findings: Sequence[Any],
    losses: Sequence[float],
    error: str | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything the verdict, the JSON and the report are made of, as plain values."""
    bad = [(number, trace.bad) for number, trace in traces if trace.bad is not None]
    serious = [b for _, b in bad if not _is_harmless(b, seen)]
    counts = next((t.counts for _, t in traces if t.counts), {})
    watched = {} if seen is None else _watched(seen)
    finite = all(math.isfinite(x) for x in losses)
    healthy = not serious and not findings and error is None and finite
    document: dict[str, Any] = {
        "target": label,
        "steps": len(losses) or watched.get("steps", 0),
        "healthy": healthy,
        "losses": list(losses),
        "error": error,
        "notes": list(notes),
        "bad": [_bad(number, b, _is_harmless(b, seen)) for number, b in bad],
        "counts": [{"phase": p, "op": o, "dtype": d, "count": n} for (p, o, d), n in counts.items()],
        "lint": [f.__dict__ for f in findings],
        "torch": torch.__version__,
        **watched,
    }
    document["verdict"] = verdict_of(document)
    return document


def _is_harmless(bad: BadOp, seen: Watch | None) -> bool:
    """A backward overflow that a dynamic scale skips over, once the scale has settled, costs nothing."""
    if not bad.harmless or seen is None:
        return False
    skipped = [n for n in seen.notes if not n.taken]
    return bool(skipped) and len(skipped) <= max(3, len(seen.notes) // 4)


def _bad(number: int, bad: BadOp, harmless: bool) -> dict[str, Any]:
    site = bad.site
    return {
        "step": number,
        "harmless": harmless,
        "phase": bad.phase,
        "module": bad.module,
        "module_class": bad.module_class,
        "op": bad.op,
        "aten": bad.aten,
        "where": site.where,
        "code": site.code,
        "origin": bad.origin,
        "underflow": bad.underflow,
        "hidden": bad.hidden,
        "inputs": [{"what": str(t), "max_abs": t.max_abs} for t in bad.inputs],
        "outputs": [{"what": str(t), "max_abs": t.max_abs} for t in bad.outputs],
        "cause": {"kind": bad.cause.kind, "text": bad.cause.text, "times": bad.cause.times},
        "cures": [_cure(c) for c in bad.cures],
        "spoiled": str(bad.spoiled),
        "spoiled_lasting": list(bad.spoiled.lasting),
        "reached": list(bad.reached),
        "passed_on": list(bad.passed_on),
        "summary": bad.story(),
    }


def _cure(cure: Cure) -> dict[str, Any]:
    return {
        "kind": cure.kind,
        "text": cure.text,
        "code": cure.code,
        "status": cure.status,
        "specs": [list(c.spec) for c in (cure, *cure.variants) if c.spec],
    }


def _narrowest(seen: Watch) -> Format:
    """The format with the least range among the activations of a run that no Session decides for."""
    found = {sample.dtype for s in seen.series.values() if s.kind == "activation" for sample in s.samples}
    return min((FORMATS[d] for d in found), key=lambda f: f.max, default=FORMATS["fp32"])


def _watched(seen: Watch) -> dict[str, Any]:
    seen.collect()
    fmt = seen.format or _narrowest(seen)
    kinds = ("activation", "activation_grad", "gradient", "weight", "update")
    return {
        "format": fmt.name,
        "series": [
            {
                "kind": s.kind,
                "path": s.path,
                "steps": s.steps,
                "max_abs": s.max_abs,
                "samples": [sample.__dict__ for sample in s.samples[-1:]],
            }
            for kind in kinds
            for s in seen.series.values()
            if s.kind == kind
        ],
        "history": [
            {"step": n.step, "scale": n.scale, "taken": n.taken, "max_abs": n.max_abs, "worst": n.worst}
            for n in seen.notes
        ],
        "forecasts": [str(f) for f in seen.forecasts()],
        "lost": [n.__dict__ for n in seen.lost],
        "summary": seen.summary(),
    }


def verdict_of(document: Mapping[str, Any]) -> list[str]:
    """What a person reads first: a few lines, the gravest first."""
    lines: list[str] = [document["error"]] if document["error"] else []
    told: set[tuple[str, str, str]] = set()
    for bad in document["bad"]:
        key = (bad["phase"], bad["module"], bad["op"])
        if key in told:
            continue
        told.add(key)
        if bad["harmless"]:
            place = f"{bad['module'] or 'the root module'}"
            lines.append(
                f"step {bad['step'] + 1} skipped: {bad['op']} in {place} overflowed in backward; harmless"
            )
        else:
            cures = "".join(f"\n  cure ({c['status']}): {c['text']}" for c in bad["cures"])
            lines.append(f"step {bad['step'] + 1}: {bad['summary']}{cures}")
    if not all(math.isfinite(x) for x in document["losses"]) and not document["bad"]:
        lines.append("the loss is not finite")
    lines += document.get("summary", [])
    lines += [f"lint: {f['rule']} ({f['where']}): {f['text']}; {f['cure']}" for f in document["lint"]]
    head = "healthy" if document["healthy"] else "not healthy"
    return [f"{document['target']}: {head} over {document['steps']} steps", *lines]
