"""Keep what an op reads away from the edge of its domain: a divisor of zero, the logarithm of zero."""

import ast
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import FORMATS
from halfstep.numerics.remedies.base import Cure, Evidence, Remedy, where
from halfstep.numerics.remedies.op import Operands, OpRemedy
from halfstep.numerics.remedies.source import Script, append, called, is_on
from halfstep.numerics.tape import op_label
from halfstep.torch_private import pytree

_EDGED = ("div", "log", "sqrt", "rsqrt", "reciprocal", "pow", "log2", "log10", "log1p")


@dataclass(frozen=True)
class KeepFromEdge(OpRemedy):
    """Keep a divisor, or the argument of another op, at `value` or above; `either_sign`: its magnitude."""

    value: float = 0.0
    either_sign: bool = False
    kind = "clamp"
    cases = ("edge", "precision")

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose it of ops with such an edge; only to look at it, where it cannot be written so."""
        node, divides = evidence.node, evidence.node.op == "div"
        if not _may_be_at_edge(evidence):
            return []
        text = f"keep the argument of {node.op} away from the edge of its domain{where(node.location)}"
        if node.op not in _EDGED or (node.op == "pow" and not isinstance(node.args[0], Tensor)):
            return [Cure("advice", text)]
        floats = [t for t in node.tensors() if t.is_floating_point()]
        name = evidence.name_of(floats[-1 if divides else 0] if floats else None)
        least, either = 1e-4 - (node.op == "log1p"), False
        code = f"{name or 'x'}.clamp_min({least:.4g})"
        last_parent = node.parents[-1] if node.parents else None  # what a weight is at one step tells nothing
        if divides and (last_parent is None or bool((node.tensors()[-1] < 0).any())):
            d, either = name or "d", True
            code = f"torch.where({d}.abs() < 1e-4, 1e-4, {d})" + ("" if name else "  # d: what is divided by")
        return [Cure.of(cls.of(node, text, code, least, either))]

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, op, value = list(args), op_label(func, getattr(func, "__name__", "")), self.value
        if op == "div":
            last = max(i for i, x in enumerate(args) if isinstance(x, Tensor))
            small = args[last].abs() < value
            args[last] = (
                torch.where(small, value, args[last]) if self.either_sign else args[last].clamp_min(value)
            )
        elif op != "pow" or not all(isinstance(x, int) and x > 0 for x in args[1:]):
            args[0] = args[0].clamp_min(value)
        return func(*args, **kwargs)

    def edit_op(self, script: Script, node: Any, operands: Operands) -> None:
        divides = isinstance(node, ast.BinOp) or called(node).rstrip("_") in ("div", "divide", "true_divide")
        divisor = [node.right] if isinstance(node, ast.BinOp) else node.args[-1:]
        for operand in divisor if divides else operands[:1]:
            if divides and self.either_sign:
                d = script.of(operand)
                script.swap(operand, f"torch.where(({d}).abs() < {self.value:g}, {self.value:g}, {d})")
            else:
                append(script, operand, f".clamp_min({self.value:g})")


class FunctionOfLogits(Remedy):
    """Replace the logarithm of a softmax or a sigmoid by the one function of the logits that stays finite."""

    cases = ("edge", "precision")

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Look for either among the ops that a logarithm's argument was computed by."""
        node = evidence.node
        if not _may_be_at_edge(evidence):
            return []
        todo = [(p[0], 0) for p in node.parents if p is not None and node.op == "log"]
        while todo:
            maker, far = todo.pop()
            at = where(maker.location)
            if "softmax" in maker.base:
                text = f"take log_softmax of the logits in place of the log of a softmax{at}"
                return [Cure("advice", text, "torch.log_softmax(logits, dim=-1)")]
            if maker.base.startswith("sigmoid"):
                text = f"take logsigmoid of the logits in place of the log of a sigmoid{at}"
                return [Cure("advice", text, "nn.functional.logsigmoid(logits)  # of -logits for 1 - p")]
            if far < 4 and maker.base not in ("mm", "addmm", "bmm"):
                todo += [(p[0], far + 1) for p in maker.parents if p is not None]
        return []


@dataclass(frozen=True)
class LargerEpsilon(OpRemedy):
    """Raise positive constants below `value`."""

    value: float = 0.0
    kind = "epsilon"
    cases = ("precision",)
    edit = Remedy.edit

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose it where the cause names such a constant."""
        cause, culprit = evidence.cause, evidence.culprit or evidence.node
        if cause.scalar is None:
            return []
        value = FORMATS[cause.format].smallest_normal
        text = f"use an epsilon that {cause.format} can hold ({value:.2g}){where(culprit.location)}"
        return [Cure.of(cls.of(culprit, text, f"eps = {value:.2g}", value))]

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        def lift(x: Any) -> Any:
            return self.value if isinstance(x, float) and 0 < abs(x) < self.value else x

        args, kwargs = pytree.tree_map(lift, (args, kwargs))
        return func(*args, **kwargs)

    def edit_script(self, script: Script) -> None:
        for node in ast.walk(script.tree):
            number = node.value if isinstance(node, ast.Constant) and is_on(node, self.line) else None
            if isinstance(number, float) and 0 < number < self.value:
                script.swap(node, f"{self.value:.2g}")


def _may_be_at_edge(evidence: Evidence) -> bool:
    """Whether the op was at the edge of its domain, or lost bits can have brought it there."""
    ops = ("log", "div", "sqrt", "rsqrt", "reciprocal")
    node = evidence.node
    return evidence.case == "edge" or (node.op in ops and node.phase == "forward")
