"""Texts for users are plain English: none of the phrases that only makers of halfstep understand."""

import ast
import importlib
import inspect
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.test_docs import generator

ROOT = Path(__file__).resolve().parents[2]
TOP = (
    "README",
    "ARCHITECTURE",
    "CONTRIBUTING",
    "CHANGELOG",
    "SECURITY",
    "benchmarks/README",
    "examples/README",
)
PAGES = [*(ROOT / f"{name}.md" for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
DIALECT = re.compile(
    r"\b(in turns?|takes? turns|the peers?|(of|on) one's own|storeys?|doors?|told|on paper|lacks|affair)\b"
    # A ratio is "1.6x faster" or "42 % less memory".
    r"|\b0\.\d+ of (the|its|fp32|torch)\b|\b\d+(\.\d+)? times (as|faster|slower|more|less|torch|fp32)\b",
    re.IGNORECASE,
)
WORDS = 900
SCREEN = 40


def prose(path: Path) -> str:
    """A page without code, comments, tables and headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(), flags=re.DOTALL)
    blocks = [b for b in re.split(r"\n\s*\n", text) if not b.lstrip().startswith(("|", "#", "<"))]
    return "\n\n".join(blocks)


def sentences(text: str) -> Iterator[str]:
    """The sentences of paragraphs and lists."""
    for item in re.split(r"\n\s*[-*] |\n\s*\n", text):
        yield from filter(None, re.split(r"(?<=[.!?:;])\s+", " ".join(item.split())))


def longest(texts: list[str]) -> float:
    """The 95th percentile of words a sentence."""
    lengths = [len(sentence.split()) for text in texts for sentence in sentences(text)]
    return statistics.quantiles(lengths, n=20)[-1]


def literals(path: Path) -> Iterator[str]:
    """The strings of a file that are neither docstrings nor single words: errors, warnings, reports."""
    tree = ast.parse(path.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in bare
        ):
            yield node.value


def docstrings() -> Iterator[tuple[str, str]]:
    """The whole docstring of each public name and of each of its public methods."""
    api = generator("generate_api")
    for module_name in ("halfstep", *api.MODULES):
        for name, thing in api.public(importlib.import_module(module_name)):
            if inspect.isclass(thing) or inspect.isroutine(thing):
                yield f"{module_name}.{name}", api.own_doc(thing)
            for member, function in api.members(thing) if inspect.isclass(thing) else ():
                yield f"{module_name}.{name}.{member}", function.__doc__ or ""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_plain_english(path):
    assert [found.group() for found in DIALECT.finditer(path.read_text())] == []


def test_messages_and_reports_are_plain_english():
    files = [*sorted((ROOT / "src").rglob("*.py"))]
    found = {
        (str(p.relative_to(ROOT)), m.group()) for p in files for s in literals(p) for m in DIALECT.finditer(s)
    }
    templates = (p for kind in ("html", "js") for p in (ROOT / "src").rglob(f"*.{kind}"))
    found |= {(p.name, m.group()) for p in templates for m in DIALECT.finditer(p.read_text())}
    assert sorted(found) == []


def test_docstrings_of_public_names_are_plain_english():
    said = dict(docstrings())
    assert len(said) > 300
    assert [(name, m.group()) for name, text in said.items() for m in DIALECT.finditer(text)] == []


@pytest.mark.parametrize("text", ["it takes 0.62 of the time", "1.5 times faster", "as a peer was told"])
def test_the_dialect_is_found(text):
    assert DIALECT.search(text)


def test_sentences_are_short():
    assert longest([prose(path) for path in PAGES]) <= 30
    assert longest([prose(ROOT / "README.md")]) <= 30


def test_sentences_of_messages_are_short():
    messages = [s for p in (ROOT / "src").rglob("*.py") for s in literals(p) if s.count(" ") > 3]
    assert longest(messages) <= 30


def test_the_readme_is_short_and_code_is_on_its_first_screen():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= WORDS
    lines = text.splitlines()
    assert lines.index("```diff") < SCREEN
    assert [line for line in lines if len(line) > 121 and not line.startswith("|")] == []
