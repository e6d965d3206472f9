"""Texts for users are plain English: none of the phrases that only makers of halfstep understand."""

import ast
import importlib
import inspect
import re
import statistics
from collections import Counter
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


INSIDE = ROOT / "src" / "halfstep"
BANNED = {
    "settle",
    "tell",
    "told",
    "look",
    "hold",
    "opened",
    "apart",
    "door",
    "ill",
    "spoiled",
    "anew",
    "stood",
}
BANNED_IN_DOCSTRINGS = re.compile(r"\b(settle[sd]?|told|doors?|ill|spoil(s|ed)?|anew|stood)\b|, say\b")
#: Names with one of these words that are left, by package: they may only become fewer.
LEFT = {"kernels": 6, "optim": 2}
IRREGULAR = {"held", "kept", "known", "made", "given", "taken", "seen", "found", "told", "shown", "written"}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Each node of the package, with the place in it; compat's names are those of others."""
    for path in sorted(INSIDE.rglob("*.py")):
        package = path.relative_to(INSIDE).parts[0]
        if package != "compat":
            yield from ((package, node) for node in ast.walk(ast.parse(path.read_text())))


def words_of(node: ast.AST) -> list[str]:
    """The words of the name that a node defines; none for another node."""
    name = ""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.name).lower()
    elif isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        name = node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        name = node.attr
    return name.strip("_").split("_")


def test_names_inside_have_none_of_the_words_that_only_makers_understand():
    counts = Counter(package for package, node in nodes() if BANNED & {*words_of(node)})
    assert {package: n for package, n in counts.items() if n > LEFT.get(package, 0)} == {}


def test_docstrings_inside_have_none_of_them():
    texts = (
        (package, ast.get_docstring(node) or "")
        for package, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    )
    assert [
        (package, m.group()) for package, text in texts for m in BANNED_IN_DOCSTRINGS.finditer(text)
    ] == []


def test_few_functions_are_named_by_a_participle_alone():
    """`joined` names a value; a function is a verb with its object, or a noun."""
    functions = (node for _, node in nodes() if isinstance(node, ast.FunctionDef) and not node.decorator_list)
    alone = [
        f.name for f in functions if re.fullmatch(r"_*[a-z]+ed", f.name) or f.name.strip("_") in IRREGULAR
    ]
    assert len(alone) <= 20, alone
