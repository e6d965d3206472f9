"""How large things may be, so that the next one who adds to the house finds it as small as it was."""

import ast
import graphlib
import re

import pytest

from tests.checks import without_checks
from tests.house import PACKAGE, ROOT, count, imports
from tests.laws import break_laws


@pytest.fixture(scope="module")
def house():
    return count()


def test_functions_and_files_are_short(house):
    assert [name for _, without_words, name in house.functions if without_words > 60] == []
    assert [str(one) for one in house.files if one.lines > 800] == []


def test_the_rooms_and_floors_can_be_remembered(house):
    assert len(house.rooms) <= 31
    assert len(house.floors) <= 12
    placed = {room.strip().removeprefix("halfstep.") for floor in house.floors for room in floor.split("|")}
    assert placed == set(house.rooms), "every room stands on a floor of the import contract"


def test_no_file_imports_itself_by_way_of_others():
    graph = imports()
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) == len(graph)


def test_no_file_asks_for_weaker_types():
    asking = [p.name for p in PACKAGE.rglob("*.py") if "# pyright: basic" in p.read_text()]
    assert asking == []


def test_every_test_checks_something():
    assert without_checks() == []


def test_every_breakage_finds_its_place_once():
    lost = []
    for row in break_laws.load([]):
        name, _, function = row["file"].partition("::")
        path = ROOT / name
        text = break_laws.around(path.read_text(), function)[1] if path.exists() else ""
        if text.count(row["find"]) != 1:
            lost.append(f"{row['id']}: {row['file']}")
    assert lost == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_named_in_pages_exist(page):
    named = set(re.findall(r"`([\w./]+\.(?:py|toml|json|md))[:`]", (ROOT / page).read_text()))
    assert len(named) > 4
    homes = [ROOT, PACKAGE, *(p for p in PACKAGE.iterdir() if p.is_dir())]
    gone = [name for name in named if not any((home / name).exists() for home in homes)]
    assert gone == []


def test_files_named_in_the_source_exist():
    known = {
        path.name for top in ("src", "tests", "docs", "benchmarks") for path in (ROOT / top).rglob("*.py")
    }
    pages = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.md")]
    named = {(page.name, n) for page in pages for n in re.findall(r"`[\w/]*?(\w+\.py)\b", page.read_text())}
    assert len(named) > 100
    assert {(page, name) for page, name in named if name not in {*known, "file.py"}} == set()


def calls():
    """Each call in the package, with where it stands."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        inside = {id(n): f"{name}::{f.name}" for f in functions for n in ast.walk(f)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield inside.get(id(node), name), node


def test_one_function_moves_tensors_without_waiting():
    """torch pins the target of a copy to the host that does not wait, so its numbers may not be there yet."""
    moving = {where for where, call in calls() if any(k.arg == "non_blocking" for k in call.keywords)}
    assert moving == {"trees.py::move_to", "devices/transfer.py::send_to_host"}


def test_one_function_warns():
    """It finds the line of the user's program, however deep the call stands: a count of frames goes stale."""
    warning = {
        where for where, call in calls() if ast.unparse(call.func) in ("warnings.warn", "warn_explicit")
    }
    assert warning == {"errors.py::warn"}


MAKERS = {"zeros", "ones", "full", "empty", "arange", "tensor", "rand", "randn", "eye", "linspace"}
AS_USERS_DO = ("compat/", "conformance/", "recipes/")


def test_new_tensors_name_their_device():
    """Without a device they lie where `torch.set_default_device` says, which the model need not."""
    unnamed = [
        f"{where}:{call.lineno}"
        for where, call in calls()
        if isinstance(call.func, ast.Attribute)
        and (ast.unparse(call.func.value), call.func.attr) in {("torch", name) for name in MAKERS}
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
        and not where.startswith(AS_USERS_DO)
    ]
    assert unnamed == []
