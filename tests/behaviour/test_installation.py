"""What the README's install line brings, and what a missing package is told."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from halfstep.errors import DataError
from halfstep.recipes import data

ROOT = Path(__file__).resolve().parents[2]
MEANT = {"scikit-learn", "numba", "triton"}


def test_the_install_line_brings_what_the_commands_need():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "pip install '.[recipes]'" in (ROOT / "README.md").read_text()
    assert any(requirement.startswith("scikit-learn") for requirement in extras["recipes"])


def test_a_missing_package_is_named_with_a_remedy_that_is_ours_to_give(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="need scikit-learn: pip install scikit-learn"):
        data.digits.__wrapped__()  # what is cached needs nothing


def test_no_remedy_names_a_package_that_is_not_meant():
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"pip install ([\w.-]+)", text)}
    assert named == MEANT
