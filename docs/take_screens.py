"""Pictures of what a user sees, to be looked at: python docs/take_screens.py [FOLDER]; needs chromium.

Commands in terminals of four widths, and the reports and pages of the site at three widths, light and dark.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
COLUMNS = (60, 80, 100, 120)
WIDTHS = {400: 3000, 1000: 2200, 1920: 1600}
COMMANDS = {
    "help": "halfstep --help",
    "train-help": "halfstep train --help",
    "formats": "halfstep formats 0.1",
    "devices": "halfstep devices cpu",
    "train": "halfstep train digits-mlp --level O0,O1,O2 --dtype bf16,fp16 --steps 20 --seeds 2",
    "tune": "halfstep tune digits-mlp --seconds 5",
    "bench": "halfstep bench step --parameters 1e6 --rounds 3",
    "doctor": "halfstep doctor train.py --steps 20",
    "wrong": "halfstep train digit-mlp",
}
REPORTS = {
    "report-train": "halfstep train digits-mlp,digits-faint --level O0,O1,O2 --dtype bf16,fp16 --steps 60",
    "report-doctor-ill": "halfstep doctor train.py --steps 20",
    "report-doctor-healthy": "halfstep doctor digits-mlp --steps 20",
}
PAGES = ("index", "getting-started", "hardware", "support", "symptoms", "troubleshooting", "api", "search")


def ran(command: str, columns: int) -> str:
    """What a command prints on both streams; the doctor ends with 1 where it finds a fault."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": str(columns)}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command.split(), cwd=DOCS / "screens", env=env, check=False, **both).stdout


def drawn(command: str, text: str, columns: int) -> str:
    """A terminal as a page: lines that are longer than it is wide fold."""
    out = Console(width=columns, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    out.print(Text.from_ansi(f"$ {command}\n{text.rstrip()}", overflow="fold"))
    return re.sub(r"@font-face \{.*?\}\s*", "", out.export_svg(title=f"{columns} columns"), flags=re.DOTALL)


def photograph(page: str, picture: Path, width: int, height: int, dark: bool) -> None:
    """A picture of a page, in a frame, since chromium's own window is never narrower than 500 px."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        style = f"border:0;width:{width}px;height:{height}px;display:block"
        frame.write_text(
            f"<body style='margin:0;background:#777'><iframe src='{page}' style='{style}'></iframe>"
        )
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=4000",
        ]
        flags += [f"--user-data-dir={folder}/browser", f"--window-size={max(width, 500)},{height}"]
        flags += [
            "--allow-file-access-from-files",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        ]
        subprocess.run(
            [browser(), *flags, f"--screenshot={picture}", frame.as_uri()], check=True, capture_output=True
        )


def browser() -> str:
    """The path of chromium; SystemExit where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    return found or sys.exit("no chromium found: install it, for example by apt-get install chromium")


def pages(out: Path) -> Iterator[tuple[str, str]]:
    """The names and addresses of the reports and of the pages of the site."""
    subprocess.run([sys.executable, DOCS / "build.py", out / "site"], check=True)
    for name, command in REPORTS.items():
        ran(f"{command} --report {out.absolute()}/{name}.html", 120)
        yield name, (out / f"{name}.html").absolute().as_uri()
    for name in PAGES:
        asked = "?q=loss+scale" if name == "search" else ""
        yield f"site-{name}", (out / "site" / f"{name}.html").absolute().as_uri() + asked


def main(folder: str = "build/screens") -> None:
    """Write all pictures into `folder`."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    browser()
    for name, command in COMMANDS.items():
        for columns in COLUMNS:
            svg = out / f"{name}-{columns}.svg"
            svg.write_text(drawn(command, ran(command, columns), columns))
            wide, high = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg.read_text())[0])
            photograph(svg.absolute().as_uri(), svg.with_suffix(".png"), int(wide), int(high), dark=False)
    for name, page in pages(out):
        for width, height in WIDTHS.items():
            for dark in (False, True):
                picture = out / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                photograph(page, picture, width, height, dark)


if __name__ == "__main__":
    main(*sys.argv[1:])
