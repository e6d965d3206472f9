"""What `halfstep tune` adds to a script it tries, beside the same region written by hand.

The same model in one process, on one thread, with torch's optimizer: once as a script that does not use
halfstep, run by `ForeignScript`; once with `hs.autocast` around its forward and loss, and in fp16 an
`hs.GradScaler`. Both take their steps in turns, each first every other time; the cost is the median ratio of
paired steps in the thread's CPU time. Target: at most 3 %. `foreign_script.json`.

python benchmarks/foreign_script.py [--models NAME,...] [--steps N] [--out FILE]
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path

import _models
import torch
from _machine import save

import halfstep as hs
from halfstep.cli._foreign_script import ForeignScript

TARGET = 0.03
WARM = 5


class Plain:
    """A script's own lines."""

    def autocast(self):
        return contextlib.nullcontext()

    def backward(self, loss, optimizer=None):
        loss.backward()

    def step(self, optimizer):
        optimizer.step()
        optimizer.zero_grad()


class ByHand(Plain):
    """The same lines with a region, and in fp16 a scaler."""

    def __init__(self, dtype):
        self.region = hs.autocast("cpu", dtype)
        self.scaler = hs.GradScaler("cpu", init_scale=1024.0, enabled=dtype is torch.float16)

    def autocast(self):
        return self.region

    def backward(self, loss, optimizer=None):
        (self.scaler.scale(loss) if self.scaler.is_enabled() else loss).backward()

    def step(self, optimizer):
        if self.scaler.is_enabled():
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()


def measure(case, dtype, steps):
    """The ratios of paired steps: run by ForeignScript over written by hand."""
    foreign, batch = ForeignScript(dtype, lambda: None), case.batch()
    torch.manual_seed(0)
    hand = case.build(False)
    foreign.install()
    torch.manual_seed(0)
    script = case.build(False)
    foreign.close()

    def tried():
        foreign.install()
        began = time.thread_time()
        case.step(Plain(), *script, batch)
        seconds = time.thread_time() - began
        foreign.close()
        return seconds

    by_hand = ByHand(dtype)

    def written():
        began = time.thread_time()
        case.step(by_hand, *hand, batch)
        return time.thread_time() - began

    ratios = []
    for number in range(WARM + steps):
        if number % 2:
            tested, base = tried(), written()
        else:
            base, tested = written(), tried()
        if number >= WARM:
            ratios.append((tested / base, base))
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="text-gpt,digits-cnn,vit,lstm,dcgan", help="of _models.py")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models.split(","):
        case = _models.CASES[name]
        for dtype in (torch.bfloat16, torch.float16):
            pairs = measure(case, dtype, options.steps)
            cost = statistics.median(ratio for ratio, _ in pairs) - 1
            step = statistics.median(base for _, base in pairs)
            row = {
                "model": name,
                "dtype": str(dtype)[6:],
                "step_ms": round(1e3 * step, 2),
                "cost": round(cost, 4),
            }
            rows.append(row | {"target": TARGET, "passed": cost <= TARGET})
            print(f"{name:>12} {row['dtype']:>9}: {cost:+.2%} of {row['step_ms']:,.4g} ms", flush=True)
    save("foreign_script", {"steps": options.steps, "rows": rows}, options.out)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
