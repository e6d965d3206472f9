"""The site builds offline without a warning; each public name has an anchor, each argument a text."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import halfstep as hs
from tests.documents.test_docs import generator

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


DOCUMENTED = [hs.prepare, hs.GradScaler, hs.autocast, hs.Trainer]
DOCUMENTED += [
    hs.optim.AdamW,
    hs.optim.Adam,
    hs.optim.SGD,
    hs.optim.Lion,
    hs.optim.Muon,
    hs.optim.MasterWeights,
]


@pytest.mark.parametrize("thing", DOCUMENTED, ids=lambda thing: thing.__name__)
def test_every_argument_is_explained_on_the_api_page(thing):
    page = (DOCS / "api.md").read_text()
    entry = page.partition(f"### `{thing.__name__}`\n")[2].partition("\n### ")[0].partition("\nMembers:")[0]
    explained = dict(re.findall(r"^- `(\w+)`: (.+)$", entry, re.MULTILINE))
    names = {text.partition(":")[0].partition("=")[0].strip("*") for text in parameters(thing)} - {""}
    assert names - set(explained) == set()
    assert [name for name in names if len(explained[name].split()) < 2] == []


def parameters(thing):
    return generator("generate_api").parameters_text(thing)[0]


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, str(DOCS / "build.py"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "reports.html").read_text(encoding="utf-8")
    assert "Reading the two reports" in page
    assert f"halfstep {hs.__version__}" in page
    assert (tmp_path / "searchindex.js").exists()
    assert (tmp_path / "llms.txt").exists()
    assert (tmp_path / "install.md").read_text() == (DOCS / "install.md").read_text()
    api = generator("generate_api")
    inventory = InventoryFile.loads((tmp_path / "objects.inv").read_bytes(), uri="")
    known = {name for kind in inventory.data for name in inventory.data[kind] if kind.startswith("py:")}
    wanted = {f"halfstep.{name}" for name in hs.__all__}
    for module_name in api.MODULES:
        module = importlib.import_module(module_name)
        wanted |= {
            f"{module_name}.{n}" for n, thing in api.public(module) if getattr(hs, n, None) is not thing
        }
    assert len(wanted) > 100
    assert wanted - known == set()
    assert "halfstep.Session.step" in known
    written = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert [name for name in wanted if f'id="{name}"' not in written] == []
