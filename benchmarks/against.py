"""This checkout beside another (against.json): the rows of step.py, optimizers.py and step_weight_bound.py.

One thread. Each row is built by either checkout's own scripts in a process of its own; the two take turns
of about 50 ms in changing order, in the thread's own processor time. Where a process happens to lie in memory
moves a row by some percent for as long as it lives: so several pairs of fresh processes, each with the median
of its ratios, here / there, and the row is the median of these (`pairs` has them all). Target: at most 1.02.
`--only TEXT` runs the rows with TEXT in their name and leaves the others of the file as they are. Optimizers
run on 20M parameters rather than 50M. A checkout beside itself tells how far to trust it.

    python benchmarks/against.py ../before
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET = 1.02
WARM = 24  # steps: in the first 20 a session looks for changes made past it
RECIPES = ("digits-mlp", "digits-cnn", "text-gpt")
MODES = (("exact", "fp32"), ("exact", "bf16"), ("exact", "8bit"), ("fp32", "fp32"), ("None", "fp32"))
BOUND: dict[str, dict[str, Any]] = {
    "fp32 states": {},
    "fp32 states, clipped": {},
    "fp32 states, optimizer alone": {},
    "bf16 states": {"state_dtype": "bf16"},
    "8-bit states": {"state_dtype": "8bit"},
    "8-bit states, released gradients": {"state_dtype": "8bit", "release_gradients": True},
}
ROWS = (
    *(f"step: {level} {name}{own}" for own in ("", ", torch's optimizer")
      for level, name in [("O1", r) for r in RECIPES] + [("O2", "text-gpt"), ("O2", "mlp 2048")]),
    "step: fp16 linear",
    "step: untouched op",
    *(f"optimizers: {kind} {master} {state}" for master, state in MODES for kind in ("update", "step")),
    *(f"weights: {name}" for name in BOUND),
    *(f"bare AdamW: {count} small tensors" for count in (10, 100, 1000)),
)  # fmt: skip

Step = Callable[[], object]


# ---- in the process of one checkout ------------------------------------------------------------------------


def build(row: str) -> Step:
    """One step of this row, by the scripts of the checkout that the process runs in."""
    import torch

    from halfstep.devices import keep_freed_memory

    torch.set_num_threads(1)
    kind, _, name = row.partition(": ")
    if not kind.startswith("bare"):
        keep_freed_memory()
    return {"step": _step, "optimizers": _optimizer, "weights": _weights}.get(kind, _bare)(name)


def _step(name: str) -> Step:
    import step
    import torch
    from torch.nn import functional as F

    if name == "fp16 linear":
        return step.fp16_linear()[0]
    if name == "untouched op":
        return _untouched
    level, both, name = name[:2], name.endswith("optimizer"), name[3:].partition(",")[0]
    if name in step.RECIPES:
        recipe = step.RECIPES[name]
        batch = next(iter(recipe.task().train(0)))
        return step.steps_of(lambda: recipe.build(0), recipe.loss, batch, level, both)[0]
    wide = torch.randn(64, 2048), torch.randint(0, 10, (64,))
    return step.steps_of(step.wide_mlp, F.cross_entropy, wide, level, both)[0]


def _untouched() -> None:
    import torch

    import halfstep as hs

    x = torch.ones(8)
    with hs.autocast("cpu", "bf16"):
        for _ in range(2000):
            x.neg()


def _optimizer(name: str) -> Step:
    import optimizers
    import torch

    race: Any = getattr(optimizers, "optimizer_race", None) or optimizers.contest  # its name until it moved
    kind, master, state = name.split()
    entry = race.ours(None if master == "None" else master, state)
    params = [torch.nn.Parameter(torch.randn(1, 5_000_000).mul_(0.02).to(entry.dtype)) for _ in range(4)]
    for p in params:
        p.grad = p.detach() * (race.SCALE / 20)
    optimizer = entry.make(params)
    return optimizer.step if kind == "update" else lambda: entry.step(optimizer, params)


def _weights(name: str) -> Step:
    import step_weight_bound as bound

    if "alone" in name:
        return bound.bare_step(**BOUND[name])[0]
    return bound.our_step("clipped" in name, **BOUND[name])[0]


def _bare(name: str) -> Step:
    import torch

    import halfstep as hs

    params = [torch.nn.Parameter(torch.randn(64)) for _ in range(int(name.split()[0]))]
    for p in params:
        p.grad = torch.randn(64)
    return hs.optim.AdamW(params).step


def work(row: str) -> None:
    """Say how long a step takes once warm; then, for every number read, run so many and say it again."""
    warnings.simplefilter("ignore")
    step = build(row)
    until, taken = time.perf_counter() + 1.0, 0
    while taken < WARM or time.perf_counter() < until:
        step()
        taken += 1
    count = 3
    while True:
        began = time.thread_time()
        for _ in range(count):
            step()
        print((time.thread_time() - began) / count, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        count = int(line)


# ---- in between -------------------------------------------------------------------------------------------


def start(tree: Path, row: str) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(tree / "src"), str(tree / "benchmarks")))
    command = [sys.executable, str(Path(__file__).resolve()), "--work", row]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=tree, env=environment)


def ask(process: subprocess.Popen[str], count: int | None = None) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    if count is not None:
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
    return float(process.stdout.readline())


def one_pair(row: str, trees: tuple[Path, Path], rounds: int, turned: bool) -> tuple[float, float, float]:
    """The median ratio over `rounds` turns of two fresh processes, and the median seconds of either."""
    order = (1, 0) if turned else (0, 1)
    processes = {number: start(trees[number], row) for number in order}
    slowest = max(ask(process) for process in processes.values())
    count = max(1, int(0.05 / slowest))
    found: list[tuple[float, float]] = []
    for turn in range(rounds):
        seconds = {number: ask(processes[number], count) for number in (order if turn % 2 else order[::-1])}
        found.append((seconds[0], seconds[1]))
    for process in processes.values():
        process.communicate()
    here, there = (statistics.median(side) for side in zip(*found))
    return statistics.median(a / b for a, b in found), here, there


def compare(row: str, trees: tuple[Path, Path], pairs: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a step in either checkout, and the ratio: medians over `pairs` pairs of processes."""
    found = [one_pair(row, trees, rounds, bool(number % 2)) for number in range(pairs)]
    ratios = sorted(ratio for ratio, _, _ in found)
    value = statistics.median(ratios)
    mine, theirs = (statistics.median(side) * 1e6 for side in list(zip(*found))[1:])
    spread = f"{value:6.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    print(f"{row:45} {spread}   {mine:10.1f} us, there {theirs:10.1f}", flush=True)
    return {
        "name": row,
        "ratio": value,
        "pairs": ratios,
        "rounds": rounds,
        "here_us": mine,
        "there_us": theirs,
        "passed": value <= TARGET,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="the root of another checkout")
    parser.add_argument("--pairs", type=int, default=5, help="of fresh processes for each row")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each pair")
    parser.add_argument("--here", type=Path, default=Path(__file__).resolve().parents[1], help="or another")
    parser.add_argument("--only", default="", help="rows with this text in their name")
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        sys.path.pop(0)  # this folder: the scripts are those of the checkout
        work(options.work)
        return 0
    from _machine import result, save

    if options.other is None:
        parser.error("name the root of another checkout")
    here, there = options.here.resolve(), options.other.resolve()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=there, capture_output=True, text=True
    ).stdout.strip()
    out = options.out or result("against")
    known = {row["name"]: row for row in json.loads(out.read_text())["rows"]} if out.exists() else {}
    for row in ROWS:
        if options.only in row:
            known[row] = compare(row, (here, there), options.pairs, options.rounds)
            rows = [known[name] for name in ROWS if name in known]
            save("against", {"there": commit, "target": TARGET, "rows": rows}, out)
    return 0 if all(row["passed"] for row in known.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
