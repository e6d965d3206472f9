"""The site builds without a warning, offline, and llms.txt names every page."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def build():
    spec = importlib.util.spec_from_file_location("build", DOCS / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_llms_txt_has_a_sentence_for_every_page():
    lines = [line for line in build().llms().splitlines() if line.startswith("- ")]
    assert len(lines) == len(list(DOCS.glob("*.md")))
    assert [line for line in lines if len(line.partition("): ")[2].split()) < 3] == []


@pytest.mark.exhaustive
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, str(DOCS / "build.py"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "reports.html").read_text(encoding="utf-8")
    assert "Reading the two reports" in page
    assert (tmp_path / "searchindex.js").exists()
    assert (tmp_path / "llms.txt").exists()
