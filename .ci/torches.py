"""Run the tests and the README's commands under the oldest torch we support, the pinned and the newest one.

    python .ci/torches.py                   # the three; by hand, and before a release
    python .ci/torches.py 2.14.1 2.15.0     # these

Each torch gets an environment of its own in the folder that HALFSTEP_TORCHES names (default: halfstep/torches
in the user's cache directory), which is kept and used again. Exit 1 if a command fails.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = Path(os.environ.get("HALFSTEP_TORCHES") or CACHE / "halfstep" / "torches")

COMMANDS = {
    "tests": "make --no-print-directory suite BIN={bin}",
    "README and docs": "make --no-print-directory pages BIN={bin}",
    "demo": "{bin}/halfstep train demo --steps 3 --seeds 1",
}
"""What is run under each torch, from the checkout."""


def versions() -> list[str]:
    """The oldest torch that pyproject.toml allows, the pinned one, and whatever the index has."""
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "pins.txt").read_text(), re.MULTILINE)
    return [oldest, pinned, "newest"]


def environment(version: str) -> Path:
    """The folder of commands of an environment with this torch and the pinned rest; it may last minutes."""
    place = FOLDER / version
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
    # Each torch asks for a triton of its own.
    pins = re.sub(r"^(torch|triton)==.*\n", "", (ROOT / "pins.txt").read_text(), flags=re.MULTILINE)
    (place / "pins.txt").write_text(pins)
    torch = ["--upgrade", "torch"] if version == "newest" else [f"torch=={version}"]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--constraint", place / "pins.txt", "--editable", ".[dev]", *torch], cwd=ROOT, check=True
    )
    return python.parent


def run(command: str, bin_folder: Path) -> str:
    """What became of a command, in a few words; the end of its output is printed where it failed."""
    started = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        command.format(bin=bin_folder), shell=True, cwd=ROOT, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout[-20000:], flush=True)
    counted = re.findall(r"\d+ (?:passed|failed|errors?)", (done.stdout.splitlines() or [""])[-1])
    verdict = f"exit {done.returncode}" if done.returncode else "ok"
    return " ".join([verdict, *counted, f"{time.monotonic() - started:.0f} s"])


def main() -> int:
    """Run what was asked for; the exit status."""
    rows = [["torch", *COMMANDS]]
    for version in sys.argv[1:] or versions():
        print(f"torch {version}: installing", flush=True)
        folder = environment(version)
        show = [folder / "python", "-c", "import torch; print(torch.__version__)"]
        rows.append([subprocess.check_output(show, text=True).strip()])
        for name, command in COMMANDS.items():
            rows[-1].append(run(command, folder))
            print(f"torch {rows[-1][0]}: {name}: {rows[-1][-1]}", flush=True)
    widths = [max(map(len, column)) for column in zip(*rows)]
    print("\n" + "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)) for row in rows))
    return int(any(not cell.startswith("ok") for row in rows[1:] for cell in row[1:]))


if __name__ == "__main__":
    sys.exit(main())
