"""The front doors in halfstep.compat stay thin: short files that stand on public names alone."""

import ast
from pathlib import Path

import pytest

import halfstep

ROOT = Path(halfstep.__file__).parent
MODULES = sorted(p for p in (ROOT / "compat").rglob("*.py") if p.name != "device_module.py")
"""All doors; `device_module` is what a new device type is brought up with, and registers it with torch."""
MACHINERY = {
    "Function",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "__torch_dispatch__",
    "__torch_function__",
    "_C",
    "custom_op",
    "library",
    "saved_tensors_hooks",
}
"""Names that build autograd functions, dispatch or casting; halfstep has one of each, below compat."""


def module_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def private_imports(tree: ast.AST, package: str) -> list[str]:
    """What the module imports by a private path or name, but for its own package."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            inside = target.startswith("halfstep.compat.") and target.split(".")[2] == package
            # torch has no public way to walk a nest of lists and dicts
            if inside or target.startswith(("__future__", "torch.utils._pytree")):
                continue
            if any(part.startswith("_") for part in target.split(".")):
                found.append(target)
    return found


def machinery(tree: ast.AST) -> list[str]:
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom | ast.Import) for a in n.names}
    return sorted((attributes | defined | imported) & MACHINERY)


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_short(path):
    assert len(path.read_text().splitlines()) <= 800


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_stands_on_public_names(path):
    package = path.relative_to(ROOT / "compat").parts[0].removesuffix(".py")
    assert private_imports(ast.parse(path.read_text()), package) == []


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_builds_no_machinery(path):
    assert machinery(ast.parse(path.read_text())) == []


def test_all_doors_are_looked_at():
    assert {"torch_amp.py", "apex", "mindspore"} <= {p.relative_to(ROOT / "compat").parts[0] for p in MODULES}


@pytest.mark.parametrize(
    ("text", "private", "machine"),
    [
        ("import torch._dynamo", ["torch._dynamo"], []),
        ("from halfstep.casting.casts import _tensors", ["halfstep.casting.casts._tensors"], []),
        ("from halfstep.compat.apex._state import Account", ["halfstep.compat.apex._state.Account"], []),
        ("from halfstep.compat.mindspore._tensor import Tensor", [], []),
        ("class A(torch.autograd.Function): pass", [], ["Function"]),
        ("class A(torch.Tensor):\n    def __torch_function__(self): pass", [], ["__torch_function__"]),
    ],
)
def test_the_checks_see_what_they_forbid(text, private, machine):
    tree = ast.parse(text)
    assert private_imports(tree, "mindspore") == private
    assert machinery(tree) == machine
