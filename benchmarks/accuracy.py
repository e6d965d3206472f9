"""Final test accuracy of the digits recipes at O0, and at O1 and O2 in bf16 and fp16 (accuracy.json).

The target is a mean over the seeds within 0.5 points of O0's. Times are not measured here.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch
from _machine import save

from halfstep.recipes import Recipe, recipe_of
from halfstep.trainer import Trainer, accuracy

SETTINGS = (("O0", None), ("O1", "bf16"), ("O2", "bf16"), ("O1", "fp16"), ("O2", "fp16"))
TARGET = 0.5


def final(recipe: Recipe, level: str, dtype: str | None, seed: int) -> tuple[float, int]:
    """Test accuracy in percent after one training, and the steps it skipped."""
    model, optimizer = recipe.build(seed, level)
    task = recipe.task()
    metrics = {"accuracy": accuracy}
    trainer = Trainer(
        model, optimizer, recipe.loss, level=level, dtype=dtype, metrics=metrics, progress=False
    )
    history = trainer.fit(task.train(seed), steps=recipe.steps)
    return 100.0 * trainer.evaluate(task.test)["accuracy"], len(history.skipped)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in ("digits-mlp", "digits-cnn"):
        recipe = recipe_of(name)
        base = 0.0
        for level, dtype in SETTINGS:
            runs = [final(recipe, level, dtype, seed) for seed in range(options.seeds)]
            values = [round(value, 4) for value, _ in runs]
            mean = statistics.fmean(values)
            base = mean if level == "O0" else base
            row = {
                "recipe": name,
                "level": level,
                "dtype": dtype or "fp32",
                "steps": recipe.steps,
                "accuracy_percent": values,
                "mean": round(mean, 4),
                "spread": round(statistics.stdev(values), 4) if len(values) > 1 else None,
                "difference": round(mean - base, 4),
                "target": TARGET,
                "passed": abs(mean - base) <= TARGET,
                "skipped": sum(skipped for _, skipped in runs),
            }
            rows.append(row)
            verdict = "pass" if row["passed"] else "FAIL"
            print(f"{name:11} {level} {row['dtype']:5} {mean:6.2f} {mean - base:+.2f}  {verdict}", flush=True)
    kernels = os.environ.get("HALFSTEP_KERNELS") or "measured"
    save("accuracy", {"seeds": options.seeds, "rows": rows}, options.out, kernels=kernels)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
