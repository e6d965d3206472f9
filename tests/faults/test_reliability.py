"""docs/reliability.md is true: every fault of its table is made again and told in the same words."""

import importlib.util
from pathlib import Path

import pytest

from tests.faults.cases import ALONE, alone, over_ranks

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(page):
    lines = page.split("|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines]


PAGE = (DOCS / "reliability.md").read_text(encoding="utf-8")


def told(rows):
    return [[row.fault, row.where, row.told] for row in rows]


@pytest.mark.filterwarnings("ignore:step \\d+. gradients of")
def test_the_faults_of_one_process(tmp_path):
    assert told(alone(tmp_path)) == rows_of(PAGE)[: len(ALONE)]


@pytest.mark.long
def test_the_faults_of_two_ranks(tmp_path):
    assert told(over_ranks(tmp_path)) == rows_of(PAGE)[len(ALONE) :]


def test_the_page_is_what_its_generator_writes():
    spec = importlib.util.spec_from_file_location("generate_reliability", DOCS / "generate_reliability.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.page(rows_of(PAGE)) == PAGE
