"""Run the two commands under every instruction set this processor can show, and print a table.

    python .ci/machines.py                          # make demo and make test under each setting
    python .ci/machines.py --only AVX2 --quick      # a demo of a few steps and the tests that know kernels

A setting that the processor lacks is left out and said so. Exit 1 if a command fails or takes too long.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SETTINGS = {
    "native": ({}, ()),
    "AVX512_CORE_AMX": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, ("amx_bf16",)),
    "AVX512_CORE_BF16": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, ("avx512_bf16",)),
    "AVX512_CORE": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ("avx512bw",)),
    "AVX2": ({"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, ("avx2",)),
}
"""Name -> the environment that shows it, and the processor flags it needs."""

COMMANDS = {"make demo": 360, "make test": 480}
"""Command -> the seconds it may take on two cores."""

KERNEL_TESTS = "tests/casting tests/devices tests/session"
QUICK = {
    ".venv/bin/halfstep train demo --steps 3 --seeds 1": 240,
    f".venv/bin/python -m pytest -n 2 --dist worksteal -m 'not exhaustive and not long' {KERNEL_TESTS}": 480,
}


def flags() -> set[str]:
    """The processor's flags; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def run(command: str, limit: int, setting: dict[str, str]) -> tuple[str, float]:
    """What became of the command, and its seconds; it is ended at twice its limit."""
    started = time.monotonic()
    # torch's compiled code is kept by processor, which an instruction set that is shown does not change.
    compiled = ROOT / "build" / "compiled" / ("-".join(setting.values()) or "native")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(compiled), **setting}
    if command.startswith("make"):
        del env["OMP_NUM_THREADS"]  # the Makefile decides
    try:
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=env, timeout=2 * limit, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode()[-3000:])
        return f"ended after {2 * limit} s", time.monotonic() - started
    seconds = time.monotonic() - started
    if done.returncode:
        print(done.stdout[-6000:])
        return f"exit {done.returncode}", seconds
    return ("ok" if seconds <= limit else f"over {limit} s"), seconds


def main() -> int:
    """Run what was asked for; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SETTINGS, action="append")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    have = flags()
    rows, bad = [], 0
    for name in arguments.only or SETTINGS:
        setting, needs = SETTINGS[name]
        if missing := [flag for flag in needs if flag not in have]:
            rows.append(f"{name:<18} left out: this processor has no {', '.join(missing)}")
            continue
        for command, limit in (QUICK if arguments.quick else COMMANDS).items():
            verdict, seconds = run(command, limit, setting)
            bad += verdict != "ok"
            rows.append(f"{name:<18} {seconds:6.0f} s of {limit}  {verdict:<16} {command}")
            print(rows[-1], flush=True)
    print("\n".join(["", *rows]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
