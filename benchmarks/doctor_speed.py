"""How long the doctor takes beside the script alone: python benchmarks/doctor_speed.py [COUNT] [ROUNDS].

Scripts of the zoo, each run plain and then examined, in turns; the ratio of wall times for each (the median
of the rounds), their median and the largest. Run it from the root of the repository.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _machine import save
from tests.doctor import zoo_healthy, zoo_quiet, zoo_range, zoo_strange, zoo_taken

SCRIPTS = [
    *zoo_taken.SCRIPTS, *zoo_range.SCRIPTS, *zoo_quiet.SCRIPTS, *zoo_strange.SCRIPTS, *zoo_healthy.SCRIPTS,
]  # fmt: skip


def seconds(command):
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - started


def measured(path, rounds):
    plain, examined, ratios = [], [], []
    for _ in range(rounds):
        plain.append(seconds([sys.executable, str(path)]))
        examined.append(seconds([sys.executable, "-m", "halfstep_command", "doctor", str(path)]))
        ratios.append(examined[-1] / plain[-1])
    return {
        "plain_seconds": statistics.median(plain),
        "examined_seconds": statistics.median(examined),
        "ratio": statistics.median(ratios),
    }


def main(count=1000, rounds=3):
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS[:: max(1, -(-len(SCRIPTS) // count))]:
            path = Path(folder) / f"{script.name}.py"
            path.write_text(script.text)
            rows[script.name] = row = measured(path, rounds)
            print(f"{script.name:40} {row['plain_seconds']:6.2f} s {row['ratio']:5.2f}", flush=True)
    ratios = [row["ratio"] for row in rows.values()]
    summary = {"median": statistics.median(ratios), "largest": max(ratios), "rounds": rounds}
    print(f"median {summary['median']:.2f}, largest {summary['largest']:.2f}")
    save("doctor_speed", {**summary, "rows": rows}, None)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
