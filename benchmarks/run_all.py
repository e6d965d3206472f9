"""Run every benchmark of this folder, one process each; each writes its JSON to results/<machine>/.

python benchmarks/run_all.py [NAME ...]

`against.py`, which wants another checkout, is run by hand, and `gpu.py`, which wants a GPU, by `make gpu`.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="benchmarks to run, without .py (default: all)")
    arguments = parser.parse_args()
    scripts = [p for p in sorted(HERE.glob("[!_]*.py")) if "def main" in p.read_text()]
    known = {p.stem: p for p in scripts if p.stem not in ("run_all", "against", "gpu")}
    unknown = set(arguments.names) - set(known)
    if unknown:
        print(f"unknown benchmark {', '.join(sorted(unknown))}: expected {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    chosen = arguments.names or list(known)
    for name in chosen:
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run([sys.executable, str(known[name])], env=env).returncode
        print(f"== {name}: exit {code} after {time.perf_counter() - start:.0f} s", flush=True)
        failed += [name] * (code != 0)
    print(f"{len(chosen) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
