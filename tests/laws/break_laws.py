"""Break each law once and demand that its tests see it.

Each `breakages/*.toml` row names a file of the package (and the function in it, `file.py::Class.method`), an
expression there, and a replacement that violates a law.
The package is copied, the row applied to the copy, and the row's tests are run against it: they must fail.

    python tests/laws/break_laws.py [breakages/scaling.toml ...] [--jobs 2]
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "tests" / "laws" / "breakages"


def load(paths: list[Path]) -> list[dict]:
    rows = []
    for path in paths or sorted(ROWS.glob("*.toml")):
        for number, row in enumerate(tomllib.loads(path.read_text())["breakage"], 1):
            rows.append({**row, "id": f"{path.stem}#{number}"})
    return rows


def around(text: str, function: str) -> tuple[str, str, str]:
    """What is before a function ("name" or "Class.name"), its text, what follows; "" is the whole file."""
    body = ast.parse(text).body
    node = None
    for part in function.split(".") if function else ():
        node = next((n for n in body if getattr(n, "name", None) == part), None)
        if node is None:
            return text, "", ""
        body = node.body
    if node is None:
        return "", text, ""
    lines = text.splitlines(keepends=True)
    first, last = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1, node.end_lineno
    return "".join(lines[:first]), "".join(lines[first:last]), "".join(lines[last:])


def run_broken(row: dict) -> str:
    """An empty string if the tests saw the breakage, else what is wrong with the row or its tests."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        name, _, function = row["file"].partition("::")
        target = Path(folder) / name
        before, text, after = around(target.read_text(), function)
        if text.count(row["find"]) != 1:
            return f"`find` occurs {text.count(row['find'])} times in {row['file']}, expected once"
        target.write_text(before + text.replace(row["find"], row["replace"]) + after)
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *row["tests"]]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode == 1 and re.search(r"^(FAILED|ERROR) ", done.stdout, re.MULTILINE):
        return ""
    outcome = "passed" if done.returncode == 0 else f"ended with code {done.returncode}"
    return f"the tests {outcome} with the law broken\n{done.stdout[-1500:]}{done.stderr[-500:]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    rows = load(arguments.files)
    unseen = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row, problem in zip(rows, pool.map(run_broken, rows)):
            unseen += bool(problem)
            print(
                f"law {row['law']:>2}  {row['id']:<24} {'NOT SEEN: ' + problem if problem else 'seen'}",
                flush=True,
            )
    print(f"{len(rows) - unseen} passed, {unseen} failed")
    return 1 if unseen or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
