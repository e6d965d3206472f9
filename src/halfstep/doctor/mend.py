"""Cures that can be pasted: the script's own diff, and a plan, each run before it is given out."""

from __future__ import annotations

import dataclasses
import difflib
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from halfstep.doctor.document import Document
from halfstep.doctor.edit import with_plan, written
from halfstep.numerics.fault import FAILS, WORKS, Fault, alike
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule

Attempt = Callable[[str], Document | None]
"""Examines another text of the script; None where it does not run as far as the script itself."""

#: Faults, one behind the other, that are mended in one script.
_MENDED = 3


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
    """The script with a cure of its first fault of which that is gone, and what is found in it then."""
    fault = document.faults[0]
    for cure in (c for c in fault.cures if c.status == WORKS and c.specs):
        for new in written(text, cure.specs[0], fault, cure.code):
            found = attempt(new)
            if found is not None and is_gone(fault, found):
                return new, found
    return None


def is_gone(fault: Fault, found: Document) -> bool:
    """Whether nothing is left of a fault: another op's, at a later step, is another."""
    return not any(alike(f, fault) and (f.op == fault.op or f.step <= fault.step) for f in found.bad)


def _unwritten(fault: Fault) -> str:
    """Why a fault has no diff."""
    number = f"no diff for step {fault.step + 1}"
    cure = next((c for c in fault.cures if c.status == WORKS), None)
    if cure is None:
        return f"{number}: no change was seen to cure it ({fault.cause.kind}); what to look at stands above"
    return f"{number}: the cure could not be written into the script, write it by hand: {cure.text}"


def as_diff(path: Path, old: str, new: str) -> str:
    """What makes one text of a file the other, as `diff -u` writes it."""
    name = str(path)
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), name, name)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return "".join(ended)


def planned(text: str, document: Document, attempt: Attempt) -> str:
    """A plan, as TOML, of the faults that one cures; empty where it cures none, and the notes say why."""
    plan = Plan()
    for fault in document.faults:
        rule = _rule_of(fault)
        number = f"no plan rule for step {fault.step + 1}"
        if rule is None:
            kind = fault.cause.kind
            document.notes.append(
                f"{number} ({kind}): a plan says in which precision the ops of a module run"
            )
            continue
        taken = {known.pattern: known for known in plan.rules}
        if rule.pattern in taken:
            ops = {**taken[rule.pattern].ops, **rule.ops}
            rule = dataclasses.replace(taken[rule.pattern], ops=ops)
        larger = Plan(tuple({**taken, rule.pattern: rule}.values()))
        if _holds(text, larger, fault, attempt):
            plan = larger
        else:
            place = f"{fault.op} in {rule.pattern}"
            document.notes.append(
                f"{number}: {place} in fp32 alone does not cure it, or no hs.prepare reads one"
            )
    return plan.to_toml() if plan else ""


def _rule_of(fault: Fault) -> PlanRule | None:
    """The narrowest rule for a fault: its op in its module, or a module whose weights 16 bits cannot hold."""
    if fault.phase == "prepare" and fault.module:
        reason = f"{fault.where}: {fault.cause.words}"
        return PlanRule(fault.module, dtype=torch.float32, reason=reason)
    wide = next((c for c in fault.cures if c.kind == "full" and c.status != FAILS), None)
    if wide is None or fault.cause.kind not in ("range", "precision") or not fault.module_class:
        return None
    reason = f"step {fault.step + 1}, {fault.where}: {fault.cause.words}; {wide.verdict}"
    return PlanRule(fault.module or "**", ops={fault.op: Rule.FULL}, reason=reason)


def _holds(text: str, plan: Plan, fault: Fault, attempt: Attempt) -> bool:
    """Whether the script that is prepared with this plan has the fault no more."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(plan.to_toml(), encoding="utf-8")
        new = with_plan(text, str(path))
        found = None if new == text else attempt(new)
        return found is not None and is_gone(fault, found)
