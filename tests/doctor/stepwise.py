"""A script of the zoo as a function that takes one step, to be traced in place."""

import ast
import contextlib
import random

import numpy
import torch

from halfstep.numerics.trace import trace_step


class _Returns(ast.NodeTransformer):
    """`continue` and `break` of the training loop end the step."""

    def _untouched(self, node):
        return node

    visit_For = visit_While = visit_FunctionDef = _untouched

    def visit_Continue(self, node):
        return ast.copy_location(ast.Return(None), node)

    visit_Break = visit_Continue


def _trains(node):
    return any(
        isinstance(x, ast.Attribute) and x.attr in ("backward", "step", "grad") for x in ast.walk(node)
    )


def training_loops(text):
    """The loops of a script's top level that train, and those within them that take whole steps."""
    loops = [node for node in ast.parse(text).body if isinstance(node, ast.For) and _trains(node)]
    inner = (node for loop in loops for top in loop.body for node in ast.walk(top))
    inner = ((node, ast.unparse(node)) for node in inner if isinstance(node, ast.For))
    return [*loops, *(node for node, text in inner if "backward()" in text and "step()" in text)]


def _as_steps(path):
    """The script's names up to its training loop, with `one_step(item)` and its `items`."""
    tree = ast.parse(path.read_text())
    (loop,) = [node for node in tree.body if isinstance(node, ast.For) and _trains(node)]
    names = {x.id for x in ast.walk(loop) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    item = ast.Assign([loop.target], ast.Name("item", ast.Load()))
    body = [ast.Global(sorted(names)), item, *(_Returns().visit(node) for node in loop.body)]
    arguments = ast.arguments([], [ast.arg("item")], None, [], [], None, [])
    tree.body[tree.body.index(loop) :] = [
        ast.copy_location(ast.FunctionDef("one_step", arguments, body, []), loop),
        ast.copy_location(ast.Assign([ast.Name("items", ast.Store())], loop.iter), loop),
    ]
    space = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), space)
    return space


def first_in_place(path, step):
    """Runs the script's steps in this process; what tracing them from the one before `step` on finds first.

    What is updated after an optimizer's step is part of the next step for the doctor.
    """
    random.seed(0)
    torch.manual_seed(0)
    numpy.random.seed(0)
    space = _as_steps(path)
    for number, item in enumerate(space["items"]):
        if number in (step - 1, step):
            bad = trace_step(space["one_step"], item, underflow=True).bad
            if bad is not None:
                return bad
        with contextlib.suppress(ArithmeticError, RuntimeError, ValueError):
            space["one_step"](item)
    return None
