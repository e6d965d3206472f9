"""Runs a script on the false CUDA device, its child processes too.

`python -m tests.falsecuda SCRIPT.py ...`, `-m module ...` or `-c code ...`: the arguments of Python itself.
"""

import os
import sys

from tests.falsecuda import build, install

if problem := build.missing():
    raise SystemExit(problem)
os.environ |= {"OMP_NUM_THREADS": "1"} | install.environment()
build.library()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
