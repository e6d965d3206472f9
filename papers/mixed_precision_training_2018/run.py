"""Re-create the phenomena of Mixed Precision Training (ICLR 2018) on bundled data, and write a page.

python -m papers.mixed_precision_training_2018.run [--out paper.html] [--seeds 5] [--effort 1.0]
"""

import argparse
import json
import multiprocessing
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from . import experiments
from .page import write_page

#: Recipes whose weight gradients are counted, the one that is drawn first, and how many times as long as they
#: usually train: the share of tiny gradients grows as a training converges.
COUNTED = {"digits-mlp": 4.0, "digits-cnn": 1.0, "text-gpt": 1.0, "digits-faint": 1.0}


def run(seeds: int, effort: float, workers: int) -> dict[str, Any]:
    """All experiments; the trainings of figure 2a and the table share a pool of one-thread processes."""
    torch.set_num_threads(1)
    start = time.perf_counter()

    def said(what: str) -> None:
        print(f"{time.perf_counter() - start:6.0f} s  {what}", flush=True)

    results: dict[str, Any] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__},
        "seeds": seeds,
        "effort": effort,
    }
    results["facts"] = experiments.format_facts()
    results["lost_updates"] = experiments.lost_updates()
    results["accumulation"] = experiments.accumulation()
    said("formats, lost updates, accumulation")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        results["masters"] = experiments.masters(pool, seeds, effort)
        said("figure 2a: masters on and off")
        results["weight_gradients"] = experiments.weight_gradients(COUNTED, effort)
        said("figure 2b: weight gradients")
        results["activation_gradients"] = experiments.activation_gradients(effort)
        said("figure 3: activation gradients")
        results["language_model"] = experiments.language_model(pool, effort)
        said("figure 5: an LSTM language model at five scales")
        results["detector"] = experiments.rescued_detector(pool, effort)
        said("table 2: a detector at five scales")
        results["sums"] = experiments.sums_in_training(pool, effort)
        said("section 3.3: training with fp16 sums")
        results["pictures"] = experiments.pictures(pool, effort)
        said("figure 6: pictures and boxes")
        results["parity"] = experiments.parity(pool, seeds, effort)
        said("the parity table")
    results["seconds"] = time.perf_counter() - start
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Re-create the 2018 paper's phenomena and write a page.")
    parser.add_argument("--out", type=Path, default=Path("paper.html"))
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--effort", type=float, default=1.0, help="share of the full number of steps")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    given = parser.parse_args()
    if min(given.seeds, given.workers) < 1 or not 0 < given.effort <= 100:
        parser.error("--seeds and --workers: expected 1 or more; --effort: expected a positive share")
    for path in (given.out, given.json):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            parser.error(f"{path}: expected a file name in a folder that exists")
    results = run(given.seeds, given.effort, given.workers)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results, given.out)
    print(f"wrote {given.out} after {results['seconds']:.0f} s")


if __name__ == "__main__":
    main()
