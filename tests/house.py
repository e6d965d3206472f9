"""The package in numbers: lines, functions, classes, files, rooms, floors of the import contract.

python -m tests.house
"""

import ast
import statistics
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "halfstep"


@dataclass
class Big:
    """A file or a class."""

    name: str
    lines: int
    attributes: int = 0

    def __str__(self) -> str:
        return f"{self.name}: {self.lines} lines" + (
            f", {self.attributes} attributes" * bool(self.attributes)
        )


@dataclass
class House:
    """What was counted."""

    lines: int = 0
    functions: list[tuple[int, int, str]] = field(default_factory=list)
    """Lines, lines without the signature and the docstring, name."""
    classes: list[Big] = field(default_factory=list)
    files: list[Big] = field(default_factory=list)
    rooms: list[str] = field(default_factory=list)
    floors: list[str] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return sorted(length for length, _, _ in self.functions)

    def above(self, lines: int, attributes: int) -> list[Big]:
        return [one for one in self.classes if one.lines > lines or one.attributes > attributes]


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What instances hold: fields, and names that methods set on self."""
    found = {
        n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name):
            found |= {n.attr} if n.value.id == "self" else set()
    properties = {n.name for n in node.body if isinstance(n, ast.FunctionDef) and n.decorator_list}
    return found - properties


def count() -> House:
    house = House()
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = str(path.relative_to(PACKAGE)), path.read_text()
        tree, lines = ast.parse(text), len(text.splitlines())
        house.lines += lines
        house.files.append(Big(name, lines))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length, said = node.end_lineno - node.lineno + 1, ast.get_docstring(node) or ""
                counts = node.end_lineno - node.body[0].lineno + 1 - len(said.splitlines())
                house.functions.append((length, counts, f"{name}::{node.name}"))
            if isinstance(node, ast.ClassDef):
                size = node.end_lineno - node.lineno + 1
                house.classes.append(Big(f"{name}::{node.name}", size, len(attributes_of(node))))
    house.rooms = sorted(
        p.stem
        for p in PACKAGE.iterdir()
        if (p.suffix == ".py" and not p.stem.startswith("__")) or (p / "__init__.py").exists()
    )
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    house.floors = contracts[0]["layers"]
    return house


def imports() -> dict[str, set[str]]:
    """What each file of the package imports when it runs, in functions too, but for type checkers."""
    files = {
        ".".join(p.with_suffix("").relative_to(PACKAGE.parent).parts).removesuffix(".__init__"): p
        for p in PACKAGE.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        typing = [
            n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
        ]
        skipped = {id(inner) for one in typing for inner in ast.walk(one)}
        asked = [
            f"{n.module}.{alias.name}" if f"{n.module}.{alias.name}" in files else n.module
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom) and id(n) not in skipped
            for alias in n.names
        ]
        found[name] = {one for one in asked if one in files and one != name}
    return found


def main() -> None:
    house = count()
    lengths = house.lengths
    p95 = lengths[int(0.95 * len(lengths))]
    print(f"{house.lines} lines in {len(house.files)} files")
    print(
        f"{len(lengths)} functions: median {statistics.median(lengths):g}, p95 {p95}, longest {lengths[-1]}"
    )
    print(f"{len(house.rooms)} rooms at the top, {len(house.floors)} floors in the import contract")
    print(f"{len(house.classes)} classes; above 250 lines or 12 attributes:")
    print("\n".join(f"  {one}" for one in house.above(250, 12)))
    print("files above 800 lines:", *(one for one in house.files if one.lines > 800))


if __name__ == "__main__":
    main()
