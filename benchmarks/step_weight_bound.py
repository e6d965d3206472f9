"""A training step that the weights dominate (step_weight_bound.json): ours beside torch.autocast.

50M-parameter MLP, batch 32, AdamW, bf16, one thread, same allocator setting; one step of each in turn,
medians of ratios of processor time. torch: fp32 weights under torch.autocast, clip_grad_norm_, fused AdamW.
Ours: `prepare` at O2 with hs.optim's AdamW (bf16 weights, exact masters), which looks at all gradients in
every step; "optimizer alone" looks at nothing, like the peer that does not clip. Targets: 0.75 of torch's
time for the optimizer alone, 0.70 with clipping; peak memory 0.9 with fp32 states, 0.65 with bf16 states,
less with 8-bit.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine import save
from torch import Tensor, nn

import halfstep as hs
from halfstep.devices import keep_freed_memory
from halfstep.recipes.measure import peak_bytes

Step = Callable[[], None]
WIDTH, LAYERS, BATCH = 3536, 4, 32


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def torch_step(clip: bool) -> tuple[Step, Callable[[], list[Tensor]]]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: held(model, optimizer)


def our_step(clip: bool, **options: Any) -> tuple[Step, Callable[[], list[Tensor]]]:
    model = mlp()
    optimizer = hs.optim.AdamW(model.parameters(), **options)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step(clip_norm=1e-3 if clip else None)

    return step, lambda: held(model, optimizer)


def bare_step(**options: Any) -> tuple[Step, Callable[[], list[Tensor]]]:
    """hs.optim alone, no session: like the peer it looks at nothing."""
    model = mlp().to(torch.bfloat16)
    optimizer = hs.optim.AdamW(model.parameters(), **options)
    x = torch.randn(BATCH, WIDTH).bfloat16()

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: held(model, optimizer)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*model.parameters(), *states]


RELEASED = {"state_dtype": "8bit", "release_gradients": True}
ROWS: list[tuple[str, bool, dict[str, Any], float | None, float]] = [
    ("fp32 states", False, {}, None, 0.9),
    ("fp32 states, optimizer alone", False, {}, 0.75, 0.9),
    ("fp32 states, clipped", True, {}, 0.70, 0.9),
    ("bf16 states", False, {"state_dtype": "bf16"}, None, 0.65),
    ("8-bit states", False, {"state_dtype": "8bit"}, None, 0.65),
    (
        "8-bit states, released gradients",
        False,
        {"state_dtype": "8bit", "release_gradients": True},
        None,
        0.65,
    ),
]


def seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = keep_freed_memory()
    report: list[dict[str, Any]] = []
    for clip in (False, True):
        peer, peer_held = torch_step(clip)
        peer()
        peer_peak = peak_bytes(peer, peer_held(), torch.device("cpu"))
        for name, clipped, options, time_target, memory_target in ROWS:
            if clipped != clip:
                continue
            ours, ours_held = bare_step(**options) if "alone" in name else our_step(clip, **options)
            ours()
            memory = peak_bytes(ours, ours_held(), torch.device("cpu")) / peer_peak
            pairs = [(seconds(ours), seconds(peer)) for _ in range(arguments.pairs)]
            share = statistics.median(a / b for a, b in pairs)
            row = {
                "name": name,
                "time_share": share,
                "time_target": time_target,
                "memory_share": memory,
                "memory_target": memory_target,
                "ours_ms": statistics.median(a for a, _ in pairs) * 1e3,
                "torch_ms": statistics.median(b for _, b in pairs) * 1e3,
            }
            row["passed"] = (time_target is None or share <= time_target) and memory <= memory_target
            report.append(row)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            del ours, ours_held
    found = {"pairs": arguments.pairs, "results": report}
    save("step_weight_bound", found, arguments.out, freed_memory_kept=kept)
    return 0 if all(row["passed"] for row in report) else 1


if __name__ == "__main__":
    sys.exit(main())
