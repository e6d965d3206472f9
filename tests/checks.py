"""Which tests check nothing: neither they nor any function of the tests that they mention can fail.

python -m tests.checks
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent
#: Calls that check: pytest's, torch's and numpy's, and processes whose failure is an error.
CHECKS = frozenset(
    ["raises", "warns", "fail", "assert_close", "assert_allclose", "gradcheck", "check_call", "check"]
)


@dataclass
class Found:
    """A function of the tests: where, whether it checks something itself, and the names it mentions."""

    place: str
    checks: bool
    names: set[str]


@dataclass
class Functions:
    """All functions of the tests, by name."""

    by_name: dict[str, list[Found]] = field(default_factory=dict)

    def can_fail(self, found: Found, seen: set[str]) -> bool:
        if found.checks:
            return True
        for name in found.names & self.by_name.keys() - seen:
            seen.add(name)
            if any(self.can_fail(one, seen) for one in self.by_name[name]):
                return True
        return False


def functions_of(path: Path) -> Iterator[tuple[str, Found]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = list(ast.walk(node))
            names = {n.id for n in inner if isinstance(n, ast.Name)}
            names |= {n.attr for n in inner if isinstance(n, ast.Attribute)}
            checks = any(isinstance(n, ast.Assert | ast.Raise) for n in inner) or not names.isdisjoint(CHECKS)
            place = f"{path.relative_to(ROOT)}::{node.name}"
            yield node.name, Found(place, checks, names)


def without_checks(root: Path = ROOT) -> list[str]:
    """The tests that cannot fail but by an error."""
    functions, tests = Functions(), []
    for path in sorted(root.rglob("*.py")):
        for name, found in functions_of(path):
            functions.by_name.setdefault(name, []).append(found)
            if name.startswith("test_") and path.name.startswith("test_"):
                tests.append(found)
    return [test.place for test in tests if not functions.can_fail(test, set())]


if __name__ == "__main__":
    print("\n".join(without_checks()) or "every test checks something")
