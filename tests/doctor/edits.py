"""A script with one of the doctor's cures written into it, as its owner would."""

import ast
import re

PROLOGUE = """
import functools, operator, torch
from torch import nn

def _wide(x):
    return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

def _full(f, *args, **kwargs):
    with torch.autocast("cpu", enabled=False):
        if isinstance(f, nn.Module):
            wide = {n: p.float() for n, p in f.named_parameters()}
            f = functools.partial(torch.func.functional_call, f, wide)
            return f(tuple(map(_wide, args)))
        return f(*map(_wide, args), **kwargs)

def _clamp(f, value, *args, **kwargs):
    if f is operator.truediv:
        return f(args[0], torch.where(args[1].abs() < value, value, args[1]))
    if f is torch.exp:
        return f(args[0].clamp_max(value), *args[1:], **kwargs)
    return f(args[0].clamp_min(value), *args[1:], **kwargs)

def _scaled(f, bits, *args, **kwargs):
    return f(args[0] * 2.0**-bits, *args[1:], **kwargs).float() * 2.0**bits

"""
OPERATORS = {
    ast.Mult: "mul", ast.Div: "truediv", ast.Add: "add", ast.Sub: "sub", ast.MatMult: "matmul",
    ast.Pow: "pow",
}  # fmt: skip
NAMES = {"truediv": "div"}
MODULES = ("u", "out", "head", "fc", "first", "last", "body", "model", "mix", "net")


class Wrap(ast.NodeTransformer):
    """Puts `helper` around each call of `op` on one line: an operator, a function, a method or a module."""

    def __init__(self, line, op, helper, extra):
        self.line, self.op, self.helper, self.extra = line, op, helper, extra
        self.count = 0

    def put(self, function, args, keywords):
        self.count += 1
        name = ast.Name(self.helper, ast.Load())
        return ast.Call(name, [function, *map(ast.Constant, self.extra), *args], keywords)

    def visit_BinOp(self, node):
        self.generic_visit(node)
        name = OPERATORS.get(type(node.op), "")
        if node.lineno <= self.line <= node.end_lineno and NAMES.get(name, name) == self.op:
            function = ast.Attribute(ast.Name("operator", ast.Load()), name, ast.Load())
            return self.put(function, [node.left, node.right], [])
        return node

    def visit_AugAssign(self, node):
        value = ast.BinOp(node.target, node.op, node.value, lineno=node.lineno, end_lineno=node.end_lineno)
        changed = self.visit_BinOp(value)
        if changed is value:
            return node
        return ast.Expr(ast.Call(ast.Attribute(node.target, "copy_", ast.Load()), [changed], []))

    def visit_Call(self, node):
        self.generic_visit(node)
        if not node.lineno <= self.line <= node.end_lineno:
            return node
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if name.rstrip("_") == self.op and owner in ("torch", "F", "ops"):
            return self.put(node.func, node.args, node.keywords)
        if name.rstrip("_") == self.op and isinstance(node.func, ast.Attribute):
            function = ast.Attribute(ast.Name("torch", ast.Load()), name, ast.Load())
            return self.put(function, [node.func.value, *node.args], node.keywords)
        if self.op == "linear" and name in MODULES:
            return self.put(node.func, node.args, node.keywords)
        return node


def _wrapped(text, line, op, helper, *extra):
    wrap = Wrap(line, op, helper, extra)
    tree = ast.fix_missing_locations(wrap.visit(ast.parse(text)))
    assert wrap.count, f"nothing on line {line} is a {op}"
    return PROLOGUE + ast.unparse(tree)


def _in_bf16(text):
    if "amp.initialize(" in text:  # Apex's O1 knows fp16 alone: the script moves to a session
        text = _of_a_session(text)
    for old, new in (
        ("torch.float16", "torch.bfloat16"), ("torch.half", "torch.bfloat16"), (".half()", ".bfloat16()"),
        ('"fp16"', '"bf16"'), ('"float16"', '"bfloat16"'),
    ):  # fmt: skip
        text = text.replace(old, new)
    return text


def _of_a_session(text):
    """A script of Apex's O1, `loss` on a line of its own, in halfstep's own words at bf16."""
    for old, new in (
        (r"from halfstep\.compat\.apex import amp", "import halfstep as hs"),
        (r".* = amp\.initialize\((\w+), (\w+),.*", r'amp = hs.prepare(\1, \2, level="O1", dtype="bf16")'),
        (r"^( +)(loss = .*)$", r"\1with amp.autocast():\n\1    \2"),
        (r"with amp\.scale_loss\(loss, \w+\) as (\w+):\n +\1\.backward\(\)", "amp.backward(loss)"),
        (r"^( +)optimizer\.step\(\)$", r"\1amp.step()"),
    ):
        text, count = re.subn(old, new, text, flags=re.M)
        assert count, f"nothing in the script is {old}"
    return text


def _with_masters(text):
    model = re.search(r"^(\w+) = .*(?:\.half\(\)|bfloat16\))", text, re.M).group(1)
    dtype = "fp16" if ".half()" in text else "bf16"
    call = f'hs.prepare({model}, opt, level="O2", dtype="{dtype}", loss_scale="none")'
    return re.sub(r"^(opt = .*)$", rf"\1\nimport halfstep as hs; {call}", text, flags=re.M)


def _divided(text, by):
    if "amp.scale_loss(" in text:
        return text.replace("amp.scale_loss(loss,", f"amp.scale_loss(loss / {by},")
    for call in ("amp.backward(", "scaler.scale("):
        if call in text:
            return re.sub(rf"{re.escape(call)}(\w+)\)", rf"{call}\1 / {by})", text)
    return text.replace("loss.backward()", f"(loss / {by}).backward()")


def _with_scale(text, factor):
    new, count = re.subn(r"((?:init_scale|loss_scale)=)([\d.*e+]+)", rf"\1\2 * {factor!r}", text)
    assert count, "no loss scale in the script"
    return new


SLOWER = """
def _slower(optimizer, most):
    for group, rate in zip(optimizer.param_groups, most):
        group["lr"] = rate if group["lr"] > 30 * rate else group["lr"]

"""


def _no_faster(text, most):
    """Each step of the optimizer, on a line of its own, with the rates that were usual before."""

    def held(found):
        indent, owner = found.groups()
        optimizer = "opt" if owner == "amp" else owner
        return f"{indent}_slower({optimizer}, {tuple(most)!r}); {owner}.step("

    new, count = re.subn(r"^( *)([\w.]*\b(?:opt|o|optimizer|amp))\.step\(", held, text, flags=re.M)
    assert count, "no step of an optimizer in the script"
    return SLOWER + new


def edited(text, spec):
    """`text` with the cure that `spec` describes."""
    kind, *rest = spec
    if kind == "bf16":
        return _in_bf16(text)
    if kind == "masters":
        return _with_masters(text)
    if kind == "loss":
        return _divided(text, 2 ** rest[0])
    if kind == "rate":
        return _no_faster(text, rest)
    if kind == "loss_scale":
        return _with_scale(text, 2.0 ** rest[0])
    op, _, line, *amount = rest
    if kind == "epsilon":
        lines = text.splitlines()
        lines[line - 1] = re.sub(r"\b\d+e-\d+\b", f"{amount[0]!r}", lines[line - 1])
        return "\n".join(lines) + "\n"
    if kind == "clamp":
        return _wrapped(text, line, op, "_clamp", amount[0])
    if kind == "scale":
        return _wrapped(text, line, op, "_scaled", amount[0])
    return _wrapped(text, line, op, "_full")
