"""How Sphinx builds the pages: MyST, furo, everything in the folder that it writes."""

project = "halfstep"
author = "halfstep"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "site"]
myst_heading_anchors = 6
html_theme = "furo"
html_title = "halfstep"
html_copy_source = False
html_show_sphinx = False
# Fences in languages that Pygments does not know are shown as text; a test has the index link every page.
suppress_warnings = ["misc.highlighting_failure", "toc.not_included"]
