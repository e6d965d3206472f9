"""What `import halfstep` adds to `import torch`: CPU time, medians (import_time.json).

Run: python benchmarks/import_time.py. In each of several fresh processes torch is
imported first and halfstep timed after it.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from _machine import save

TIMED = """
import time
began = time.process_time()
import torch
torch_done = time.process_time()
import halfstep
print(torch_done - began, time.process_time() - torch_done)
"""
LIMIT_MS = 150


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=9)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    options = parser.parse_args()
    pairs = []
    for _ in range(options.processes + 1):
        done = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True)
        pairs.append([1000 * float(seconds) for seconds in done.stdout.split()])
    torch_ms, halfstep_ms = zip(*pairs[1:])  # the first fills the file cache
    found = {
        "torch_ms": round(statistics.median(torch_ms), 1),
        "halfstep_adds_ms": round(statistics.median(halfstep_ms), 1),
        "most_ms": round(max(halfstep_ms), 1),
        "limit_ms": LIMIT_MS,
    }
    save("import_time", found, options.out, processes=options.processes)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
