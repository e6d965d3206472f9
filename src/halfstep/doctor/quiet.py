"""Faults without a value that is not finite, as faults of the document."""

from __future__ import annotations

import linecache
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.doctor.conversions import Flush
from halfstep.doctor.document import CauseFound, CureFound, Fault
from halfstep.doctor.ledger import Ledger, Note

if TYPE_CHECKING:
    from halfstep.numerics.watch import LostUpdates

#: Share of the updates that rounding swallows beyond which a model does not train.
_ALL_LOST = 0.9


def _fault(
    step: int, phase: str, cause: CauseFound, cures: list[CureFound], where: tuple[str, int], op: str = ""
) -> Fault:
    file, line = where
    place = f"{Path(file).name}:{line}" if file else ""
    code = linecache.getline(file, line).strip() if file else ""
    lines = [f"{phase}: {op or 'the update'}{f' in {place}' if place else ''}"]
    lines += [f"  {code}"] if code else []
    lines += [f"  cause: {cause.text}"]
    return Fault(step, phase, "", op, place, cause, cures, "\n".join(lines), code)


def quiet_faults(ledger: Ledger, flushes: Sequence[Flush], lost: Sequence[LostUpdates]) -> list[Fault]:
    """What the notes of a run tell, the earliest first."""
    found = [_flushed(list(flushes))] if flushes else []
    spike = ledger.spike()
    if spike is not None:
        found.append(_spike(ledger, spike))
    shares = [note.share for note in lost]
    if len(shares) >= 2 and statistics.median(shares) >= _ALL_LOST:
        found.append(_lost(ledger, lost, statistics.median(shares)))
    grown = ledger.diverged()
    if grown is not None and spike is None and not any(note.bad for note in ledger.notes):
        found.append(_diverged(ledger, *grown))
    return found


def _flushed(flushes: list[Flush]) -> Fault:
    worst = max(flushes, key=lambda f: (f.overflow, f.count - f.kept))
    more = f"; and so with {len(flushes) - 1} more parameters" if len(flushes) > 1 else ""
    cause = CauseFound("range" if worst.overflow else "precision", worst.text + more)
    cures = [
        CureFound(
            "bf16", "use bf16: it has the range of fp32", 'hs.prepare(..., dtype="bf16")', specs=[("bf16",)]
        ),
        CureFound("advice", f"store {worst.name} times a power of two, and divide where it is used"),
    ]
    fault = _fault(0, "prepare", cause, cures, (worst.file, worst.line), "cast")
    fault.module, fault.module_class = worst.owner, worst.kind
    return fault


def rate_fault(note: Note) -> Fault | None:
    """The fault of a step whose learning rate is not a number to learn with."""
    wrong = [rate for rate in note.rates if not math.isfinite(rate)]
    if not wrong:
        return None
    cause = CauseFound("learning rate", f"learning rate: it is {wrong[0]} at this step")
    cures = [
        CureFound("advice", "check the schedule: what it divides by, and its range", "math.isfinite(lr)")
    ]
    return _fault(note.number, "optimizer", cause, cures, note.where, "add")


def _spike(ledger: Ledger, index: int) -> Fault:
    note = ledger.notes[index]
    before = [n for n in ledger.notes[:index] if n.taken and n.update > 0 and not n.bad]
    times = note.update / max(n.update for n in before)
    usual = before[-1]
    jumped = [(a, b) for a, b in zip(usual.rates, note.rates) if b > 30 * a]
    tail = f"the update is {times:.3g} times the largest before it"
    if jumped:
        old, new = jumped[0]
        cause = CauseFound("learning rate", f"learning rate: it jumps from {old:g} to {new:g}, and {tail}")
        cures = [CureFound("advice", f"check the schedule at step {note.number + 1}", f"lr={old:g}")]
        return _fault(note.number, "optimizer", cause, cures, note.where)
    for name, top in note.inputs.items():
        usually = statistics.median([n.inputs[name] for n in before if name in n.inputs] or [top])
        if top > 30 * usually > 0:
            what = f"{name} of batch {note.number + 1} reaches {top:.3g}, usually {usually:.3g}"
            text = f"data: {what}, and {tail}"
            cures = [
                CureFound("data", "drop or clamp such batches where they are loaded", f"{name}.clamp(-k, k)"),
                CureFound("advice", "clip the gradients", "amp.step(clip_norm=1.0)"),
            ]
            return _fault(note.number, "optimizer", CauseFound("data", text), cures, note.where)
    cause = CauseFound("divergence", f"divergence: {tail}; the gradients reach {note.gradient:.3g}")
    cures = [CureFound("advice", "clip the gradients", "amp.step(clip_norm=1.0)")]
    return _fault(note.number, "optimizer", cause, cures, note.where)


def _lost(ledger: Ledger, lost: Sequence[LostUpdates], share: float) -> Fault:
    first = next(note for note in lost if note.share >= _ALL_LOST)
    note = ledger.notes[min(first.step, len(ledger.notes) - 1)]
    text = (
        f"rounding: {share:.0%} of the updates are lost (worst: {first.worst}): they are smaller than half "
        "the spacing of the 16-bit weights, which stay as they are"
    )
    cures = [
        CureFound(
            "masters",
            "keep fp32 master weights, which take up what 16 bits lose",
            'hs.prepare(model, optimizer, level="O2")',
            specs=[("masters",)],
        )
    ]
    return _fault(note.number, "optimizer", CauseFound("rounding", text), cures, note.where)


def _diverged(ledger: Ledger, first: float, last: float) -> Fault:
    losses = [abs(n.loss) if n.loss is not None else 0.0 for n in ledger.notes]
    index = next((i for i, x in enumerate(losses) if x > 10 * first), len(losses) - 1)
    note = ledger.notes[index]
    rate = f" of {note.rates[0]:g}" if note.rates else ""
    text = f"divergence: the loss grew from {first:.3g} to {last:.3g}: the learning rate{rate} is too large"
    cures = [
        CureFound(
            "advice", "lower the learning rate, or warm it up", f"lr={note.rates[0] / 10:g}" if rate else ""
        )
    ]
    return _fault(note.number, "optimizer", CauseFound("divergence", text), cures, note.where)
