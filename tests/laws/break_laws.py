"""Break each law once and demand that its tests see it.

Each `breakages/*.toml` row names a file of the package (and the function in it, `file.py::Class.method`), an
expression there, and a replacement that violates a law.
The package is copied, the row applied to the copy, and the row's tests are run against it: they must fail.

    python tests/laws/break_laws.py [breakages/scaling.toml ...] [--jobs 2]
"""

import argparse
import ast
import multiprocessing
import os
import queue
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "tests" / "laws" / "breakages"
CONTEXT = multiprocessing.get_context("forkserver")


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


def run_tests(tests: list[str], env: dict[str, str], said: Path) -> None:
    """In a process of its own, forked with the slow imports done: pytest with the copy of the package."""
    os.environ.update(env)
    numba.core.config.reload_config()
    sys.path.insert(0, env["PYTHONPATH"])
    with said.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    options = ["-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(pytest.main([*options, *tests]))


def run_broken(row: dict, folder: Path) -> str:
    """An empty string if the tests saw the breakage, else what is wrong with the row or its tests.

    In `folder` lie the copy and, for the next row, its compiled kernels. These do not notice that a function
    which they call has changed: a row about kernels compiles its own.
    """
    shutil.rmtree(folder / "src", ignore_errors=True)
    shutil.rmtree(folder / "broken_kernels", ignore_errors=True)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    name, _, function = row["file"].partition("::")
    before, text, after = around((folder / name).read_text(), function)
    if text.count(row["find"]) != 1:
        return f"`find` occurs {text.count(row['find'])} times in {row['file']}, expected once"
    (folder / name).write_text(before + text.replace(row["find"], row["replace"]) + after)
    kernels = "broken_kernels" if "/kernels/cpu/" in name else "kernels"
    env = {"PYTHONPATH": str(folder / "src"), "NUMBA_CACHE_DIR": str(folder / kernels)}
    child = CONTEXT.Process(target=run_tests, args=(row["tests"], env, folder / "said"))
    child.start()
    child.join(timeout=900)
    if child.exitcode is None:
        child.kill()
        return "the tests took more than 900 seconds with the law broken"
    said = (folder / "said").read_text()
    if child.exitcode == 1 and re.search(r"^(FAILED|ERROR) ", said, re.MULTILINE):
        return ""
    outcome = "passed" if child.exitcode == 0 else f"ended with code {child.exitcode}"
    return f"the tests {outcome} with the law broken\n{said[-2000:]}"


def run_all(rows: list[dict], jobs: int) -> Iterator[str]:
    """`run_broken` of each row in order, several at a time."""
    CONTEXT.set_forkserver_preload(["torch._dynamo", "numba", "hypothesis", "pytest"])
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(jobs) as pool:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            free.put(Path(home) / str(job))

        def run(row: dict) -> str:
            folder = free.get()
            try:
                return run_broken(row, folder)
            finally:
                free.put(folder)

        yield from pool.map(run, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    rows = load(arguments.files)
    unseen = 0
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")  # before torch is imported by CONTEXT
    for row, problem in zip(rows, run_all(rows, arguments.jobs)):
        unseen += bool(problem)
        print(
            f"law {row['law']:>2}  {row['id']:<24} {'NOT SEEN: ' + problem if problem else 'seen'}",
            flush=True,
        )
    print(f"{len(rows) - unseen} passed, {unseen} failed")
    return 1 if unseen or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
