"""Write cures into a script: a few lines of it change, as its owner would write them.

A text does not say which operands of an op are tensors, nor always which call runs a module, so there may be
several ways to write a remedy: `write_dose` gives each, `mend_script` runs the script with each until its
fault is gone, and `write_plan` makes rules of a plan in the same way.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import io
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from halfstep.doctor.document import Document
from halfstep.numerics.fault import Fault, alike
from halfstep.numerics.remedies.base import FAILS, UNTRIED, WORKS, Cure, Remedy
from halfstep.numerics.remedies.full import RunInFp32
from halfstep.numerics.remedies.source import Script, set_keyword
from halfstep.numerics.tape import OpLocation
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule


def write_dose(text: str, dose: Remedy, location: OpLocation) -> Iterator[str]:
    """Yield the script with a dose of a cure of the op at this place, once for each way that is Python."""
    versions = {text}
    for new in dose.edit(text, location):
        try:
            ast.parse(new)
        except SyntaxError:
            continue
        if new not in versions:
            versions.add(new)
            yield new


def write_codes(text: str, path: Path, faults: Sequence[Fault]) -> None:
    """Put cures that name an op's operands in the script's words: the line as the first way writes it."""
    for fault in faults:
        here = fault.location.file and Path(fault.location.file).resolve() == path.resolve()
        for cure in fault.cures if here else ():
            if cure.doses and cure.kind in ("clamp", "scale"):
                new = next(write_dose(text, cure.doses[0], fault.location), text)
                cure.code = _changed_line(text, new) or cure.code


def _changed_line(old: str, new: str) -> str:
    """Return the one line of a text that is new in it, else nothing."""
    before = {*old.splitlines()}
    lines = [line.strip() for line in new.splitlines() if line not in before]
    return lines[0] if len(lines) == 1 else ""


def with_plan(text: str, path: str) -> str:
    """Pass a plan's file where the session or the trainer is made, unless a plan is passed there."""
    script = Script(text)
    for call in script.calls("prepare", "Trainer"):
        if all(keyword.arg != "plan" for keyword in call.keywords):
            set_keyword(script, call, "plan", repr(path))
    return script.text()


Attempt = Callable[[str], Document | None]
"""Examines another text of the script; None where it does not run as far as the script itself."""

#: Faults, one behind the other, that are mended in one script's text, and by one plan.
_MENDED, _PLANNED = 3, 8


def mend_script(text: str, document: Document, attempt: Attempt) -> str:
    """Return the script with its first fault cured, then with the first of those that remain, and so on."""
    result = document
    for _ in range(_MENDED):
        better = _first_lasting_cure(text, result, attempt) if result.faults else None
        if better is None:
            break
        text, result = better
    if result.faults:
        document.notes.append(_why_no_diff(text, result.faults[0]))
    return text


def _first_lasting_cure(text: str, document: Document, attempt: Attempt) -> tuple[str, Document] | None:
    """Return the script with a cure that removes its first fault, and the document of that script.

    The first such cure after which no fault remains; else after which every loss is finite; else the first.
    """
    fault, holding = document.faults[0], list[tuple[bool, bool, str, Document]]()
    for cure in sorted((c for c in fault.cures if c.status != FAILS and c.doses), key=_is_untried):
        if holding and _is_untried(cure):
            break
        for new in write_dose(text, cure.doses[0], fault.location):
            result = attempt(new)
            if result is not None and is_gone(fault, result):
                holding.append((bool(result.faults), not all(map(math.isfinite, result.losses)), new, result))
                if _is_untried(cure):
                    cure.mark_working(cure.doses[0], result.steps)
                cure.code = _changed_line(text, new) or cure.code
                break
        if holding and not holding[-1][0]:
            break
    best = min(holding, key=lambda row: row[:2], default=None)
    return None if best is None else best[2:]


def _is_untried(cure: Cure) -> bool:
    return cure.status == UNTRIED


def is_gone(fault: Fault, document: Document) -> bool:
    """Whether a fault is gone; a fault of another op at a later step is another one."""
    return not any(alike(f, fault) and (f.op == fault.op or f.step <= fault.step) for f in document.bad)


def _why_no_diff(text: str, fault: Fault) -> str:
    """Say why a fault has no diff."""
    number = f"no diff for step {fault.step + 1}"
    cure = next((c for c in fault.cures if c.status == WORKS), None)
    if not any(c.doses for c in fault.cures):
        return f"{number} ({fault.cause.kind}): what cures it, above, is to be written by hand"
    if cure is None:
        return f"{number}: no change was seen to cure it ({fault.cause.kind}); what to look at stands above"
    if any(True for dose in cure.doses for _ in write_dose(text, dose, fault.location)):
        return f"{number}: the cure, written into the script, was not seen to hold to its end: {cure.text}"
    return f"{number}: the cure could not be written into the script, write it by hand: {cure.text}"


def as_diff(path: Path, old: str, new: str) -> str:
    """Return the difference of two texts of a file, as `diff -u` writes it."""
    name = str(path)
    before, after = (list(io.StringIO(text, newline="\n")) for text in (old, new))
    lines = difflib.unified_diff(before, after, name, name)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return "".join(ended)


def write_plan(text: str, document: Document, attempt: Attempt) -> str:
    """Return a plan, as TOML, that cures what a plan can, also faults that show after the first is cured.

    The notes say of the others why a plan does not cure them."""
    plan, result, faults = Plan(), document, list[Fault]()
    while len(faults) < _PLANNED:
        fault = next((f for f in result.faults if not any(f.same_as(other) for other in faults)), None)
        if fault is None:
            break
        faults.append(fault)
        rules = list(_rules_of(fault))
        for rule in rules:
            larger = _with_rule(plan, rule)
            better = _under(larger, text, attempt)
            if better is not None and is_gone(fault, better):
                plan, result = larger, better
                break
        else:
            document.notes.append(_why_no_rule(fault, rules))
    return plan.to_toml() if plan else ""


def _why_no_rule(fault: Fault, rules: Sequence[PlanRule]) -> str:
    """Say why a fault has no rule."""
    number = f"no plan rule for step {fault.step + 1}"
    if not rules:
        kind = fault.cause.kind
        return f"{number} ({kind}): a plan says in which precision the ops of a module run"
    part = "the whole model" if rules[-1].pattern == "**" else rules[-1].pattern
    return f"{number}: {part} in fp32 does not cure it, or no hs.prepare is there to read a plan"


def _with_rule(plan: Plan, rule: PlanRule) -> Plan:
    """Return the plan with one more rule, merged into the rule for the same modules if there is one."""
    rules = {old_rule.pattern: old_rule for old_rule in plan.rules}
    old_rule = rules.get(rule.pattern)
    if old_rule is not None:
        changes = {"dtype": rule.dtype or old_rule.dtype, "rule": rule.rule or old_rule.rule}
        in_fp32 = Rule.FULL in (old_rule.computes, rule.computes)  # all of the module then, its ops too
        rule = dataclasses.replace(old_rule, ops={} if in_fp32 else {**old_rule.ops, **rule.ops}, **changes)
    return Plan(tuple({**rules, rule.pattern: rule}.values()))


def _rules_of(fault: Fault) -> Iterator[PlanRule]:
    """Yield the rules that may cure a fault, the narrowest first.

    These are its op in its module, the ops whose results it reads as well, its module; for weights that 16
    bits
    cannot hold, their modules."""
    kind, reason = fault.cause.kind, f"step {fault.step + 1}, {fault.where}: {fault.cause.words}"
    if fault.phase in ("prepare", "optimizer") and kind in ("range", "precision", "rounding"):
        pattern = fault.module if fault.phase == "prepare" else "**"
        yield PlanRule(pattern or "**", dtype=torch.float32, reason=f"{fault.where}: {fault.cause.words}")
        return
    scaled = any(c.kind == "loss_scale" and c.status == WORKS for c in fault.cures)
    if kind not in ("range", "precision") or not fault.module_class or scaled or not fault.aten:
        return
    wide = [(dose.op, c) for c in fault.cures for dose in c.doses[:1] if isinstance(dose, RunInFp32)]
    works = next(((op, cure) for op, cure in wide if cure.status != FAILS), None)
    if works is not None:
        why = f"{reason}; {works[1].verdict}"
        yield PlanRule(fault.module or "**", ops={works[0]: Rule.FULL}, reason=why)
    ops = {op: Rule.FULL for op, _ in wide}
    if len(ops) > (works is not None):
        yield PlanRule(fault.module or "**", ops=ops, reason=reason)
    if fault.module:
        yield PlanRule(fault.module, dtype=torch.float32, rule=Rule.FULL, reason=reason)


def _under(plan: Plan, text: str, attempt: Attempt) -> Document | None:
    """Return the document of the script prepared with this plan; None where nothing in it reads a plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(plan.to_toml(), encoding="utf-8")
        new = with_plan(text, str(path))
        return None if new == text else attempt(new)
