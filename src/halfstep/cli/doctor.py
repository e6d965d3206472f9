"""`halfstep doctor RECIPE | SCRIPT.py`: run some steps watched, say what the numbers do, write a report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import tyro

from halfstep.cli._options import Flag, check_report, computing_device, shown
from halfstep.cli._output import console, print_json, table
from halfstep.errors import ConfigError
from halfstep.formats import FORMATS, Format

if TYPE_CHECKING:
    from halfstep.numerics.cures import Cure
    from halfstep.numerics.trace import BadOp, Trace
    from halfstep.numerics.watch import Watch

FAULT = 1


def run(
    target: tyro.conf.Positional[Annotated[str, shown("RECIPE|SCRIPT.py")]],
    args: tyro.conf.Positional[Annotated[tuple[str, ...], shown("[ARGUMENT ...]")]] = (),
    level: Annotated[str, shown("LEVEL")] = "O1",
    dtype: Annotated[str | None, shown("DTYPE")] = None,
    loss_scale: Annotated[str | None, shown("SCALE")] = None,
    steps: Annotated[int, shown("COUNT")] = 40,
    seed: Annotated[int, shown("NUMBER")] = 0,
    device: Annotated[str | None, shown("DEVICE")] = None,
    report: Annotated[Path | None, shown("FILE")] = None,
    json: Flag = False,
) -> int:
    """Run some steps under watch and name what goes wrong: exit code 0 when nothing does, else 1.

    Args:
        target: A recipe (digits-mlp, text-gpt ...) or a training script ending in .py.
        args: The script's own arguments, after `--`.
        level: Precision level of a recipe: O0, O1, O2, O3. A script chooses its own.
        dtype: 16-bit dtype of a recipe: bf16 or fp16. Default: what the device prefers.
        loss_scale: Loss scale of a recipe: dynamic, headroom, none or a number. Default: the level's.
        steps: Training steps to watch.
        seed: Seed of the recipe, or of a script's random generators.
        device: cpu, cuda, ... for a recipe. Default: the accelerator if there is one.
        report: Write the HTML report to this file.
        json: Print JSON instead of the verdict.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps}: expected 1 or more")
    check_report(report)
    if target.endswith(".py"):
        from halfstep.doctor.script import examine_script

        document = examine_script(Path(target), args, steps, seed)
    else:
        if args:
            raise ConfigError(f"{target} is a recipe and takes no arguments of its own, given {args[0]!r}")
        document = _recipe(target, level, dtype, loss_scale, steps, seed, device)
    if report is not None:
        from halfstep.report.doctor import write_doctor

        write_doctor(document, report)
    if json:
        print_json(document)
    else:
        _print(document, report)
    return 0 if document["healthy"] else FAULT


def _recipe(
    name: str, level: str, dtype: str | None, scale: str | None, steps: int, seed: int, device: str | None
) -> dict[str, Any]:
    from halfstep.numerics.lint import LintProbe, lint
    from halfstep.numerics.replayable import Replayable
    from halfstep.numerics.trace import trace_step
    from halfstep.numerics.watch import watch
    from halfstep.policy.levels import level_of
    from halfstep.recipes import recipe_of
    from halfstep.session.session import prepare

    recipe = recipe_of(name)
    where = computing_device(device)
    torch.manual_seed(seed)
    model, optimizer = recipe.build(seed, level)
    model.to(where)
    amp = prepare(model, optimizer, level=level, dtype=dtype, loss_scale=scale)
    batches = itertools.chain.from_iterable(itertools.repeat(recipe.task().train(seed)))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    first = [t.to(where) for t in next(batches)]
    probe = LintProbe()
    trace = trace_step(step, *first, session=amp, underflow=True, observers=[probe.look])
    findings = [*lint(session=amp), *dict.fromkeys(probe.findings)]
    seen = watch(model, amp, every=max(1, steps // 12))
    ready = Replayable(amp, warn=False)
    losses, error = [], None
    for number in range(steps):
        batch = first if number == 0 else [t.to(where) for t in next(batches)]
        try:
            losses.append(float(ready.run(step, *batch)))
        except Exception as caught:  # the verdict says it; the report shows what led there
            said = (str(caught).splitlines() or ["no message"])[0]
            error = f"{type(caught).__name__} at step {number + 1}: {said}"
            break
    ready.settle()
    seen.close()
    row = level_of(level)[0]
    label = f"{name} {row.name}" + ("" if row.name == "O0" else f" {_dtype_of(amp)}")
    traces = [(0, trace), *((number - 1, found) for number, found in ready.traces)]
    return document_of(label, seen, traces, findings, losses, error)


def _dtype_of(amp: Any) -> str:
    from halfstep.formats import dtype_name

    return dtype_name(amp.policy.compute_dtype)


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


def _print(document: Mapping[str, Any], report: Path | None) -> None:
    out = console()
    for line in document["verdict"]:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    rows = _dtypes(document["counts"])
    if rows:
        out.print(table("", ("dtype", "ops that ran in it, most frequent first"), rows))
    for note in document["notes"]:
        out.print(note, markup=False)
    if report is not None:
        out.print(f"report: {report}", markup=False, soft_wrap=True)


def _dtypes(counts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    by_dtype: dict[str, dict[str, int]] = {}
    for row in counts:
        ops = by_dtype.setdefault(row["dtype"], {})
        ops[row["op"]] = ops.get(row["op"], 0) + row["count"]
    lines = []
    for dtype, ops in sorted(by_dtype.items()):
        most = sorted(ops.items(), key=lambda x: -x[1])
        shown = ", ".join(f"{op} {n}" for op, n in most[:8])
        lines.append((dtype, shown + (f" and {len(most) - 8} more" if len(most) > 8 else "")))
    return lines
