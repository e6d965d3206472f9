"""What choosing kernels costs and brings, under each instruction set of this machine. One thread.

In a fresh folder: seconds to measure the whole table of both 16-bit dtypes, probes run by a second process,
seconds that measuring adds to the first step of two recipes; then a step of text-gpt at O1 in bf16 over
torch.autocast's and over fp32's, and of digits-cnn at O1 in fp16 over fp32's, in turns, medians of ratios;
then microseconds an op that the look-up costs.

Targets (of issue "any machine"): 10 s for the table, 0 probes in the second process, 2 s in a first step,
text-gpt below 1.00 of torch.autocast, digits-cnn at most 1.35 of fp32, 3 us an op.

python benchmarks/kernel_choice.py [--settings NAME,... | all] [--rounds N]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _machine
import torch
from torch.nn import functional as F

import halfstep as hs
from halfstep.autocast import kernel_probes as probes
from halfstep.autocast.kernel_choice import KernelTable, Row
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


def look_up() -> float:
    """Microseconds that a native choice adds to an op."""
    x, w = torch.randn(8, 8, dtype=torch.bfloat16), torch.randn(8, 8, dtype=torch.bfloat16)

    def per_op(kernels: KernelTable | str, table: str) -> float:
        with hs.autocast("cpu", "bf16", kernels=kernels, policy=table), torch.no_grad():
            best = float("inf")
            for _ in range(20):
                start = time.thread_time()
                for _ in range(2000):
                    F.linear(x, w)
                best = min(best, (time.thread_time() - start) / 2000)
        return best * 1e6

    return per_op(KernelTable([Row(probes.NATIVE)]), "halfstep") - per_op("native", "torch")


def run(rounds: int) -> dict[str, object]:
    """All figures of this process's instruction set."""
    torch.set_num_threads(1)
    firsts: list[float] = []
    before = 0
    for name, dtype in (("digits-cnn", "fp16"), ("text-gpt", "bf16")):
        step, before = step_of(name, "O1", dtype, "measured", False), probes.measurements.probes
        start = time.process_time()
        step()
        firsts.append(round(time.process_time() - start, 2))
    found: dict[str, object] = {
        "first step of digits-cnn in fp16, s": firsts[0],
        "first step of text-gpt in bf16, s": firsts[1],
        "probes": probes.measurements.probes,
        "probes of the first": before,
    }
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
    found["look-up, us an op"] = round(look_up(), 2)
    return found


def main() -> None:
    """Run here, or with --all once in each setting, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", default="as it is", help=f"some of {', '.join(SETTINGS)}; or all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--second", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.second:
        torch.set_num_threads(1)
        step_of("digits-cnn", "O1", "fp16", "measured", False)()
        print(probes.measurements.probes)
        return
    if given.worker:
        print(json.dumps(run(given.rounds)))
        return
    file = _machine.result("kernel_choice")
    results: dict[str, object] = json.loads(file.read_text()) if file.exists() else {}
    for name in SETTINGS if given.settings == "all" else given.settings.split(","):
        limits = SETTINGS[name]
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, **limits, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
            environment.pop("HALFSTEP_KERNELS", None)
            command = [sys.executable, __file__, "--worker", "--rounds", str(given.rounds)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            second = subprocess.run(
                [sys.executable, __file__, "--second"], env=environment, capture_output=True, text=True
            )
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        if second.returncode:
            sys.exit(second.stderr)
        found["probes of a second process"] = int(second.stdout)
        results[name] = found
        print(name, json.dumps(found, indent=1), flush=True)
        file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
