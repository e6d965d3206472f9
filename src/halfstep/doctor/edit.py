"""Write a cure into a script: a few lines of it change, as its owner would write them.

The edits do in the text what `numerics.cures.put_in_place` does from outside. A text does not say which
operands of an op are tensors, nor always which call runs a module, so there may be several ways to write a
cure: `write_cure` gives each, `mend_script` runs the script with each until its fault is gone, and
`write_plan` makes rules of a plan in the same way.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import io
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from halfstep.doctor.document import Document
from halfstep.numerics.cures import over
from halfstep.numerics.fault import FAILS, UNTRIED, WORKS, Cure, Fault, Spec, alike
from halfstep.numerics.lint import called
from halfstep.numerics.uncast import low_ops
from halfstep.policy.op_names import canonical_op
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule
from halfstep.policy.policy import Policy

_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Mult: ("mul", "*"),
    ast.Div: ("div", "/"),
    ast.Add: ("add", "+"),
    ast.Sub: ("sub", "-"),
    ast.MatMult: ("matmul", "@"),
    ast.Pow: ("pow", "**"),
}
_LIBRARIES = ("torch", "F", "functional", "ops", "nn", "linalg", "special")
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
#: Where scripts write a loss scale: keywords, and classes by their first argument.
_SCALES = ("init_scale", "loss_scale", "scale_value", "max_loss_scale", "init")
_SCALE_CLASSES = ("DynamicLossScale", "StaticLossScale")


class Script:
    """The text and the syntax tree of a script, and edits by position; `text()` applies them."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self._bytes = text.encode()
        lines = self._bytes.splitlines(keepends=True)
        self.newline = "\r\n" if lines and lines[0].endswith(b"\r\n") else "\n"
        self._starts = [0, *itertools.accumulate(map(len, lines))]
        self._edits: list[tuple[int, int, int, int, str]] = []

    def span(self, node: Any) -> tuple[int, int]:
        """Return where a node's text begins and ends, in bytes."""
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def of(self, node: Any) -> str:
        """Return a node's text."""
        begin, end = self.span(node)
        return self._bytes[begin:end].decode()

    def around(self, node: Any, before: str, after: str) -> None:
        """Insert text before and after a node; of nested nodes, edit the inner one first."""
        begin, end = self.span(node)
        self._edits.append((begin, 1, -len(self._edits), 0, before))
        self._edits.append((end, 0, len(self._edits), 0, after))

    def swap(self, node: Any, text: str) -> None:
        """Replace a node's text."""
        begin, end = self.span(node)
        self._edits.append((begin, 2, 0, end - begin, text))

    def rename(self, node: ast.Attribute, name: str) -> None:
        """Replace an attribute's name; its owner stays."""
        length = len(node.attr.encode())
        self._edits.append((self.span(node)[1] - length, 2, 0, length, name))

    def above(self, statement: ast.stmt, *lines: str, indent: bool = False) -> None:
        """Insert lines above a statement; with `indent` it becomes the body of the last line."""
        begin = self._starts[statement.lineno - 1]
        margin = self._bytes[begin : begin + statement.col_offset].decode()
        if margin.strip():
            margin = ""
        head = "".join(f"{margin}{line}{self.newline}" for line in lines) + "    " * indent
        self._edits.append((begin, 1, -len(self._edits), 0, head))
        for number in range(statement.lineno, statement.end_lineno or 0) if indent else ():
            self._edits.append((self._starts[number], 1, -len(self._edits), 0, "    "))

    def text(self) -> str:
        """Return the text with every edit applied."""
        parts, at = list[bytes](), 0
        for place, _, _, length, new in sorted(self._edits):
            parts += [self._bytes[at:place], new.encode()]
            at = place + length
        return b"".join([*parts, self._bytes[at:]]).decode()

    def calls(self, *names: str) -> list[ast.Call]:
        """Return all calls of functions or methods of these names."""
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and called(n) in names]

    def statement(self, line: int) -> ast.stmt | None:
        """Return the innermost statement on a line."""
        statements = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and _on(n, line)]
        return min(statements, key=lambda n: (n.end_lineno or 0) - n.lineno, default=None)


def write_cure(text: str, spec: Spec, fault: Fault, code: str = "") -> Iterator[str]:
    """Yield the script with a dose of the cure, once for each way in which it may be written.

    `code`: what the cure says to write, in the words of the script.
    """
    kind, *rest = spec
    if kind == "both":
        lower, upper = sorted(rest, key=lambda s: -s[3])  # the lower line first: line numbers above it stay
        ways = (
            new for half in write_cure(text, lower, fault) for new in write_cure(half, upper, fault, code)
        )
    elif kind in _ANYWHERE:
        ways = (_edit(text, change, code, *rest) for change in _ANYWHERE[kind])
    else:
        ways = _of_an_op(text, spec, fault, code)
    versions = {text}
    for new in ways:
        try:
            ast.parse(new)
        except SyntaxError:
            continue
        if new not in versions:
            versions.add(new)
            yield new


def _edit(text: str, change: Callable[..., None], *arguments: Any) -> str:
    script = Script(text)
    change(script, *arguments)
    return script.text()


def _on(node: Any, line: int) -> bool:
    return node.lineno <= line <= node.end_lineno


# An op on a line.


def _of_an_op(text: str, spec: Spec, fault: Fault, code: str) -> Iterator[str]:
    kind, op, _, line, *amount = spec
    if kind == "full":
        yield _edit(text, _by_policy, op)
    if kind == "epsilon":
        yield _edit(text, _with_epsilon, line, amount[0])
        return
    if kind == "logsumexp":
        for keep in ("", ", keepdim=True"):
            yield _edit(text, _with_logsumexp, keep, line, *amount)
        return
    text = _edit(text, _unfold, line)
    changes = {"scale": _scale, "clamp": _clamp, "shift": _shift}
    change: Callable[..., None] = changes.get(kind, _widen)
    script = Script(text)
    sites = _sites(script, op, line, fault.module)
    whose = (slice(1), slice(None), slice(1, None))  # the least that may be it first
    off = kind in ("full", "full_here") and fault.location.in_region and op in low_ops(Policy())
    for of, which in itertools.product(sites, whose):
        script = Script(text)
        for node, operands in of:
            change(
                script, node, [x for x in operands[which] if not isinstance(x, ast.Constant)], amount, code
            )
        statement = script.statement(line)
        if off and statement is not None:
            device = re.search(r'autocast\("(\w+)"', code)
            name = f'torch.autocast("{device[1] if device else "cpu"}", enabled=False)'
            script.above(statement, f"with {name}:", indent=True)
        yield script.text()


_Site = tuple[Any, list[ast.expr]]
"""An op in the text and its operands."""


def _sites(script: Script, op: str, line: int, module: str) -> list[list[_Site]]:
    """Yield what may be the op on a line: calls of its name, then all; else calls that may run a module."""
    named, modules = list[_Site](), list[_Site]()
    for node in _inside_out(script.tree):
        if isinstance(node, ast.BinOp) and _on(node, line):
            if _OPERATORS.get(type(node.op), ("",))[0] == op:
                named.append((node, [node.left, node.right]))
        elif isinstance(node, ast.Call) and _on(node, line):
            name, owner = called(node), getattr(node.func, "value", None)
            function = owner is None or getattr(owner, "attr", getattr(owner, "id", "")) in _LIBRARIES
            if op in (name.rstrip("_"), canonical_op(name)):
                named.append((node, [*([] if function or owner is None else [owner]), *node.args]))
            elif node.args:
                modules.append((node, [*node.args]))
    modules.sort(key=lambda site: called(site[0]) != module.rpartition(".")[2])
    single = [[site] for site in named or modules]
    return [*single, named] if len(named) > 1 else single


def _inside_out(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield from _inside_out(child)
    yield node


def _unfold(script: Script, line: int) -> None:
    """Rewrite `x *= y` on a line as `x = x * (y)`."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.AugAssign) and _on(node, line) and type(node.op) in _OPERATORS:
            target, value = script.of(node.target), script.of(node.value)
            script.swap(node, f"{target} = {target} {_OPERATORS[type(node.op)][1]} ({value})")


def _then(script: Script, operand: ast.expr, after: str, before: str = "") -> None:
    """Insert a method's call, or what else binds as closely, after an expression."""
    plain = isinstance(operand, _ATOMS)
    script.around(operand, before + "(" * (not plain), ")" * (not plain) + after)


def _widen(script: Script, node: Any, operands: list[ast.expr], amount: Any, code: str) -> None:
    for operand in operands:
        _then(script, operand, ".float()")


def _scale(script: Script, node: Any, operands: list[ast.expr], amount: list[float], code: str) -> None:
    bits, has_bias = amount
    for operand in operands[:1]:
        _then(script, operand, f" * 2.0**-{bits:g})", "(")
    if not has_bias:
        script.around(node, "((", f").float() * 2.0**{bits:g})")
        return
    bias_node = next((k.value for k in node.keywords if k.arg == "bias"), None) or [*node.args, None, None][2]
    bias = f"{script.of(node.func)}.bias" if bias_node is None else script.of(bias_node)
    script.around(node, "((", f".float() - {bias}) * 2.0**{bits:g} + {bias})")


def _shift(script: Script, node: Any, operands: list[ast.expr], amount: list[int], code: str) -> None:
    dim = f"{over(amount)}, " if amount else ""
    for operand in operands[:1]:
        x = script.of(operand) if isinstance(operand, _ATOMS) else f"({script.of(operand)})"
        script.swap(operand, f"({x} - {x}.amax({dim}keepdim=True))")


def _with_logsumexp(script: Script, keep: str, line: int, last: int, *dims: int) -> None:
    """Replace the logarithm by torch's logsumexp of what the exponential is taken of."""
    for exp, log in itertools.product(script.calls("exp"), script.calls("log")):
        if _on(exp, line) and _on(log, last) and dims:
            of_torch = script.of(exp.func).rpartition(".")[0] in _LIBRARIES
            x = exp.args[0] if of_torch else getattr(exp.func, "value", None)
            script.swap(log, f"torch.logsumexp({script.of(x)}, {over(dims)}{keep})")


def _clamp(script: Script, node: Any, operands: list[ast.expr], amount: list[float], code: str) -> None:
    divides = isinstance(node, ast.BinOp) or called(node).rstrip("_") in ("div", "divide", "true_divide")
    for operand in operands[-1:] if divides else operands[:1]:
        if divides and amount[1:]:  # it may have either sign
            d = script.of(operand)
            script.swap(operand, f"torch.where(({d}).abs() < {amount[0]:g}, {amount[0]:g}, {d})")
        else:
            most = "clamp(max=" if "clamp(max=" in code else "clamp_min("
            _then(script, operand, f".{most}{amount[0]:g})")


def _with_epsilon(script: Script, line: int, value: float) -> None:
    for node in ast.walk(script.tree):
        number = node.value if isinstance(node, ast.Constant) and _on(node, line) else None
        if isinstance(number, float) and 0 < number < value:
            script.swap(node, f"{value:.2g}")


# What stands elsewhere in the script.


def _by_policy(script: Script, op: str) -> None:
    """Add a rule for the op where the session or the trainer is made."""
    for call in script.calls("prepare", "Trainer"):
        policy_node = next((k.value for k in call.keywords if k.arg == "policy"), None)
        if policy_node is None:
            _set_keyword(script, call, "policy", f'"full={op}"')
        else:
            script.around(policy_node, "hs.Policy.parse(", f').with_rules(full=["{op}"])')


def _set_keyword(script: Script, call: ast.Call, name: str, value: str) -> None:
    value_node = next((k.value for k in call.keywords if k.arg == name), None)
    if value_node is not None:
        script.swap(value_node, value)
    elif call.args or call.keywords:
        last = max([*call.args, *call.keywords], key=lambda node: script.span(node)[1])
        script.around(last, "", f", {name}={value}")


def with_plan(text: str, path: str) -> str:
    """Pass a plan's file where the session or the trainer is made, unless a plan is passed there."""
    script = Script(text)
    for call in script.calls("prepare", "Trainer"):
        if all(keyword.arg != "plan" for keyword in call.keywords):
            _set_keyword(script, call, "plan", repr(path))
    return script.text()


def _keywords(script: Script, code: str, *_: Any) -> None:
    """Set the keywords of a call in `code`, such as `hs.prepare(..., dtype="bf16")`, in all such calls."""
    try:
        template: Any = ast.parse(code, mode="eval").body
    except SyntaxError:
        return
    for call in script.calls(called(template)) if isinstance(template, ast.Call) else ():
        for keyword in template.keywords:
            _set_keyword(script, call, str(keyword.arg), ast.unparse(keyword.value).replace("'", '"'))


_BF16 = {"fp16": "bf16", "float16": "bfloat16", "16-mixed": "bf16-mixed", "16-true": "bf16-true"}


def _in_bf16(script: Script, code: str) -> None:
    """Write bf16 wherever the script names fp16."""
    if "amp.initialize" in code:
        return  # Apex's levels know fp16 alone
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Constant) and node.value in _BF16:
            script.swap(node, f'"{_BF16[node.value]}"')
        elif isinstance(node, ast.Attribute) and node.attr in ("float16", "half"):
            script.rename(node, "bfloat16")


def _with_masters(script: Script, code: str) -> None:
    """Ask for level O2 where the session is made or, without one, below the optimizer."""
    if script.calls("prepare", "Trainer"):
        _keywords(script, code)
        return
    dtype = "bf16" if "bfloat16" in ast.dump(script.tree) else "fp16"
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        argument = script.of(node.value.args[0]) if node.value.args else ""
        model = re.match(r"(\w+(?:\.\w+)*)\.parameters\(\)", argument)
        if model and isinstance(node.targets[0], ast.Name):
            names = f"{model[1]}, {node.targets[0].id}"
            call = f'hs.prepare({names}, level="O2", dtype="{dtype}", loss_scale="none")'
            margin = script.newline + " " * node.col_offset
            script.around(node, "", f"{margin}import halfstep as hs{margin}{call}")


def _divide_losses(script: Script, code: str, bits: int) -> None:
    """Divide each loss where backward or a loss scale takes it."""
    scaled = [c for c in script.calls("scale", "scale_loss") if isinstance(c.func, ast.Attribute) and c.args]
    calls = scaled or [c for c in script.calls("backward") if c.args]
    losses = [c.args[0] for c in calls] or [
        c.func.value for c in script.calls("backward") if isinstance(c.func, ast.Attribute)
    ]
    for loss in losses:
        _then(script, loss, f" / {2**bits})", "(")


def _with_scale(script: Script, code: str, bits: int) -> None:
    """Change the loss scale where the script has its number."""
    scales = [
        keyword.value
        for call in ast.walk(script.tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg in _SCALES
    ]
    scales += [call.args[0] for call in script.calls(*_SCALE_CLASSES) if call.args]
    numbers = [node for node in scales if not any(isinstance(x, ast.Call) for x in ast.walk(node))]
    for node in numbers:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            script.swap(node, repr(node.value * 2.0**bits))
        elif not isinstance(node, ast.Constant):
            _then(script, node, f" * {2.0**bits!r}")


def _no_faster(script: Script, code: str, *most: float) -> None:
    """Reset learning rates that jumped to the usual ones before each step."""
    optimizers = [
        script.of(n.targets[0])
        for n in ast.walk(script.tree)
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)
        if n.value.args and "parameters" in ast.dump(n.value.args[0])
    ]
    for call in script.calls("step"):
        owner = script.of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        name = owner if owner in optimizers or not optimizers else optimizers[0]
        statement = script.statement(call.lineno)
        if statement is not None and (
            owner in optimizers or call.args or owner in ("amp", "session", "trainer")
        ):
            script.above(
                statement,
                f"for group, most in zip({name}.param_groups, {most!r}):",
                '    group["lr"] = most if group["lr"] > 30 * most else group["lr"]',
            )


def _clear_gradients(script: Script, code: str, line: int) -> None:
    """Clear gradients before the backward passes of the step on this line, else after it."""
    step, call = script.statement(line), next((c for c in script.calls("step") if _on(c, line)), None)
    if step is None or call is None or not isinstance(call.func, ast.Attribute):
        return
    clear = f"{script.of(call.args[0] if call.args else call.func.value)}.zero_grad()"
    bodies = (getattr(node, name, None) for node in ast.walk(script.tree) for name in ("body", "orelse"))
    block = next(body for body in bodies if isinstance(body, list) and step in body)
    backward = script.calls("backward")
    before = [s for s in block[: block.index(step)] if any(node in backward for node in ast.walk(s))]
    if before:
        script.above(before[-1], clear)
    else:
        script.around(step, "", f"{script.newline}{' ' * step.col_offset}{clear}")


#: The ways in which cures that change no single op are written.
_ANYWHERE: dict[str, tuple[Callable[..., None], ...]] = {
    "bf16": (_in_bf16, _keywords),
    "masters": (_with_masters,),
    "loss": (_divide_losses,),
    "loss_scale": (_with_scale, _keywords),
    "rate": (_no_faster,),
    "clear": (_clear_gradients,),
}


# Which way holds, and plans.

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
        document.notes.append(_why_no_diff(result.faults[0]))
    return text


def _first_lasting_cure(text: str, document: Document, attempt: Attempt) -> tuple[str, Document] | None:
    """Return the script with a cure that removes its first fault, and the document of that script.

    The first such cure after which no fault remains; else after which every loss is finite; else the first.
    """
    fault, holding = document.faults[0], list[tuple[bool, bool, str, Document]]()
    for cure in sorted((c for c in fault.cures if c.status != FAILS and c.specs), key=_is_untried):
        if holding and _is_untried(cure):
            break
        for new in write_cure(text, cure.specs[0], fault, cure.code):
            result = attempt(new)
            if result is not None and is_gone(fault, result):
                holding.append((bool(result.faults), not all(map(math.isfinite, result.losses)), new, result))
                if _is_untried(cure):
                    cure.mark_working(cure.specs[0], result.steps)
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


def _why_no_diff(fault: Fault) -> str:
    """Say why a fault has no diff."""
    number = f"no diff for step {fault.step + 1}"
    cure = next((c for c in fault.cures if c.status == WORKS), None)
    if not any(c.specs for c in fault.cures):
        return f"{number} ({fault.cause.kind}): what cures it, above, is to be written by hand"
    if cure is None:
        return f"{number}: no change was seen to cure it ({fault.cause.kind}); what to look at stands above"
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
    """Return the document of the script prepared with this plan; None where nothing in it reads a plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(plan.to_toml(), encoding="utf-8")
        new = with_plan(text, str(path))
        return None if new == text else attempt(new)
