"""Remedies that change one op where it stands, found by its source line and name."""

import ast
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.numerics.remedies.base import Met, Remedy
from halfstep.numerics.remedies.source import LIBRARIES, Script, called, is_on, with_edit
from halfstep.numerics.snapshot import StepParticipants
from halfstep.numerics.tape import CallMode, Node, OpLocation, call_site, op_label
from halfstep.policy.op_names import canonical_op
from halfstep.trees import first_device

_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Mult: ("mul", "*"),
    ast.Div: ("div", "/"),
    ast.Add: ("add", "+"),
    ast.Sub: ("sub", "-"),
    ast.MatMult: ("matmul", "@"),
    ast.Pow: ("pow", "**"),
}

Operands = list[ast.expr]
Site = tuple[Any, Operands]
"""An op in a script's text, and its operands."""


class AtLocation(CallMode):
    """Runs one call (by its source line and op name) through `change`; everything else as it is.

    `met`: whether that call was made. Without a file it is every call in a region.
    """

    def __init__(self, op: str, file: str, line: int, change: Callable[..., Any]) -> None:
        super().__init__()
        self._op, self._where, self._change = op, (file, line), change
        self.met = not file

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; the one at the location through `change`."""
        name = getattr(func, "__name__", "")
        if not name.startswith("__get") and op_label(func, name) == self._op:
            in_region = torch.is_autocast_enabled(first_device((args, kwargs)))
            site = call_site()[1:] if self._where[0] else ("", 0 if in_region else -1)
            if site == self._where:
                self.met = True
                return self._change(func, args, kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class OpRemedy(Remedy):
    """A remedy of the op of this name on a line of a file: `call` runs it, `edit_op` writes it."""

    op: str
    file: str
    line: int
    scope = "op"

    @classmethod
    def of(cls, node: Node, text: str, code: str, *values: Any) -> Any:
        """Make the remedy of an op on the tape."""
        return cls(node.op, node.location.file, node.location.line, *values, text=text, code=code)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the function with the change."""
        raise NotImplementedError

    def edit_op(self, script: Script, node: Any, operands: Operands) -> None:
        """Write the change to the op at a node; `operands`: those that it concerns, as far as a text says."""
        raise NotImplementedError

    def edit_around(self, script: Script, location: OpLocation) -> None:
        """Write what is changed around the statement."""

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Run the op through `call`."""
        mode = stack.enter_context(AtLocation(self.op, self.file, self.line, self.call))
        return lambda: mode.met

    def edit(self, text: str, location: OpLocation) -> Iterator[str]:
        """Write the change at each place that may be the op's: to its first operand, to all or the rest."""
        text = with_edit(text, _unfold, self.line)
        some = (slice(1), slice(None), slice(1, None))  # the least that may be it first
        for sites, which in itertools.product(
            _sites(Script(text), self.op, self.line, location.module), some
        ):
            script = Script(text)
            for node, operands in sites:
                tensors = [x for x in operands[which] if not isinstance(x, ast.Constant)]
                self.edit_op(script, node, tensors)
            self.edit_around(script, location)
            yield script.text()


def _sites(script: Script, op: str, line: int, module: str) -> list[list[Site]]:
    """Yield what may be the op on a line: calls of its name, then all; else calls that may run a module."""
    named, modules = list[Site](), list[Site]()
    for node in _inside_out(script.tree):
        if isinstance(node, ast.BinOp) and is_on(node, line):
            if _OPERATORS.get(type(node.op), ("",))[0] == op:
                named.append((node, [node.left, node.right]))
        elif isinstance(node, ast.Call) and is_on(node, line):
            name, owner = called(node), getattr(node.func, "value", None)
            function = owner is None or getattr(owner, "attr", getattr(owner, "id", "")) in LIBRARIES
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
        if isinstance(node, ast.AugAssign) and is_on(node, line) and type(node.op) in _OPERATORS:
            target, value = script.of(node.target), script.of(node.value)
            script.swap(node, f"{target} = {target} {_OPERATORS[type(node.op)][1]} ({value})")
