"""Build the site: python docs/build.py [FOLDER]. Warnings are errors; nothing is fetched.

Beside the pages it writes llms.txt: every page with its first sentence, for readers that are programs. It
copies each page as Markdown too: install.html stands beside install.md.
"""

import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent


def summary(path: Path) -> tuple[str, str]:
    """A page's title and its first sentence."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert title is not None, path
    rest = text[title.end() :]
    plain = (p for p in re.split(r"\n\s*\n", rest) if p.strip() and p.strip()[0] not in "#|-<")
    first = " ".join(next(plain, "").split())
    first = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first)
    end = re.search(r"[.:?](\s|$)", first)
    return title[1], first[: end.start() + 1] if end else first


def llms() -> str:
    """The text of llms.txt."""
    lines = ["# halfstep", "", "> Mixed-precision training for PyTorch: exact, checked and explained.", ""]
    for path in sorted(DOCS.glob("*.md")):
        title, first = summary(path)
        lines.append(f"- [{title}]({path.name}): {first}")
    return "\n".join(lines) + "\n"


def main(out: str = str(DOCS / "_build")) -> int:
    """Build into `out`; 0 where there was nothing to warn of."""
    from sphinx.cmd.build import build_main

    done = build_main(["-W", "--keep-going", "-q", "-b", "html", str(DOCS), out])
    if done == 0:
        (Path(out) / "llms.txt").write_text(llms(), encoding="utf-8")
        for page in DOCS.rglob("*.md"):
            shutil.copyfile(page, Path(out) / page.relative_to(DOCS))
    return done


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
