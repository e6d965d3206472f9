"""Draw docs/images/doctor.svg and train.svg, what two commands print: python docs/generate_screens.py.

`python docs/generate_screens.py doctor` draws one. Run it on a quiet machine: the second shows times.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
WIDTH = 112
COMMANDS = {
    "doctor": "halfstep doctor train.py --steps 20",
    "train": "halfstep train text-gpt --level O0,O1,O2 --dtype bf16 --seeds 2",
}


def printed(command: str) -> str:
    """What a command prints, its exit code ignored: the doctor's is 1 where it finds a fault."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH)}
    done = subprocess.run(
        command.split(), cwd=DOCS / "screens", env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout


def drawn(command: str, text: str) -> str:
    """A terminal with the command and its output as an SVG that asks no other host for a font."""
    out = Console(width=WIDTH, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    out.print(Text.from_ansi(f"$ {command}\n{text.rstrip()}"))
    return re.sub(r"@font-face \{.*?\}\s*", "", out.export_svg(title="halfstep"), flags=re.DOTALL)


def main() -> None:
    """Draw what is named, or all."""
    for name in sys.argv[1:] or COMMANDS:
        text = printed(COMMANDS[name])
        (DOCS / "images" / f"{name}.svg").write_text(drawn(COMMANDS[name], text))


if __name__ == "__main__":
    main()
