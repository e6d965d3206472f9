"""How Sphinx builds the pages: MyST, furo, and the API's names in objects.inv."""

import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes

project = "halfstep"
author = "halfstep"
release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
project_copyright = f"the halfstep authors. halfstep {release}"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "site"]
myst_heading_anchors = 6
html_theme = "furo"
html_title = f"halfstep {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
# Fences in languages that Pygments does not know are shown as text; a test has the index link every page.
suppress_warnings = ["misc.highlighting_failure", "toc.not_included"]


def note_names(app: Any, doctree: nodes.document) -> None:
    """Give each name on the API page an anchor of its own and a line in objects.inv."""
    if app.env.docname != "api":
        return
    python, module = app.env.get_domain("py"), ""

    def note(node: Any, name: str, kind: str) -> None:
        if name in python.objects:  # a module stands among the names of the package, and below with its own
            return
        node["ids"].insert(0, name)
        # Methods would stand before the pages in every search: they are in objects.inv alone.
        python.note_object(name, kind, name, aliased=kind == "method", location=node)

    for section in doctree.findall(nodes.section):
        title = section.next_node(nodes.title)
        code = title.next_node(nodes.literal)
        if code is None:
            module = title.astext()
            note(section, module, "module")
            continue
        name = f"{module}.{code.astext()}"
        note(section, name, "class" if code.astext()[0].isupper() else "function")
        for item in section.findall(nodes.list_item):
            member = (
                item.next_node(nodes.literal).astext().partition("(")[0].removeprefix(f"{code.astext()}.")
            )
            heading = item.parent.parent.children[item.parent.parent.index(item.parent) - 1]
            if member.isidentifier() and heading.astext() == "Members:":
                note(item, f"{name}.{member}", "method")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", note_names)
