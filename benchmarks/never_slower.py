"""Eight models: is mixed precision ever slower here? One thread, steps in turns, medians of ratios.

Each model is trained in plain fp32 and under `torch.autocast` (bf16 and fp16) with torch's optimizer, at O0,
O1 and O2 with halfstep's, with torch's own kernels and with the measured ones, and at `level="auto"`. All
take one step each a turn, in an order that changes, in the process's own processor time; every few turns all
are built anew, since where a model lies in memory costs or saves it some per cent. What takes too long is
stopped and said: a step of torch.autocast in fp16 runs in a process of its own, since nothing can end it from
within.

`noise` is how far a second copy of one setting, timed beside the first, was from it: of fp32, and of the
level that `level="auto"` took where it took a level as it is. There both are one program, and both copies'
steps count for both.

Models are added to the result file as they end, so that they can be taken in separate goes.

Targets (of issue "any machine"): O1 bf16 with measured kernels at most 1.02 of torch.autocast on each model,
geometric mean at most 0.86; fp16 O1 at most 1.35 of fp32 on each; `level="auto"` at most 1.02 of the best
fixed level on each, geometric mean at most 0.87 of it where there is AMX, and at most 0.77 of torch.autocast.

python benchmarks/never_slower.py [--models NAME,...] [--rounds N] [--budget N] [--seconds N] [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
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
OURS = (*FIXED, "O1 bf16 native", "O1 fp16")
PEERS = ("fp32", "autocast bf16", "autocast fp16")

#: What takes more than this share of fp32's step is timed in the first two turns only.
SLOW = 3.0

#: Turns after which all is built anew.
BLOCK = 6


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
    turns: int = 0


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


class Turns:
    """The settings of a case, timed in turns until there were enough of them or the time is spent."""

    def __init__(self, makers: dict[str, Callable[[], Step]], rounds: int, budget: float) -> None:
        self.makers, self.rounds = dict(makers), rounds
        self.until = time.perf_counter() + budget
        self.times: dict[str, list[tuple[int, float]]] = {label: [] for label in makers}
        self.first: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.taken = 0

    def run(self) -> None:
        """Take them all; at least one block of turns."""
        draw = random.Random(0)
        while self.taken < self.rounds and (not self.taken or time.perf_counter() < self.until):
            steps, warm = self._built()
            self.first = self.first or {label: seconds for label, (seconds, _) in warm.items()}
            slow = {label for label, (_, t) in warm.items() if t > SLOW * warm["fp32"][1]}
            for _ in range(min(BLOCK, self.rounds - self.taken)):
                order = [label for label in steps if label not in slow or self.taken < 2]
                draw.shuffle(order)
                for label in order:
                    self.times[label].append((self.taken, timed(steps[label])))
                self.taken += 1
                if time.perf_counter() > self.until and self.taken >= BLOCK:
                    return
            for label in slow:
                del self.makers[label]

    def _built(self) -> tuple[dict[str, Step], dict[str, tuple[float, float]]]:
        """A model of each setting with the seconds of its first two steps; what torch cannot run is noted."""
        steps: dict[str, Step] = {}
        warm: dict[str, tuple[float, float]] = {}
        for label, make in list(self.makers.items()):
            try:
                steps[label] = make()
                warm[label] = timed(steps[label]), timed(steps[label])
            except RuntimeError as error:
                self.failed[label] = f"failed: {str(error).splitlines()[0]}"
                del self.makers[label], self.times[label], steps[label]
        return steps, warm

    def seconds(self) -> dict[str, float]:
        """The median of each setting."""
        return {label: statistics.median(t for _, t in seen) for label, seen in self.times.items()}

    def share(self, label: str, other: str) -> float:
        """The median over turns of one setting's time over the other's."""
        base = dict(self.times[other])
        return statistics.median(t / base[turn] for turn, t in self.times[label] if turn in base)

    def pool(self, one: str, other: str) -> None:
        """Two copies of one program: the steps of both count for both."""
        both = dict(self.times[one]), dict(self.times[other])
        mean = [(turn, (t + both[1][turn]) / 2) for turn, t in both[0].items() if turn in both[1]]
        self.times[one] = self.times[other] = mean


def measure(case: models.Case, rounds: int, budget: float, seconds: float, limit: float) -> Found:
    """Time every setting of a case in turns."""
    ended = {label: why for label in ("autocast fp16",) if (why := stopped(case, label, limit))}
    tuning = tuned(case, seconds)
    labels = [label for label in (*PEERS, *OURS) if label not in ended]
    makers = {label: functools.partial(runner, case, label) for label in labels}
    makers["auto"] = functools.partial(runner, case, "auto", tuning.plan)
    makers["fp32 again"] = functools.partial(runner, case, "fp32")
    turns = Turns(makers, rounds, budget)
    turns.run()
    noise = abs(turns.share("fp32 again", "fp32") - 1)
    if tuning.choice.label in FIXED:
        noise = max(noise, abs(turns.share("auto", tuning.choice.label) - 1))
        turns.pool("auto", tuning.choice.label)
    ended |= turns.failed
    shares = {label: turns.share(label, "fp32") for label in turns.times if label != "fp32 again"}
    choice = tuning.choice.label, tuning.reason, tuning.seconds
    return Found(turns.seconds(), shares, ended, turns.first, noise, *choice, turns.taken)


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
    print(f"{name}: {cells} ms ({found.turns} turns, noise {found.noise:.1%})", flush=True)
    best = best_fixed(found)
    print(f"  auto over the best fixed level, {best}: {ratio(found, 'auto', best):.3f}")
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
    parser.add_argument(
        "--rounds", type=int, default=18, help="steps of each setting that are timed, at most"
    )
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for a model's turns")
    parser.add_argument("--seconds", type=float, default=60.0, help="that level auto may measure")
    parser.add_argument("--limit", type=float, default=12.0, help="seconds for two steps of a hopeless peer")
    parser.add_argument("--fresh", action="store_true", help="forget the other models of the result file")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = hs.devices.keep_freed_memory()  # for all sides: else page faults drown what is compared
    out = options.out or _machine.result("never_slower")
    found = {} if options.fresh else earlier(out)
    rows: list[dict[str, object]] = []
    for name in options.models.split(","):
        case = models.CASES[name]
        found[name] = measure(case, options.rounds, options.budget, options.seconds, options.limit)
        show(name, found[name])
        rows = save(found, out, kept)
    for row in rows:
        verdict = "pass" if row["passed"] else "FAIL"
        print(f"{row['what']:42} {row['of']:22} {row['seen']:6} <= {row['target']:5}  {verdict}")
    return 0 if all(row["passed"] for row in rows) else 1


def save(found: dict[str, Found], out: Path, kept: bool) -> list[dict[str, object]]:
    """Write all models to the result file, with the targets as they stand; returns these."""
    rows = verdicts(found, _machine.instruction_set().startswith("amx"))
    document = {"models": {n: vars(f) | {"best_fixed": best_fixed(f)} for n, f in found.items()}}
    _machine.save("never_slower", document | {"targets": rows}, out, freed_memory_kept=kept)
    return rows


if __name__ == "__main__":
    sys.exit(main())
