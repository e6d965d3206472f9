"""The documents: generated pages are up to date, links resolve, every page is reached from the index."""

import importlib.util
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

import halfstep as hs
from halfstep.formats import FORMATS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")])
LINKING = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "examples" / "README.md", *PAGES]


def generator(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def short(path):
    return str(path.relative_to(ROOT))


def prose(path):
    """A page without its code, in which brackets are no links."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def links(path):
    return [unquote(target) for target in re.findall(r"\]\(([^)\s]+)\)", prose(path))]


def anchors(path):
    """Link targets of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.replace("`", "")).strip().lower().replace(" ", "-") for h in headings}


def broken(path):
    for target in links(path):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            yield f"{target}: no such file"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            yield f"{target}: no such heading"


def test_the_api_page_is_up_to_date():
    assert (DOCS / "api.md").read_text(encoding="utf-8") == generator("generate_api").page(), (
        "run: python docs/generate_api.py"
    )


def counted(billions):
    assert generator("generate_memory").table(billions) in (DOCS / "memory.md").read_text(encoding="utf-8"), (
        "run: python docs/generate_memory.py"
    )


def test_the_memory_page_is_up_to_date():
    counted(7)


@pytest.mark.exhaustive
def test_the_whole_memory_page_is_up_to_date():
    assert (DOCS / "memory.md").read_text(encoding="utf-8") == generator("generate_memory").page()


def test_the_api_page_has_every_public_name():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert [name for name in hs.__all__ if not re.search(rf"^### `{name}\b", text, re.MULTILINE)] == []


@pytest.mark.parametrize("name", ["formats.svg", "step.svg", "memory.svg"])
def test_the_images_are_up_to_date(name):
    draw = generator("generate_images").PICTURES[name]
    assert (DOCS / "images" / name).read_text(encoding="utf-8") == draw(), "python docs/generate_images.py"


@pytest.mark.parametrize(
    ("name", "exponent", "mantissa"),
    [("fp32", 8, 23), ("tf32", 8, 10), ("bf16", 8, 7), ("fp16", 5, 10), ("e4m3fn", 4, 3), ("e5m2", 5, 2)],
)
def test_the_drawing_has_a_cell_for_every_bit(name, exponent, mantissa):
    images = generator("generate_images")
    cells = re.findall(r'fill="(#\w+)" stroke="#555"', "\n".join(images.bit_row(FORMATS[name], 0)))
    fills = images.FILLS
    assert cells == [fills["sign"]] + [fills["exponent"]] * exponent + [fills["mantissa"]] * mantissa


@pytest.mark.parametrize("path", LINKING, ids=short)
def test_links_resolve(path):
    assert list(broken(path)) == []


def test_a_link_to_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](#here) [b](#there) [c](none.md) `[d](x.md)`\n```\n[e](y.md)\n```\n")
    assert list(broken(page)) == ["#there: no such heading", "none.md: no such file"]


def test_the_index_reaches_every_page():
    reached, todo = set(), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix not in (".md", ".ipynb") or not page.exists():
            continue
        reached.add(page)
        todo += [(page.parent / target.partition("#")[0]).resolve() for target in links(page)]
    assert [short(page) for page in PAGES if page not in reached] == []


def saved_text(notebook):
    streams = (out for cell in notebook["cells"] for out in cell.get("outputs", []) if "text" in out)
    return "".join(line for out in streams for line in out["text"])


def test_the_notebook_runs_as_it_was_saved():
    saved = json.loads((DOCS / "first-steps.ipynb").read_text(encoding="utf-8"))
    again = generator("run_notebook").execute(saved)
    outputs = [cell["outputs"] for cell in again["cells"] if cell["cell_type"] == "code"]
    kinds = [[out["output_type"] for out in cell] for cell in outputs]
    before = [cell["outputs"] for cell in saved["cells"] if cell["cell_type"] == "code"]
    assert kinds == [[out["output_type"] for out in cell] for cell in before]
    assert ["display_data"] in kinds
    # Timings are not printed; last digits may differ between processors, statements may not.
    for text in (saved_text(saved), saved_text(again)):
        assert "inf                    overflow" in text
        assert (
            "first:  step 1: skipped: gradients hold inf or NaN, grad norm nan, loss scale 16777216" in text
        )
        assert "taken:  step 5: taken, grad norm " in text
        shares = [float(share) for share in re.findall(r"fp16  scale \S+\s+flushed\s+([\d.]+)%", text)]
        assert shares[0] > 50 > shares[1] > shares[2]
        assert min(float(a) for a in re.findall(r"accuracy ([\d.]+)", text)) > 0.9


def test_a_notebook_cell_that_fails_is_named():
    cell = {"cell_type": "code", "id": "broken", "metadata": {}, "source": ["1 / 0"]}
    with pytest.raises(ZeroDivisionError) as caught:
        generator("run_notebook").execute({"cells": [cell]})
    assert caught.value.__notes__ == ["in cell broken of first-steps.ipynb"]


PROGRAMS = re.findall(
    r"^```python\n(.*?)^```", (DOCS / "optimizers.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_of_the_page_on_optimizers_run(program):
    exec(program, {})
