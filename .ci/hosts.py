"""Run tests/hosts: training loops that others own, with and without our adapters, each case in a process.

    python .ci/hosts.py                     # all; by hand, and before a release
    python .ci/hosts.py lightning O2        # the cases whose names hold all of these words

The hosts have an environment of their own, with the versions of `.ci/hosts.txt`, in the folder that
HALFSTEP_HOSTS names (default: halfstep/hosts in the user's cache directory). Exit 1 if a case fails.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = Path(os.environ.get("HALFSTEP_HOSTS") or CACHE / "halfstep" / "hosts")
PINS = ROOT / ".ci" / "hosts.txt"
TIMM = "timm==1.0.31"
"""Installed without what it asks for: a torchvision would have to be built for this very torch."""
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


def environment() -> Path:
    """The Python of an environment with the pinned hosts; the first time lasts minutes."""
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / "hosts.txt"
    if not stamp.exists() or stamp.read_text() != PINS.read_text():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", PINS], cwd=ROOT, check=True)
        subprocess.run([*pip, "--no-deps", TIMM], check=True)
        stamp.write_text(PINS.read_text())
    return python


def cases(pytest: list[str], words: list[str]) -> list[str]:
    """The names of the cases that hold all words."""
    files = sorted(str(path) for path in (ROOT / "tests" / "hosts").glob("*_cases.py"))
    files.append(str(ROOT / "tests" / "integrations"))
    command = [*pytest, "--collect-only", "-q", "-o", "addopts=", *files]
    found = subprocess.run(command, cwd=ROOT, env=ENV, text=True, capture_output=True)
    names = [line for line in found.stdout.splitlines() if "::" in line]
    if found.returncode:
        raise SystemExit(found.stdout + found.stderr)
    whole = sorted({name.split("::")[0] for name in names if "integrations" in name})
    names = [name for name in names if "integrations" not in name] + whole
    return [name for name in names if all(word in name for word in words)]


def main() -> int:
    """Run the cases; the exit status."""
    pytest = [str(environment()), "-m", "pytest"]
    failed = list[str]()
    for name in cases(pytest, sys.argv[1:]):
        started = time.monotonic()
        done = subprocess.run([*pytest, "-q", name], cwd=ROOT, env=ENV, text=True, capture_output=True)
        if done.returncode:
            failed.append(name)
            print(done.stdout[-8000:])
        verdict = "FAILED" if done.returncode else "ok"
        print(f"{verdict:6} {time.monotonic() - started:4.0f} s  {name}", flush=True)
    print(f"{len(failed)} failed" if failed else "all well")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
