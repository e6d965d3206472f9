"""Optimizers side by side (results/optimizers.json): time, bytes a parameter, movement of small updates.

One thread, 50M parameters, each contestant interleaved with torch's fused fp32 AdamW; medians of ratios.
Targets: the bare update with exact masters at most 1.0 of torch's fused AdamW with fp32 states and 1.2 with
8-bit ones; the whole step (unscale, finite check, clip, update, 16-bit weights) at most 0.5 of
GradScaler.unscale_ + clip_grad_norm_ + fused AdamW; 14.3, 10.3 and 8.4 bytes a parameter. torch-optimi and
torchao take part where they are installed.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.optim import contest

TARGETS = {
    "hs.optim.AdamW exact / fp32": {"update_share": 1.0, "step_share": 0.5, "bytes_per_param": 14.3},
    "hs.optim.AdamW exact / bf16": {"bytes_per_param": 10.3},
    "hs.optim.AdamW exact / 8bit": {"update_share": 1.2, "bytes_per_param": 8.4},
}
LEARNING_RATES = (1e-4, 1e-5, 1e-6, 1e-7)


def clip_and_step(optimizer: Any, params: list[nn.Parameter]) -> None:
    """What a peer without scaling does: clip and update."""
    nn.utils.clip_grad_norm_(params, contest.CLIP)
    optimizer.step()


def peers() -> list[contest.Entry]:
    """Compressed optimizers of others, where installed."""
    found: list[tuple[str, Callable[[Any], Any]]] = []
    try:
        import optimi

        found.append(("torch-optimi AdamW Kahan", lambda p: optimi.AdamW(p, lr=1e-3, kahan_sum=True)))
    except ImportError as error:
        print(f"left out: torch-optimi ({error})", file=sys.stderr)
    try:
        from torchao.optim import AdamW8bit, _AdamW

        found.append(("torchao AdamW8bit", lambda p: AdamW8bit(p)))
        found.append(("torchao AdamW stochastic", lambda p: _AdamW(p, bf16_stochastic_round=True)))
    except ImportError as error:
        print(f"left out: torchao ({error})", file=sys.stderr)
    bare: Any = contest.update_only
    made = [contest.Entry(name, torch.bfloat16, make, bare, clip_and_step, value) for name, make in found]
    return [entry for entry in made if works(entry)]


def value(optimizer: Any, p: nn.Parameter) -> torch.Tensor:
    """A peer's weight, with the compensation that Kahan summation keeps beside it."""
    rest = optimizer.state.get(p, {}).get("kahan_comp")
    return p.detach().double() if rest is None else p.detach().double() + rest.double()


def works(entry: contest.Entry) -> bool:
    """Whether a peer takes a step on this machine at all; said where not."""
    try:
        bench = contest.Bench(entry, [4096], torch.device("cpu"))
        bench.seconds("update")
    except Exception as error:
        print(f"left out: {entry.name} ({type(error).__name__}: {str(error)[:200]})", file=sys.stderr)
        return False
    return True


def movement(entry: contest.Entry, steps: int) -> dict[str, float]:
    """Movement of weights of 1.0 and 0.02 after unit gradients, as a share of fp32's."""
    return {
        f"{start:g} at {lr:g}": contest.movement(entry, start, lr, steps, count=1024)
        for start in (1.0, 0.02)
        for lr in LEARNING_RATES
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Share of torch's fused update against bytes a parameter."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        if row["update_share"] < 4:
            axes.scatter(row["bytes_per_param"], row["update_share"])
            axes.annotate(row["name"], (row["bytes_per_param"], row["update_share"]), fontsize=7)
    axes.set(
        xlabel="bytes a parameter (weights, gradients, optimizer)", ylabel="update time / torch fused fp32"
    )
    axes.axhline(1.0, linewidth=0.5)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=5e7)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1500, help="unit-gradient steps of the movement table")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "optimizers.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contestants = [*contest.entries(), *peers()]
    sizes = [int(arguments.parameters) // 4] * 4
    rows: list[dict[str, Any]] = []
    for entry, result in zip(
        contestants, contest.race(contestants, sizes, arguments.rounds, torch.device("cpu"))
    ):
        try:
            moved = movement(entry, arguments.steps)
        except (HalfstepError, RuntimeError) as error:
            moved = {"error": str(error)}
        target = TARGETS.get(entry.name, {})
        missed = [key for key, limit in target.items() if getattr(result, key) > limit]
        rows.append({**asdict(result), "movement": moved, "targets": target, "missed": missed})
        print(f"{entry.name:36} update {result.update_share:5.2f}  step {result.step_share:5.2f}  "
              f"{result.bytes_per_param:5.2f} bytes  missed: {missed}", flush=True)  # fmt: skip
    isa = torch.backends.cpu.get_cpu_capability()
    machine = f"{platform.machine()} {isa}, torch {torch.__version__}, 1 thread"
    report = {"machine": machine, "parameters": sum(sizes), "rounds": arguments.rounds, "results": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    plot(rows, arguments.out.with_suffix(".svg"))
    return 1 if any(row["missed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
