"""Run the code blocks of README.md and docs/: Python in order, one namespace a page; shell line by line."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent


def run_shell(example: Example) -> None:
    """Run a block as a shell would; a command that fails, fails the test."""
    bin_folder = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", example.parsed.replace("examples/", f"{ROOT}/examples/")],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), CodeBlockParser(language="sh", evaluator=run_shell), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
).pytest()
