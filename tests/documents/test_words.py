"""Texts for users are plain English: none of the phrases that only makers of halfstep understand."""

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
DIALECT = re.compile(
    r"\b(in turns|the peer|(of|on) one's own|storeys?|by the same door|front door|told|on paper)\b"
    r"|\b0\.\d+ of (the|its) (time|memory)",
    re.IGNORECASE,
)


def prose(path: Path) -> str:
    """A page without code, comments, tables and headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(), flags=re.DOTALL)
    blocks = [b for b in re.split(r"\n\s*\n", text) if not b.lstrip().startswith(("|", "#", "<"))]
    return "\n\n".join(blocks)


def literals(path: Path) -> Iterator[str]:
    """The strings of a file that are not docstrings: errors, warnings, reports."""
    tree = ast.parse(path.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.value


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_plain_english(path):
    assert [found.group() for found in DIALECT.finditer(path.read_text())] == []


def test_messages_and_reports_are_plain_english():
    files = sorted((ROOT / "src").rglob("*.py"))
    found = {
        (str(p.relative_to(ROOT)), m.group()) for p in files for s in literals(p) for m in DIALECT.finditer(s)
    }
    found -= {("src/halfstep/report/doctor.py", "told")}  # a name of a field of its page
    assert sorted(found) == []


def test_sentences_are_short():
    lengths = [
        len(sentence.split())
        for path in PAGES
        for item in re.split(r"\n\s*[-*] |\n\n", prose(path))
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(item.split()))
        if sentence
    ]
    assert statistics.quantiles(lengths, n=20)[-1] <= 30
