"""What choosing kernels costs and brings, under each instruction set of this machine. One thread.

With nothing remembered: seconds to measure the whole table of both 16-bit dtypes, seconds that measuring adds
to the first step of each of eight models at O1 in bf16 and in fp16 (each in a process of its own), and probes
run by a second process; then a step of text-gpt at O1 in bf16 over torch.autocast's and over fp32's, and of
digits-cnn at O1 in fp16 over fp32's, in turns, medians of ratios; then microseconds that the choice costs an
op which has one, and an op which has none.

Targets (of issue "any machine"): 10 s for the table, 2 s in a first step, 0 probes in the second process,
text-gpt below 1.00 of torch.autocast, digits-cnn at most 1.35 of fp32, 3 us an op and 0.1 us on ops that the
choice does not touch. Seconds are of this process's own work.

python benchmarks/kernel_choice.py [--settings NAME,... | all] [--rounds N]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import _machine
import _models
import never_slower
import torch
from torch.nn import functional as F

import halfstep as hs
from halfstep.casting import kernel_probes as probes
from halfstep.casting import kernel_runners
from halfstep.casting.kernel_choice import KernelTable, Row
from halfstep.casting.kinds.kind import NATIVE
from halfstep.recipes.registry import recipe_of

SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    **{
        limit: {"ONEDNN_MAX_CPU_ISA": limit}
        for limit in ("AVX512_CORE_AMX", "AVX512_CORE_BF16", "AVX512_CORE")
    },
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}


def step_of(
    recipe_name: str, level: str, dtype: str | None, kernels: str, torchs: bool
) -> Callable[[], None]:
    """A training step of a recipe; with `torchs` under torch.autocast and torch's own optimizer step."""
    recipe = recipe_of(recipe_name)
    model, optimizer = recipe.build(0, level)
    batches = iter(recipe.task().train(0))
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype, kernels=kernels)
    x, y = next(batches)

    def step() -> None:
        region = torch.autocast("cpu", torch.bfloat16) if torchs else amp.autocast()
        with region:
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step()

    return step


def ratios(first: Callable[[], None], second: Callable[[], None], rounds: int) -> float:
    """The median over turns of the time of `first` over that of `second`."""

    def timed(step: Callable[[], None]) -> float:
        start = time.thread_time()
        step()
        return time.thread_time() - start

    for step in (first, second):
        step(), step()
    return statistics.median(timed(first) / timed(second) for _ in range(rounds))


def per_op() -> dict[str, float]:
    """Microseconds that choosing adds to an op after its first use, and to ops without a choice.

    Beside each other: our region with every choice made (native), the same region without choosing, none.
    """
    x, w = torch.randn(8, 8, dtype=torch.bfloat16), torch.randn(8, 8, dtype=torch.bfloat16)

    def region() -> hs.autocast:
        return hs.autocast("cpu", "bf16", kernels=KernelTable([Row(NATIVE)]))

    with mock.patch.object(kernel_runners, "chosen", lambda *given: given[4]):
        without = region()
    regions: dict[str, AbstractContextManager[object]] = {
        "chosen": region(),
        "without": without,
        "none": contextlib.nullcontext(),
    }
    ops: dict[str, Callable[[], object]] = {
        "linear": lambda: F.linear(x, w),
        "matmul": lambda: x @ w,
        "add": lambda: x.add(w),
        "relu": lambda: x.relu(),
    }
    best: dict[tuple[str, str], float] = {}
    for _ in range(15):
        for label, entered in regions.items():
            with entered, torch.no_grad():
                for name, op in ops.items():
                    start = time.thread_time()
                    for _ in range(1000):
                        op()
                    taken = (time.thread_time() - start) * 1e3
                    best[name, label] = min(best.get((name, label), float("inf")), taken)
    told = {f"{n}, us": round(best[n, "chosen"] - best[n, "without"], 2) for n in ("linear", "matmul")}
    untouched = {f"untouched {n}, us": round(best[n, "chosen"] - best[n, "none"], 2) for n in ("add", "relu")}
    return told | untouched


def first_step(name: str, dtype: str) -> dict[str, float]:
    """Seconds that measuring takes of the first step of a model at O1, with nothing remembered."""
    spent = 0.0

    def timed(*args: Any) -> Any:
        nonlocal spent
        start = time.process_time()
        found = run_probe(*args)
        spent += time.process_time() - start
        return found

    run_probe = probes.measurements._run
    probes.measurements._run = timed
    torch.set_num_threads(1)
    step = never_slower.runner(_models.CASES[name], f"O1 {dtype}")
    start = time.process_time()
    step()
    return {"measuring": round(spent, 2), "all": round(time.process_time() - start, 2)}


def run(rounds: int) -> dict[str, object]:
    """All figures of this process's instruction set."""
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        fresh = probes.Measurements(lambda: Path(folder) / "kernels.json")
        table = KernelTable((), fresh.times, fresh.overhead)
        start, wall = time.process_time(), time.perf_counter()
        rows = [probes.whole_table(table, dtype) for dtype in (torch.bfloat16, torch.float16)]
        found["whole table, s of processor"] = round(time.process_time() - start, 2)
        found["whole table, s"] = round(time.perf_counter() - wall, 2)
        found["rows"] = len(rows[-1])
    ours, native = (step_of("text-gpt", "O1", "bf16", k, False) for k in ("measured", "native"))
    torchs, fp32 = (
        step_of("text-gpt", "O0", None, "native", True),
        step_of("text-gpt", "O0", None, "native", False),
    )
    found["text-gpt O1 bf16 / torch.autocast"] = round(ratios(ours, torchs, rounds), 3)
    found["text-gpt O1 bf16 / fp32"] = round(ratios(ours, fp32, rounds), 3)
    found["text-gpt O1 bf16 native kernels / fp32"] = round(ratios(native, fp32, rounds), 3)
    ours, fp32 = (
        step_of("digits-cnn", "O1", "fp16", "measured", False),
        step_of("digits-cnn", "O0", None, "native", False),
    )
    found["digits-cnn O1 fp16 / fp32"] = round(ratios(ours, fp32, 4 * rounds), 3)
    return found | per_op()


def measure(setting: str, rounds: int) -> dict[str, object]:
    """All figures of one instruction set, each in processes of their own that remember nothing."""
    environment = {**os.environ, **SETTINGS[setting], "OMP_NUM_THREADS": "1"}
    environment.pop("HALFSTEP_KERNELS", None)

    def worker(cache: str, *words: str) -> Any:
        command = [sys.executable, __file__, *words]
        done = subprocess.run(
            command, env={**environment, "XDG_CACHE_HOME": cache}, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    firsts: dict[str, Any] = {}
    for name in _models.CASES:
        for dtype in ("bf16", "fp16"):
            with tempfile.TemporaryDirectory() as cache:
                firsts[f"{name} {dtype}"] = worker(cache, "--first", name, dtype)
                second = worker(cache, "--first", name, dtype) if name == "digits-cnn" else None
            if second is not None:
                firsts[f"{name} {dtype}, second process"] = second
    with tempfile.TemporaryDirectory() as cache:
        found = worker(cache, "--worker", "--rounds", str(rounds))
        found["probes of a second process"] = worker(cache, "--second")
    longest = max(firsts, key=lambda label: firsts[label]["measuring"])
    told = {"most that measuring adds to a first step, s": firsts[longest]["measuring"], "which": longest}
    return {**told, **found, "first steps, s": firsts}


def main() -> None:
    """Run once in each setting, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", default="as it is", help=f"some of {', '.join(SETTINGS)}; or all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--second", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.first:
        print(json.dumps(first_step(*given.first)))
    elif given.second:
        torch.set_num_threads(1)
        step_of("digits-cnn", "O1", "fp16", "measured", False)()
        print(probes.measurements.probes)
    elif given.worker:
        print(json.dumps(run(given.rounds)))
    else:
        file = _machine.result("kernel_choice")
        results: dict[str, object] = json.loads(file.read_text()) if file.exists() else {}
        for name in SETTINGS if given.settings == "all" else given.settings.split(","):
            results[name] = found = measure(name, given.rounds)
            print(name, json.dumps(found, indent=1), flush=True)
            file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
