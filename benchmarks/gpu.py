"""What a GPU has to show, the most valuable first; `make gpu` runs it.

    python3 benchmarks/gpu.py [--out FOLDER] [--minutes 9.5] [PART[:SECONDS] ...]
    ncu ... python3 benchmarks/gpu.py --part profiled         # what a profiler looks at

Needs torch with CUDA, numpy and numba, and the package on PYTHONPATH; installs nothing and uses no network.
Each part is a process with a limit of seconds: a crash, a hang or a lost device costs that part alone. Two
files grow as it goes: gpu.json (every row) and gpu.log (all that was printed). A part that does not fit into
what is left of the minutes is left out and named.

Exit: 9 where torch sees no CUDA device; 1 where bits differ, a test fails or a part breaks; else 0. make ends
with 2 after 9 and 1, as after any error, and names the status ("Error 9").
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
NO_DEVICE = "nothing was tested or measured: torch sees no CUDA device here"


class Part(NamedTuple):
    """A function of a module here, the seconds that we expect of it on an H100 (estimates) and its limit."""

    module: str
    function: str
    seconds: int
    limit: int


PARTS = {
    "facts": Part("_gpu_bits", "facts", 15, 40),
    "smoke": Part("_gpu_bits", "smoke", 35, 70),
    "ceilings": Part("_gpu_optimizers", "ceilings", 12, 30),
    "optimizers": Part("_gpu_optimizers", "optimizers", 60, 110),
    "training": Part("_gpu_training", "training", 65, 120),
    "launches": Part("_gpu_training", "launched", 20, 40),
    "bits": Part("_gpu_bits", "bits", 50, 90),
    "tests": Part("_gpu_bits", "tests", 125, 190),
    "compiled": Part("_gpu_training", "compiled", 90, 130),
    "large": Part("_gpu_optimizers", "large", 30, 60),
    "small": Part("_gpu_optimizers", "small", 15, 40),
    "knobs": Part("_gpu_optimizers", "knobs", 45, 70),
    "regions": Part("_gpu_training", "regions", 10, 30),
    "peers": Part("_gpu_optimizers", "peers", 75, 130),
}
EXTRA = {"profiled": Part("_gpu_optimizers", "profiled", 20, 60)}
"""Run by their names only."""


class Report:
    """The two files, rewritten as rows come."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._json, self._log = folder / "gpu.json", (folder / "gpu.log").open("w", buffering=1)
        self.parts: dict[str, dict[str, Any]] = {}
        self.red: list[str] = []

    def note(self, part: str, row: str, value: Any) -> None:
        """Keep a row; `part` and `row` are its place in gpu.json."""
        self.parts.setdefault(part, {})[row] = value
        if isinstance(value, dict) and "error" in value:
            self.red.append(f"{part}: {row}")
        fresh = self._json.with_suffix(".part")
        fresh.write_text(json.dumps(self.parts, indent=1) + "\n")
        fresh.replace(self._json)

    def say(self, text: str) -> None:
        """Print and log."""
        print(text, flush=True)
        self.log(text + "\n")

    def log(self, text: str) -> None:
        """What a part printed besides its rows."""
        self._log.write(text)


def run(report: Report, name: str, part: Part, limit: int) -> int:
    """One part in a process of its own, ended at its limit; its exit status."""
    report.say(f"== {name}: about {part.seconds} s, at most {limit} s")
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, __file__, "--part", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    stop = threading.Timer(limit, lambda: os.killpg(child.pid, signal.SIGKILL))
    stop.start()
    assert child.stdout is not None
    for line in child.stdout:
        if not line.startswith("ROW "):
            report.log(line)
            continue
        row, value = json.loads(line[4:])
        report.note(name, row, value)
        wrong = isinstance(value, dict) and "error" in value
        report.say(f"[{time.monotonic() - began:5.1f} s] {row}: {_short(value['error'] if wrong else value)}")
    code = child.wait()
    stop.cancel()
    seconds = round(time.monotonic() - began, 1)
    ending: dict[str, Any] = {"seconds": seconds, "expected": part.seconds}
    if code:
        ending["error"] = f"stopped after {limit} s" if code == -signal.SIGKILL else f"exit status {code}"
    report.note(name, "the part", ending)
    report.say(f"== {name}: {ending.get('error', 'ended')}, {seconds} s")
    return code


def _short(value: Any) -> str:
    return value[-600:] if isinstance(value, str) else json.dumps(value)[:900]


def asked_for(words: list[str]) -> list[tuple[str, Part, int]]:
    """Parts by name, with their limits, from words such as `tests` and `tests:300`."""
    chosen: list[tuple[str, Part, int]] = []
    for word in words or PARTS:
        name, _, seconds = word.partition(":")
        part = (PARTS | EXTRA).get(name)
        if part is None or (seconds and not seconds.isdecimal()):
            known = ", ".join(PARTS | EXTRA)
            raise SystemExit(f"{word!r}: expected a part, or a part and its seconds (tests:300), of {known}")
        chosen.append((name, part, int(seconds or part.limit)))
    return chosen


def run_all(report: Report, chosen: list[tuple[str, Part, int]], minutes: float) -> int:
    """All that fit into the minutes; stops early where no step of ours runs at all."""
    ends = time.monotonic() + 60 * minutes
    for name, part, limit in chosen:
        left = int(ends - time.monotonic())
        if left < part.seconds:
            report.note(name, "the part", f"left out: {left} s were left, it takes about {part.seconds} s")
            report.say(f"== {name}: left out, {left} s are left and it takes about {part.seconds} s")
            continue
        run(report, name, part, min(limit, left))
        rows = [value for row, value in report.parts[name].items() if row != "the part"]
        if name == "smoke" and all(isinstance(value, dict) and "error" in value for value in rows):
            report.say("no step of halfstep runs on this device: the parts that follow were left out")
            break
    return 1 if report.red else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"parts to run: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="default: build/gpu")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--part", choices=[*PARTS, *EXTRA], help="run one in this process and print its rows")
    arguments = parser.parse_args()
    if arguments.part:
        warnings.simplefilter("ignore")
        part = (PARTS | EXTRA)[arguments.part]
        module = importlib.import_module(part.module)
        if part.module != "_gpu_bits":
            importlib.import_module("_gpu").time_only()
        getattr(module, part.function)()
        return 0
    import torch

    chosen = asked_for(arguments.parts)
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 9
    report = Report(arguments.out)
    report.say(f"about {sum(part.seconds for _, part, _ in chosen)} s, at most {arguments.minutes:g} minutes")
    code = run_all(report, chosen, arguments.minutes)
    report.say(f"gpu.json and gpu.log are in {arguments.out}; {'red: ' if code else 'all well'}")
    for name in report.red:
        report.say(f"  {name}")
    return code


if __name__ == "__main__":
    sys.exit(main())
