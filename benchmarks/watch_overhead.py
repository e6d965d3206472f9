"""What watching a training run costs: nobody watching, always-on, sampled every 10 steps.

Always-on is a watch without histograms and steps run by `Replayable`, ready to be traced.

Watched and plain run take their steps in turns, each first every other time, in one process, on one thread,
from the same seed and data; the cost is the median ratio of paired steps, in CPU time of the process, which
other programs disturb less than wall time. Each way of watching is compared with plain training on its own.
Losses must be equal bit for bit. `watch_overhead.json`.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
from _machine import save

from halfstep.numerics.replayable import Replayable
from halfstep.numerics.watch import watch
from halfstep.recipes import recipe_of
from halfstep.session import prepare

TARGETS = {"always-on": 0.01, "every 10 steps": 0.03}


def runner(name, dtype, every):
    """A function that takes one step and returns (seconds, loss)."""
    recipe = recipe_of(name)
    model, optimizer = recipe.build(0)
    amp = prepare(model, optimizer, level="O1", dtype=dtype)
    ready = Replayable(amp)
    if every is not None:
        watch(model, amp, every=every)
    batches = iter(recipe.task().train(0))

    def train(x, y):
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step(clip_norm=1.0)
        return loss.detach()

    def step():
        batch = next(batches)
        began = time.process_time()
        loss = ready.run(train, *batch) if every == 0 else train(*batch)
        return time.process_time() - began, float(loss)

    return step


def interval(ratios):
    """The order statistics that enclose the median with 95 % (binomial, normal approximation)."""
    ranked, half = sorted(ratios), 0.98 * len(ratios) ** 0.5
    middle = (len(ranked) - 1) / 2
    return ranked[max(0, math.floor(middle - half))], ranked[min(len(ranked) - 1, math.ceil(middle + half))]


def measure(name, dtype, rounds, watched, target):
    """One way of watching against plain training, step by step in turns; the plain run's time too."""
    every = 0 if watched == "always-on" else 10
    pair = {"plain": runner(name, dtype, None), watched: runner(name, dtype, every)}
    times = {key: [] for key in pair}
    losses = {key: [] for key in pair}
    for number in range(10 * (rounds + 1)):
        for key in sorted(pair, reverse=number % 2 == 1):
            seconds, loss = pair[key]()
            times[key].append(seconds)
            losses[key].append(loss)
    plain, seen = times["plain"][10:], times[watched][10:]
    if every == 0:
        # Every step costs the same: the median over all pairs is the steadiest figure.
        ratios = [w / p for w, p in zip(seen, plain)]
    else:
        ratios = [sum(seen[g : g + 10]) / sum(plain[g : g + 10]) for g in range(0, 10 * rounds, 10)]
    cost = statistics.median(ratios) - 1
    low, high = interval(ratios)
    row = {
        "recipe": name,
        "dtype": dtype,
        "watch": watched,
        "cost": round(cost, 4),
        "interval": [round(low - 1, 4), round(high - 1, 4)],
        "quartiles": [round(x - 1, 4) for x in statistics.quantiles(ratios, n=4)],
        "target": target,
        "passed": cost <= target,
        "same_losses": losses[watched] == losses["plain"],
    }
    return row, statistics.median(plain)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="groups of ten steps")
    parser.add_argument("--recipe", default="text-gpt")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(options.recipe, options.dtype, options.rounds, *one) for one in TARGETS.items()]
    rows, plain = [row for row, _ in found], statistics.median(p for _, p in found)
    document = {"plain_ms": round(1e3 * plain, 2), "rounds": options.rounds, "rows": rows}
    save("watch_overhead", document, options.out)
    for row in rows:
        state = "ok" if row["passed"] and row["same_losses"] else "MISSED"
        low, high = row["interval"]
        cost = f"{row['cost']:+.2%} [{low:+.2%}, {high:+.2%}]"
        print(f"{row['watch']:>15}: {cost}, target {row['target']:.0%}: {state}")
    return 0 if all(r["passed"] and r["same_losses"] for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
