"""A linear layer whose plan says `output="fp32"` beside the same layer in fp32: time of a step on this CPU.

Run: python benchmarks/fp32_output.py. Writes fp32_output.json. Forward, backward to input and weight: CPU
time, median of ratios of interleaved pairs; the 16-bit layer is as level O2 keeps it. The fp32 layer is one
whose plan says `dtype="fp32"` in the same model, with inputs of 16 bits ("in a 16-bit model"), or one of a
model in fp32 ("alone").
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable

import torch
from _machine import facts, result
from torch import nn

import halfstep as hs

PAIRS = 7
SHAPES = {
    "head": (512, 768, 32000),
    "small head": (256, 256, 8192),
    "router": (4096, 256, 64),
    "experts": (4096, 64, 4),
}
"""Rows, width and outputs."""


def step_of(
    rows: int, width: int, outputs: int, dtype_of_input: torch.dtype, **rule: str
) -> Callable[[], None]:
    """A call that runs the layer forward and backward on inputs of a dtype; without a rule all is fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, outputs, bias=False))
    optimizer = hs.optim.SGD(model.parameters(), lr=0.1)
    word = str(dtype_of_input).removeprefix("torch.") if rule else None
    plan = hs.Plan((hs.PlanRule("0", **rule),)) if rule else None
    amp = hs.prepare(model, optimizer, level="O2" if rule else "O0", dtype=word, plan=plan, loss_scale="none")
    x = torch.randn(rows, width).to(dtype_of_input).requires_grad_()
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
    rows = dict[str, dict[str, dict[str, float]]]()
    for threads, (name, shape) in itertools.product((1, 2), SHAPES.items()):
        torch.set_num_threads(threads)
        found = rows[f"{name}, {threads} thread{'s' * (threads > 1)}"] = {}
        for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            low = step_of(*shape, dtype, output="fp32")
            peers = {
                "in a 16-bit model": step_of(*shape, dtype, dtype="fp32"),
                "alone": step_of(*shape, torch.float32),
            }
            found[word] = {}
            for peer, full in peers.items():
                low(), full()
                ratios = [seconds(low) / seconds(full) for _ in range(PAIRS)]
                found[word][peer] = round(statistics.median(ratios), 3)
        print(threads, name, found, flush=True)
    document = {"machine": facts(), "pairs": PAIRS, "time_over_fp32": rows}
    result("fp32_output").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
