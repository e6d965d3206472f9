"""Which tests enter a function of the package; tests that start processes are not followed into them.

python -m tests.index record [PYTEST ARGUMENTS]                         the suite, in about twice its time
python -m tests.index src/halfstep/optim/base.py::OnePassOptimizer.step
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOUND = ROOT / "build" / "index"


class Recorder:
    """A pytest plugin that notes the functions of the package that each test enters."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        entered: dict[int, CodeType] = {}

        def enter(frame: FrameType, event: str, _argument: object) -> None:
            if event == "call":
                entered[id(frame.f_code)] = frame.f_code

        sys.setprofile(enter)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            for code in entered.values():
                if code.co_filename.startswith(f"{ROOT}/src/"):
                    place = f"{os.path.relpath(code.co_filename, ROOT)}::{code.co_qualname}"
                    self.tests.setdefault(place, []).append(item.nodeid)

    def pytest_sessionfinish(self) -> None:
        FOUND.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        (FOUND / f"{worker}.json").write_text(json.dumps(self.tests))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())


def record(arguments: list[str]) -> int:
    """Run the tests and keep what each enters; the exit status of pytest."""
    for old in FOUND.glob("*.json"):
        old.unlink()
    chosen = arguments or ["-n", "2", "-m", "not exhaustive and not long", "tests"]
    return subprocess.run([sys.executable, "-m", "pytest", "-p", "tests.index", *chosen], cwd=ROOT).returncode


def tests_of(function: str) -> list[str]:
    """The tests that enter functions whose place contains `function`."""
    files = [json.loads(path.read_text()) for path in FOUND.glob("*.json")]
    return sorted(
        {test for file in files for place, tests in file.items() if function in place for test in tests}
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        sys.exit(record(sys.argv[2:]))
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if not FOUND.exists():
        sys.exit("No index yet: python -m tests.index record")
    print("\n".join(tests_of(sys.argv[1])) or "no test enters it")
