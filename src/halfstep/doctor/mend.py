"""Cures that can be pasted: the script's own diff, and a plan, each run before it is given out."""

from __future__ import annotations

import dataclasses
import difflib
import io
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from halfstep.doctor.document import Document
from halfstep.doctor.edit import with_plan, written
from halfstep.numerics.fault import FAILS, UNTRIED, WORKS, Cure, Fault, alike
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule

Attempt = Callable[[str], Document | None]
"""Examines another text of the script; None where it does not run as far as the script itself."""

#: Faults, one behind the other, that are mended in one script's text, and by one plan.
_MENDED, _PLANNED = 3, 8


def mended(text: str, document: Document, attempt: Attempt) -> str:
    """The script with its first fault cured, and then with what is the first one."""
    found = document
    for _ in range(_MENDED):
        better = _first_that_holds(text, found, attempt) if found.faults else None
        if better is None:
            break
        text, found = better
    if found.faults:
        document.notes.append(_unwritten(found.faults[0]))
    return text


def _first_that_holds(text: str, document: Document, attempt: Attempt) -> tuple[str, Document] | None:
    """The script with a cure of its first fault of which that is gone, and what is found in it then.

    The first with which nothing is left to do; else with which every loss is finite; else the first.
    """
    fault, holding = document.faults[0], list[tuple[bool, bool, str, Document]]()
    for cure in sorted((c for c in fault.cures if c.status != FAILS and c.specs), key=_untried):
        if holding and _untried(cure):
            break
        for new in written(text, cure.specs[0], fault, cure.code):
            found = attempt(new)
            if found is not None and is_gone(fault, found):
                holding.append((bool(found.faults), not all(map(math.isfinite, found.losses)), new, found))
                if _untried(cure):
                    cure.settle(cure.specs[0], found.steps)
                break
        if holding and not holding[-1][0]:
            break
    best = min(holding, key=lambda held: held[:2], default=None)
    return None if best is None else best[2:]


def _untried(cure: Cure) -> bool:
    return cure.status == UNTRIED


def is_gone(fault: Fault, found: Document) -> bool:
    """Whether nothing is left of a fault: another op's, at a later step, is another."""
    return not any(alike(f, fault) and (f.op == fault.op or f.step <= fault.step) for f in found.bad)


def _unwritten(fault: Fault) -> str:
    """Why a fault has no diff."""
    number = f"no diff for step {fault.step + 1}"
    cure = next((c for c in fault.cures if c.status == WORKS), None)
    if not any(c.specs for c in fault.cures):
        return f"{number} ({fault.cause.kind}): what cures it, above, is to be written by hand"
    if cure is None:
        return f"{number}: no change was seen to cure it ({fault.cause.kind}); what to look at stands above"
    return f"{number}: the cure could not be written into the script, write it by hand: {cure.text}"


def as_diff(path: Path, old: str, new: str) -> str:
    """What makes one text of a file the other, as `diff -u` writes it."""
    name = str(path)
    before, after = (list(io.StringIO(text, newline="\n")) for text in (old, new))
    lines = difflib.unified_diff(before, after, name, name)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return "".join(ended)


def planned(text: str, document: Document, attempt: Attempt) -> str:
    """A plan, as TOML, of the faults that one cures, also those that show behind them; the notes say of the
    others why it does not."""
    plan, found, seen = Plan(), document, list[Fault]()
    while len(seen) < _PLANNED:
        fault = next((f for f in found.faults if not any(f.same_as(other) for other in seen)), None)
        if fault is None:
            break
        seen.append(fault)
        rules = list(_rules_of(fault))
        for rule in rules:
            larger = _with_rule(plan, rule)
            better = _under(larger, text, attempt)
            if better is not None and is_gone(fault, better):
                plan, found = larger, better
                break
        else:
            document.notes.append(_unplanned(fault, rules))
    return plan.to_toml() if plan else ""


def _unplanned(fault: Fault, rules: Sequence[PlanRule]) -> str:
    """Why a fault has no rule."""
    number = f"no plan rule for step {fault.step + 1}"
    if not rules:
        kind = fault.cause.kind
        return f"{number} ({kind}): a plan says in which precision the ops of a module run"
    return f"{number}: {rules[-1].pattern} in fp32 alone does not cure it, or no hs.prepare reads one"


def _with_rule(plan: Plan, rule: PlanRule) -> Plan:
    """The plan with one more rule, or with what that sets in the rule for the same modules."""
    rules = {known.pattern: known for known in plan.rules}
    known = rules.get(rule.pattern)
    if known is not None:
        given = {"dtype": rule.dtype or known.dtype, "rule": rule.rule or known.rule}
        rule = dataclasses.replace(known, ops={**known.ops, **rule.ops}, **given)
    return Plan(tuple({**rules, rule.pattern: rule}.values()))


def _rules_of(fault: Fault) -> Iterator[PlanRule]:
    """The rules that may cure a fault, the narrowest first: its op in its module, what it reads as well, its
    module; for weights that 16 bits cannot hold, these in fp32, with their ops as they are."""
    kind, reason = fault.cause.kind, f"step {fault.step + 1}, {fault.where}: {fault.cause.words}"
    if fault.phase in ("prepare", "optimizer") and kind in ("range", "precision", "rounding"):
        pattern = fault.module if fault.phase == "prepare" else "**"
        yield PlanRule(pattern or "**", dtype=torch.float32, reason=f"{fault.where}: {fault.cause.words}")
        return
    scaled = any(c.kind == "loss_scale" and c.status == WORKS for c in fault.cures)
    if kind not in ("range", "precision") or not fault.module_class or scaled or not fault.aten:
        return
    wide = [c for c in fault.cures if c.kind == "full" and c.specs]
    works = next((c for c in wide if c.status != FAILS), None)
    if works is not None:
        why = f"{reason}; {works.verdict}"
        yield PlanRule(fault.module or "**", ops={works.specs[0][1]: Rule.FULL}, reason=why)
    ops = {c.specs[0][1]: Rule.FULL for c in wide}
    if len(ops) > (works is not None):
        yield PlanRule(fault.module or "**", ops=ops, reason=reason)
    if fault.module:
        yield PlanRule(fault.module, dtype=torch.float32, rule=Rule.FULL, reason=reason)


def _under(plan: Plan, text: str, attempt: Attempt) -> Document | None:
    """What is found in the script that is prepared with this plan; None where nothing in it reads one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(plan.to_toml(), encoding="utf-8")
        new = with_plan(text, str(path))
        return None if new == text else attempt(new)
