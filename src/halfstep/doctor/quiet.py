"""Faults that the notes of a run tell, as faults of the document: many have no value that is not finite.

Where values did leave their range later, the step that sent them there is the fault, and the op at which they
left it only what came of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from halfstep.doctor.conversions import Flush
from halfstep.doctor.ledger import Ledger, Note
from halfstep.numerics.fault import Cause, Cure, Fault
from halfstep.numerics.locations import OpLocation

if TYPE_CHECKING:
    from halfstep.numerics.terms import Terms
    from halfstep.numerics.watch import LostUpdates

#: Share of the updates that rounding swallows beyond which a model does not train.
_ALL_LOST = 0.9


def _fault(
    step: int, phase: str, cause: Cause, cures: list[Cure], where: tuple[str, int], op: str = ""
) -> Fault:
    return Fault(phase, op, OpLocation("", "", None, *where), cause, cures, step, taped=False)


@dataclass(frozen=True)
class RunNotes:
    """What was noted of a run: its steps, what conversions flushed, updates lost to rounding, its words."""

    ledger: Ledger
    flushes: Sequence[Flush]
    lost: Sequence[LostUpdates]
    terms: Terms


def all_faults(seen: RunNotes, traced: Sequence[Fault]) -> list[Fault]:
    """What the tape showed and what the notes tell: the earliest first, what lies behind another last."""
    sound = seen.ledger.broken() is None
    found = [*traced, *quiet_faults(seen)] if sound else with_roots(seen, traced)
    return sorted(found, key=lambda fault: (fault.behind, fault.phase != "prepare", fault.step))


def quiet_faults(seen: RunNotes) -> list[Fault]:
    """What the notes of a run without lasting damage tell, the earliest first."""
    ledger = seen.ledger
    found = [_flushed(list(seen.flushes), seen.terms)] if seen.flushes else []
    spike = ledger.spike()
    if spike is not None:
        found.append(_spike(ledger, spike, seen.terms))
    shares = [note.share for note in seen.lost]
    if len(shares) >= 2 and statistics.median(shares) >= _ALL_LOST:
        found.append(_lost(ledger, seen.lost, statistics.median(shares), seen.terms))
    grown = ledger.diverged()
    if grown is not None and spike is None and not any(note.bad for note in ledger.notes):
        found.append(_diverged(ledger, *grown))
    return found


def with_roots(seen: RunNotes, faults: Sequence[Fault]) -> list[Fault]:
    """The faults of a run with lasting damage; what an update or a growing loss led to is told with that."""
    ledger = seen.ledger.until(seen.ledger.broken())
    found = [_flushed(list(seen.flushes), seen.terms)] if seen.flushes else []
    root = _root(ledger, faults, seen.terms)
    if root is None:
        return [*found, *faults]
    came_of_it = [f for f in faults if f.step >= root.step and f.cause.kind not in ("data", "learning rate")]
    if not came_of_it:
        return [*found, *faults]
    root.led_to = came_of_it[0]
    return [*found, root, *(f for f in faults if all(f is not one for one in came_of_it))]


def _root(ledger: Ledger, faults: Sequence[Fault], terms: Terms) -> Fault | None:
    """The step that sent a run out of range, by its update or from which on its loss grew."""
    out_of_range = any(f.cause.kind == "range" and not f.cause.weight for f in faults)
    spike, grown = ledger.spike(), ledger.diverged()
    if spike is not None and (grown is None or spike <= grown[0]):
        root = _spike(ledger, spike, terms)
        telling = root.cause.kind == "learning rate" or (out_of_range and not ledger.notes[spike].bad)
        return root if telling else None
    return _diverged(ledger, *grown) if grown is not None and out_of_range else None


def _flushed(flushes: list[Flush], terms: Terms) -> Fault:
    worst = max(flushes, key=lambda f: (f.overflow, f.count - f.kept))
    more = f"; and so with {len(flushes) - 1} more parameters" if len(flushes) > 1 else ""
    cause = Cause("range" if worst.overflow else "precision", worst.text + more)
    cures = [
        Cure("bf16", "use bf16: it has the range of fp32", terms.bf16, specs=[("bf16",)]),
        Cure("advice", f"store {worst.name} times a power of two, and divide where it is used"),
    ]
    fault = _fault(0, "prepare", cause, cures, (worst.file, worst.line), "cast")
    fault.location = replace(fault.location, module=worst.owner, module_class=worst.kind)
    return fault


def _spike(ledger: Ledger, index: int, terms: Terms) -> Fault:
    note = ledger.notes[index]
    before = [n for n in ledger.notes[:index] if n.taken and n.update > 0 and not n.bad]
    times = note.update / max(n.update for n in before)
    tail = f"the update is {times:.3g} times the largest before it"
    usual = [n.rates for n in before if len(n.rates) == len(note.rates)]
    most = [max(rates) for rates in zip(*usual)]
    jumped = [place for place, old in enumerate(most) if note.rates[place] > 30 * old]
    if jumped:
        return _jump(note, jumped[0], most, usual[-1], tail)
    for name, amax in note.inputs.items():
        usually = statistics.median([n.inputs[name] for n in before if name in n.inputs] or [amax])
        if amax > 30 * usually > 0:
            what = f"{name} of batch {note.number + 1} reaches {amax:.3g}, usually {usually:.3g}"
            text = f"data: {what}, and {tail}"
            cures = [
                Cure("data", "drop or clamp such batches where they are loaded", f"{name}.clamp(-k, k)"),
                Cure("advice", "clip the gradients", terms.clip),
            ]
            return _fault(note.number, "optimizer", Cause("data", text), cures, note.where)
    usually = statistics.median(n.gradient for n in before)
    if note.gradient <= usually:
        return _small_divisor(note, tail, usually)
    cause = Cause("divergence", f"divergence: {tail}; the gradients reach {note.gradient:.3g}")
    cures = [Cure("advice", "clip the gradients", terms.clip)]
    return _fault(note.number, "optimizer", cause, cures, note.where)


def _jump(note: Note, group: int, most: Sequence[float], last: Sequence[float], tail: str) -> Fault:
    """A learning rate out of proportion to all before it.

    `most`: the largest of each group so far; `last`: those of the step before.
    """
    old, new = most[group], note.rates[group]
    of = f" of group {group}" if len(most) > 1 else ""
    text = f"learning rate: it jumps{of} from {last[group]:g} to {new:g}, and {tail}"
    cause = Cause("learning rate", text)
    whose = f"what {note.schedule} gives" if note.schedule else "what sets the rate"
    code = f'optimizer.param_groups[{group}]["lr"] = {old:g}' if of and not note.schedule else f"lr={old:g}"
    cures = [
        Cure("rate", f"check {whose} at step {note.number + 1}", code, specs=[("rate", *most)]),
    ]
    return _fault(note.number, "optimizer", cause, cures, note.where)


def _small_divisor(note: Note, tail: str, usually: float) -> Fault:
    """An update that is large though its gradients are not: the optimizer divides them by too little."""
    knobs = next((k for k in note.knobs if k.betas or k.eps), None)
    by = f" (eps={knobs.eps:g}{f', betas={knobs.betas}' if knobs.betas else ''})" if knobs else ""
    text = (
        f"divergence: {tail}, though the gradients are no larger ({note.gradient:.3g}, usually "
        f"{usually:.3g}): what the optimizer divides them by has become too small{by}"
    )
    betas = [*knobs.betas] if knobs else []
    cure = Cure("advice", "give the optimizer a larger epsilon", "eps=1e-4")
    if len(betas) > 1 and betas[1] < 0.9:
        words = "let the second moment remember more steps"
        cure = Cure("advice", words, f"betas=({betas[0]:g}, 0.999)")
    return _fault(note.number, "optimizer", Cause("divergence", text), [cure], note.where)


def _lost(ledger: Ledger, lost: Sequence[LostUpdates], share: float, terms: Terms) -> Fault:
    first = next(note for note in lost if note.share >= _ALL_LOST)
    note = ledger.notes[min(first.step, len(ledger.notes) - 1)]
    if first is lost[0] and first.step == 1 and ledger.notes[0].still >= _ALL_LOST:
        note = ledger.notes[0]  # the watch began after it
    text = (
        f"rounding: {share:.0%} of the updates are lost (worst: {first.worst}): they are smaller than half "
        "the spacing of the 16-bit weights, which stay as they are"
    )
    words = "keep fp32 master weights, which take up what 16 bits lose"
    cures = [Cure("masters", words, terms.masters, specs=[("masters",)])]
    return _fault(note.number, "optimizer", Cause("rounding", text), cures, note.where)


#: Weights that grew so many times are what a loss grew by.
_GROWN = 4


def _diverged(ledger: Ledger, index: int, first: float, last: float) -> Fault:
    note = ledger.notes[index]
    rate = note.rates[0] if note.rates else 0.0
    decay = max((k.weight_decay * r for k, r in zip(note.knobs, note.rates)), default=0.0)
    tail = f"divergence: the loss grew from {first:.3g} to {last:.3g}"
    if decay > 2:
        wrong = max(k.weight_decay for k in note.knobs)
        text = f"{tail}: weight decay {wrong:g} times the learning rate is {decay:.3g}; beyond 2 it enlarges"
        cure = Cure("advice", "lower the weight decay", "weight_decay=0.01")
    elif ledger.grown() < _GROWN:
        text = f"{tail}, and the weights did not: what they are compared with did, or what they are given"
        cure = Cure("advice", "look at what makes the targets: an average, another model, the data")
    else:
        at = f" of {rate:g}" if rate else ""
        text = f"{tail}: the learning rate{at} is too large"
        cure = Cure("advice", "lower the learning rate, or warm it up", f"lr={rate / 10:g}" if rate else "")
    return _fault(note.number, "optimizer", Cause("divergence", text), [cure], note.where)
