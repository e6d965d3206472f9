"""A linear layer whose plan says `output="fp32"` beside the same layer in fp32: time of a step on this CPU.

Run: python benchmarks/fp32_output.py. Writes fp32_output.json. Forward, backward to input and weight: CPU
time of one thread, median of ratios of interleaved pairs; the 16-bit layer is as level O2 keeps it.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
from _machine import facts, result
from torch import nn

import halfstep as hs

PAIRS = 15
SHAPES = {"head": (256, 256, 8192), "router": (4096, 256, 64)}
"""Rows, width and outputs."""


def step_of(rows: int, width: int, outputs: int, dtype: torch.dtype) -> Callable[[], None]:
    """A call that runs the layer forward and backward; in fp32 without a session."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, outputs, bias=False))
    plan = hs.Plan((hs.PlanRule("0", output="fp32"),))
    level, word = ("O0", None) if dtype is torch.float32 else ("O2", str(dtype).removeprefix("torch."))
    optimizer = hs.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(
        model, optimizer, level=level, dtype=word, plan=plan if word else None, loss_scale="none"
    )
    x = torch.randn(rows, width).to(dtype).requires_grad_()
    upstream = torch.randn(rows, outputs)

    def step() -> None:
        x.grad = model[0].weight.grad = None
        with amp.autocast():
            out = model(x)
        assert out.dtype is torch.float32
        out.backward(upstream)

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    rows = dict[str, dict[str, float]]()
    for name, shape in SHAPES.items():
        full = step_of(*shape, torch.float32)
        rows[name] = {}
        for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            low = step_of(*shape, dtype)
            low(), full()
            ratios = [seconds(low) / seconds(full) for _ in range(PAIRS)]
            rows[name][word] = round(statistics.median(ratios), 3)
        print(name, rows[name], flush=True)
    document = {"machine": facts(), "pairs": PAIRS, "time_over_fp32": rows}
    result("fp32_output").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
