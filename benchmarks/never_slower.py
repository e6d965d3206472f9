"""Eight models: is mixed precision ever slower here? One thread, steps in turns, medians of ratios.

Each model is trained in plain fp32 and under `torch.autocast` (bf16 and fp16) with torch's optimizer, at O0,
O1 and O2 with halfstep's, with torch's own kernels and with the measured ones, and at `level="auto"`. All
take one step each a turn, in an order that changes, in the process's own processor time. What takes too long
is stopped and said: a step of torch.autocast in fp16 runs in a process of its own, since nothing can end it
from within.

Targets (of issue "any machine"): O1 bf16 with measured kernels at most 1.02 of torch.autocast on each model,
geometric mean at most 0.86; fp16 O1 at most 1.35 of fp32 on each; `level="auto"` at most 1.02 of the best
fixed level on each, geometric mean at most 0.87 of it where there is AMX, and at most 0.77 of torch.autocast.

python benchmarks/never_slower.py [--models NAME,...] [--rounds N] [--seconds N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _machine
import _models as models
import torch
from torch import Tensor

import halfstep as hs

Step = Callable[[], object]

FIXED = ("O0", "O1 bf16", "O2 bf16")
OURS = (*FIXED, "O1 bf16 native", "O2 bf16 native", "O1 fp16")
PEERS = ("fp32", "autocast bf16", "autocast fp16")

#: What takes more than this share of fp32's step is timed a few times only.
SLOW = 8.0


class TorchsOwn:
    """Plain torch behind the three methods that a case's step calls."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)

    def autocast(self) -> AbstractContextManager[Any]:
        """`torch.autocast`, or nothing in fp32."""
        return torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Backward of the scaled loss."""
        if optimizer is not None:
            optimizer.zero_grad()
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update and drop the gradients."""
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


def dtype_of(label: str) -> torch.dtype | None:
    """bf16 or fp16 where the label names it."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(label.split()[1] if " " in label else "")


def runner(case: models.Case, label: str, plan: hs.Plan | None = None) -> Step:
    """One step of a case under a setting, on a model of its own."""
    made, optimizers, batch = models.build(case, ours=label not in PEERS)
    if label in PEERS:
        amp: Any = TorchsOwn(dtype_of(label))
    elif plan is not None:
        amp = hs.prepare(made, optimizers, plan=plan)
    else:
        level, *words = label.split()
        kernels = {"kernels": "native"} if "native" in words else {}
        amp = hs.prepare(made, optimizers, level=level, dtype=words[0] if words else None, **kernels)
    return lambda: case.step(amp, made, optimizers, batch)


def timed(step: Step) -> float:
    """Processor seconds of one step."""
    started = time.process_time()
    step()
    return time.process_time() - started


@dataclass
class Found:
    """A model: medians by setting of seconds and of ratios to fp32's step of the same turn, and the rest.

    `stopped` says why a setting has no time, `noise` how far a second fp32 model was from the first.
    """

    seconds: dict[str, float]
    of_fp32: dict[str, float]
    stopped: dict[str, str]
    first_step: dict[str, float]
    noise: float
    choice: str = ""
    reason: str = ""
    tuned_in: float = 0.0


def tuned(case: models.Case, seconds: float) -> hs.Tuning:
    """What `hs.tune` chooses for a case."""
    made, optimizers, batch = models.build(case, ours=True)

    def step(amp: hs.Session, *parts: Tensor) -> Tensor:
        return case.step(amp, made, optimizers, parts)

    return hs.tune(made, optimizers, step, *batch, seconds=seconds)


def _alone(name: str, label: str, queue: Any) -> None:
    torch.set_num_threads(1)
    hs.devices.keep_freed_memory()
    step = runner(models.CASES[name], label)
    try:
        step()
        step()
    except RuntimeError as error:
        queue.put(str(error).splitlines()[0])
    else:
        queue.put(None)


def stopped(case: models.Case, label: str, limit: float) -> str | None:
    """Why a setting is not timed: one step of it, in a process of its own, is not done within `limit`."""
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    child = context.Process(target=_alone, args=(case.name, label, queue))
    child.start()
    child.join(limit)
    if child.is_alive():
        child.kill()
        child.join()
        return f"stopped: two steps were not done after {limit:.0f} s"
    why = queue.get() if child.exitcode == 0 else f"exit code {child.exitcode}"
    return None if why is None else f"failed: {why}"


def measure(case: models.Case, rounds: int, seconds: float, limit: float) -> Found:
    """Time every setting of a case in turns."""
    ended = {label: why for label in ("autocast fp16",) if (why := stopped(case, label, limit))}
    tuning = tuned(case, seconds)
    steps = {label: runner(case, label) for label in (*PEERS, *OURS) if label not in ended}
    steps["auto"] = runner(case, "auto", tuning.plan)
    steps["fp32 again"] = runner(case, "fp32")
    first = {label: timed(step) for label, step in steps.items()}
    second = {label: timed(step) for label, step in steps.items()}
    slow = {label for label, t in second.items() if t > SLOW * second["fp32"]}
    times: dict[str, list[float]] = {label: [] for label in steps}
    order = list(steps)
    draw = random.Random(0)
    for turn in range(rounds):
        draw.shuffle(order)
        for label in order:
            if label not in slow or turn < 2:
                times[label].append(timed(steps[label]))
    medians = {label: statistics.median(seen) for label, seen in times.items()}
    base = times["fp32"]
    shares = {label: statistics.median(a / b for a, b in zip(seen, base)) for label, seen in times.items()}
    noise = abs(shares.pop("fp32 again") - 1)
    return Found(medians, shares, ended, first, noise, tuning.choice.label, tuning.reason, tuning.seconds)


def ratio(found: Found, one: str, other: str) -> float | None:
    """Time of one setting over another's."""
    a, b = found.of_fp32.get(one), found.of_fp32.get(other)
    return None if a is None or b is None else a / b


def best_fixed(found: Found) -> str:
    """The fastest of O0, O1 and O2."""
    return min(FIXED, key=lambda label: found.of_fp32[label])


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def verdicts(found: dict[str, Found], amx: bool) -> list[dict[str, object]]:
    """Each target beside what was seen: the worst model, or the geometric mean."""
    rows: list[dict[str, object]] = []

    def add(what: str, values: dict[str, float | None], limit: float, kind: str) -> None:
        known = {name: v for name, v in values.items() if v is not None}
        if not known:
            return
        worst = max(known, key=lambda name: known[name])
        seen = mean(list(known.values())) if kind == "mean" else known[worst]
        row = {"what": what, "of": kind if kind == "mean" else f"worst, {worst}", "seen": round(seen, 3)}
        rows.append(row | {"target": limit, "passed": seen <= limit})

    against = {n: ratio(f, "O1 bf16", "autocast bf16") for n, f in found.items()}
    add("O1 bf16 measured / torch.autocast bf16", against, 1.02, "each")
    add("O1 bf16 measured / torch.autocast bf16", against, 0.86, "mean")
    add("O1 fp16 / fp32", {n: ratio(f, "O1 fp16", "fp32") for n, f in found.items()}, 1.35, "each")
    best = {n: ratio(f, "auto", best_fixed(f)) for n, f in found.items()}
    add("auto / best fixed level", best, 1.02, "each")
    if amx:
        add("auto / best fixed level", best, 0.87, "mean")
    autocast = {n: ratio(f, "auto", "autocast bf16") for n, f in found.items()}
    add("auto / torch.autocast bf16", autocast, 0.77, "mean")
    return rows


def show(name: str, found: Found) -> None:
    """Print a model's row."""
    cells = " ".join(f"{label} {t * 1e3:.4g}" for label, t in found.seconds.items())
    print(f"{name}: {cells} ms (noise {found.noise:.1%})", flush=True)
    print(f"  auto: {found.reason} (measured for {found.tuned_in:.0f} s)")
    for label, why in found.stopped.items():
        print(f"  {label} {why}")


def earlier(path: Path) -> dict[str, Found]:
    """The models of a result file, to which others are added; none where there is no such file."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())["models"]
    return {name: Found(**{k: v for k, v in row.items() if k != "best_fixed"}) for name, row in kept.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(models.CASES), help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each setting that are timed")
    parser.add_argument("--seconds", type=float, default=60.0, help="that level auto may measure")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for two steps of a hopeless peer")
    parser.add_argument("--update", action="store_true", help="keep the other models of the result file")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = hs.devices.keep_freed_memory()  # for all sides: else page faults drown what is compared
    out = options.out or _machine.result("never_slower")
    found = earlier(out) if options.update else {}
    for name in options.models.split(","):
        found[name] = measure(models.CASES[name], options.rounds, options.seconds, options.limit)
        show(name, found[name])
    rows = verdicts(found, _machine.instruction_set() == "amx")
    for row in rows:
        verdict = "pass" if row["passed"] else "FAIL"
        print(f"{row['what']:42} {row['of']:22} {row['seen']:6} <= {row['target']:5}  {verdict}")
    document = {"models": {n: vars(f) | {"best_fixed": best_fixed(f)} for n, f in found.items()}}
    _machine.save("never_slower", document | {"targets": rows}, out, freed_memory_kept=kept)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
