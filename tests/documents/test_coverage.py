"""docs/coverage.md names a test in every row, and every test that it names is there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "coverage.md"
SUPPORT = TESTS.parent / "docs" / "support.md"
LATER = {"fp8 policy"}


def tables(page=PAGE):
    """The rows of each table as (first, second, last) cells."""
    found, rows = [], []
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            found.append(rows[2:])
            rows = []
    return found


def declared_in(path):
    """The names of the tests of a file, those of classes as Class::test."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return {name for name in names if name.rpartition("::")[2].startswith("test_")}


ROWS = [row for table in tables()[:2] for row in table]


APEX = tables()[2]


def test_apexs_tests_are_all_there_and_those_left_out_need_cuda():
    shown = [row for row in APEX if not row[-1].startswith("CUDA only: ")]
    assert (len(APEX), len(shown)) == (54, 47)
    assert len({row[0] for row in APEX}) == 54


def test_both_tables_are_whole():
    systems, ideas = tables()[:2]
    assert (len(systems), len(ideas)) == (29, 42)
    assert {row[1] for row in ROWS if row[-1] == "comes later"} == LATER


NAMING = [row for row in ROWS if row[1] not in LATER] + [row for row in APEX if "CUDA only" not in row[-1]]
NAMING += tables(SUPPORT)[-1]


@pytest.mark.parametrize("row", NAMING, ids=lambda row: row[-2])
def test_every_row_names_a_test_that_is_there(row):
    named = re.findall(r"`([\w/]+\.py)::([\w:]+)`", row[-1])
    assert named, f"no test named: {row}"
    for path, name in named:
        assert (TESTS / path).is_file(), path
        assert name in declared_in(TESTS / path), f"{path} has no {name}"
