"""How long the doctor takes beside the script alone: python benchmarks/doctor_speed.py [COUNT].

Scripts of the zoo, each run plain and then examined, in turns; prints the ratio of wall times for each, the
median and the largest.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.doctor import zoo_healthy, zoo_quiet, zoo_range, zoo_taken

SCRIPTS = [*zoo_taken.SCRIPTS, *zoo_range.SCRIPTS, *zoo_quiet.SCRIPTS, *zoo_healthy.SCRIPTS]


def seconds(command):
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - started


def main(count=1000):
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS[:: max(1, len(SCRIPTS) // count)]:
            path = Path(folder) / f"{script.name}.py"
            path.write_text(script.text)
            plain = seconds([sys.executable, str(path)])
            examined = seconds([sys.executable, "-m", "halfstep_command", "doctor", str(path)])
            ratios[script.name] = examined / plain
            print(f"{script.name:40} {plain:6.2f} s {examined:6.2f} s {ratios[script.name]:5.2f}", flush=True)
    print(f"median {statistics.median(ratios.values()):.2f}, largest {max(ratios.values()):.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
