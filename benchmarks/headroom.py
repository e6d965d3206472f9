"""HeadroomLossScale against DynamicLossScale: skipped steps and final loss, in fp16 at O1.

On the recipes, and on a hard case whose gradients shrink by 2^12 over the run. Both grow or look every step
that the other may: the dynamic scale with torch's interval on the recipes, and with a short one on the hard
case, where a long one could not follow the gradients at all. Writes headroom.json.

    python benchmarks/headroom.py [--seeds 5] [--steps-share 1.0]
"""

import argparse
import statistics
import sys
from typing import Any

import torch
from _machine import save
from torch import nn

import halfstep as hs
from halfstep.recipes import RECIPES
from halfstep.recipes.runs import TrainSetting, train_once

SCALES = ("dynamic", "headroom")


def hard_case(scale: hs.LossScale, seed: int, steps: int = 1000) -> dict[str, Any]:
    """A regression whose loss weight falls from 2^6 to 2^-6; the optimizer divides it out again."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    teacher = nn.Linear(32, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)  # blind to the weight
    amp = hs.prepare(model, optimizer, level="O1", dtype="fp16", loss_scale=scale, max_skips=10_000)
    last = []
    for step in range(steps):
        x = torch.randn(64, 32)
        weight = 2.0 ** (6 - 12 * step / steps)
        with amp.autocast():
            error = nn.functional.mse_loss(model(x), teacher(x).detach())
        amp.backward(error * weight)
        amp.step()
        last = [*last[-49:], error.item()]
    return {"skipped": amp.skips.total, "final": statistics.fmean(last), "scale": amp.loss_scale.read()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    finals = [run["final"] for run in runs]
    spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
    return {"skipped": sum(r["skipped"] for r in runs), "final": statistics.fmean(finals), "spread": spread}


def on_recipe(name: str, scale: str, seeds: int, share: float) -> dict[str, Any]:
    recipe = RECIPES[name]
    task, steps = recipe.task(None), max(10, int(recipe.demo_steps * share))
    runs = []
    for seed in range(seeds):
        run = train_once(recipe, task, TrainSetting("O1", "fp16", scale), seed, steps, torch.device("cpu"))
        loss = run.test[recipe.metric] if recipe.metric == "loss" else 100 - 100 * run.test[recipe.metric]
        runs.append({"skipped": len(run.skipped), "final": loss})
    return summary(runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps-share", type=float, default=1.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    for name in RECIPES:
        rows[name] = {scale: on_recipe(name, scale, given.seeds, given.steps_share) for scale in SCALES}
    make = {
        "dynamic": lambda: hs.DynamicLossScale(interval=20),
        "headroom": lambda: hs.HeadroomLossScale(limit=make["dynamic"]()),
    }
    rows["shrinking by 2^12"] = {
        scale: summary([hard_case(make[scale](), seed) for seed in range(given.seeds)]) for scale in SCALES
    }
    fewer = True
    print(f"{'':24}{'skipped steps':>22}{'final loss or error %':>44}")
    for name, row in rows.items():
        dynamic, headroom = row["dynamic"], row["headroom"]
        allowed = dynamic["skipped"] // (2 if "shrinking" in name else 1)
        worse = headroom["final"] - dynamic["final"] > 2 * max(dynamic["spread"], headroom["spread"])
        row["ok"] = headroom["skipped"] <= allowed and not worse
        fewer &= row["ok"]
        print(
            f"{name:24}{dynamic['skipped']:>10} {headroom['skipped']:>10}"
            f"{dynamic['final']:>14.4g} ± {dynamic['spread']:<8.2g}{headroom['final']:>10.4g} ± "
            f"{headroom['spread']:<8.2g} {'ok' if row['ok'] else 'NOT OK'}"
        )
    save("headroom", {"seeds": given.seeds, "rows": rows}, None)
    return 0 if fewer else 1


if __name__ == "__main__":
    sys.exit(main())
