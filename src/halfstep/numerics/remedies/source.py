"""A script's text and syntax tree, and edits of it: what remedies are written with."""

import ast
import itertools
from collections.abc import Callable
from typing import Any

#: Modules whose functions take a tensor as an argument, where a tensor's methods have it before the dot.
LIBRARIES = ("torch", "F", "functional", "ops", "nn", "linalg", "special")
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


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
        statements = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and is_on(n, line)]
        return min(statements, key=lambda n: (n.end_lineno or 0) - n.lineno, default=None)


def with_edit(text: str, change: Callable[..., None], *arguments: Any) -> str:
    """Return the text with `change(script, *arguments)`."""
    script = Script(text)
    change(script, *arguments)
    return script.text()


def is_on(node: Any, line: int) -> bool:
    """Whether a node stands on a line."""
    return node.lineno <= line <= node.end_lineno


def append(script: Script, operand: ast.expr, after: str, before: str = "") -> None:
    """Insert a method's call, or what else binds as closely, after an expression."""
    plain = isinstance(operand, ATOMS)
    script.around(operand, before + "(" * (not plain), ")" * (not plain) + after)


def set_keyword(script: Script, call: ast.Call, name: str, value: str) -> None:
    """Set a keyword of a call, in place of the value that it has."""
    value_node = next((k.value for k in call.keywords if k.arg == name), None)
    if value_node is not None:
        script.swap(value_node, value)
    elif call.args or call.keywords:
        last = max([*call.args, *call.keywords], key=lambda node: script.span(node)[1])
        script.around(last, "", f", {name}={value}")


def set_keywords(script: Script, code: str) -> None:
    """Set the keywords of a call in `code`, such as `hs.prepare(..., dtype="bf16")`, in all such calls."""
    try:
        template: Any = ast.parse(code, mode="eval").body
    except SyntaxError:
        return
    for call in script.calls(called(template)) if isinstance(template, ast.Call) else ():
        for keyword in template.keywords:
            set_keyword(script, call, str(keyword.arg), ast.unparse(keyword.value).replace("'", '"'))


def called(call: ast.Call) -> str:
    """Return the name of the function or method that is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
