"""The step on a GPU (optimizer_cuda.json): GPT-2's 124M parameters, beside torch and FlashOptim.

For each optimizer: milliseconds of the bare update and of the whole step (unscale, finite check, clip,
update), eager and, where it can be captured, replayed from a CUDA graph; kernels launched; bytes a parameter
of weights, gradients and optimizer, and the peak while stepping. Rounds interleave with torch's fused fp32
AdamW; medians. Without CUDA it says so and measures nothing.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _machine import result
from torch import nn

from halfstep.optim.optimizers import AdamW
from halfstep.recipes import optimizer_race

WIDTH, LAYERS, TOKENS, CONTEXT = 768, 12, 50257, 1024
Work = Callable[[], None]


def shapes() -> Iterator[tuple[int, ...]]:
    """The parameters of GPT-2 small, its output layer tied: 124,439,808 elements in 148 tensors."""
    yield from ((TOKENS, WIDTH), (CONTEXT, WIDTH))
    for _ in range(LAYERS):
        for rows in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)):
            yield from (rows, (rows[1],))
        yield from ((WIDTH,),) * 4
    yield from ((WIDTH,),) * 2


@dataclass(frozen=True)
class Row:
    """What one optimizer took; `share` is of torch's fused fp32 AdamW in the same rounds."""

    name: str
    update_ms: float
    update_share: float
    step_ms: float
    step_share: float
    graph_ms: float | None
    update_launches: int
    step_launches: int
    bytes_per_param: float
    peak_over_steady_mb: float


def clip_and_step(optimizer: Any, params: list[nn.Parameter]) -> None:
    """What a peer without scaling does: clip and update."""
    nn.utils.clip_grad_norm_(params, optimizer_race.CLIP)
    optimizer.step()


def contestants() -> list[optimizer_race.Contestant]:
    """torch's fused AdamW in fp32 and bf16, ours in its modes and as plain torch, FlashOptim if installed."""
    bare = optimizer_race.update_only
    ours = [("exact", "fp32"), ("exact", "bf16"), ("exact", "8bit"), ("fp32", "fp32"), ("stochastic", "8bit")]

    def low(params: list[nn.Parameter]) -> Any:
        return torch.optim.AdamW(params, fused=True)

    def plain(params: list[nn.Parameter]) -> Any:
        return AdamW(params, backend="reference")

    reference = optimizer_race.ours()
    found = [
        optimizer_race.torch_adamw(fused=True),
        optimizer_race.Contestant(
            "torch AdamW fused, bf16 without masters", torch.bfloat16, low, bare, clip_and_step
        ),
        *(optimizer_race.ours(master, state) for master, state in ours),
        optimizer_race.Contestant("hs.optim.AdamW reference", torch.bfloat16, plain, bare, reference.step),
    ]
    try:
        from flashoptim import FlashAdamW
    except ImportError as error:
        print(f"left out: FlashOptim ({error})", file=sys.stderr)
        return found

    def flash(params: list[nn.Parameter]) -> Any:
        return FlashAdamW(params, lr=1e-3)

    return [
        *found,
        optimizer_race.Contestant("FlashOptim FlashAdamW", torch.bfloat16, flash, bare, clip_and_step),
    ]


class Bench:
    """One contestant with GPT-2's weights and gradients on the device, warmed up."""

    def __init__(self, entry: optimizer_race.Contestant, device: torch.device) -> None:
        torch.manual_seed(0)
        self.entry = entry
        self.params = [
            nn.Parameter((torch.randn(shape, device=device) * 0.02).to(entry.dtype)) for shape in shapes()
        ]
        for p in self.params:
            p.grad = torch.randn_like(p) * 1e-3
        self.optimizer = entry.make(self.params)
        for _ in range(3):
            self.update()
            self.step()
        torch.cuda.synchronize()

    def update(self) -> None:
        """The bare update."""
        self.entry.update(self.optimizer, self.params)

    def step(self) -> None:
        """Unscale, check, clip and update."""
        self.entry.step(self.optimizer, self.params)

    def graph(self) -> Work | None:
        """The whole step replayed from a CUDA graph, for ours alone: a peer's scaler reads the device."""
        if not isinstance(self.optimizer, AdamW) or self.optimizer.backend == "reference":
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def bytes_per_param(self) -> float:
        """Storage of weights, gradients and optimizer tensors, each once, over the parameter count."""
        held = [*self.params, *(p.grad for p in self.params if p.grad is not None)]
        for state in self.optimizer.state.values():
            held += [value for value in state.values() if isinstance(value, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        return sum(storages.values()) / sum(p.numel() for p in self.params)


def milliseconds(work: Work) -> float:
    """Time between two events around `work`, the device idle before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def launches(work: Work) -> int:
    """Kernels, copies and fills that `work` puts on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())


def measure(entry: optimizer_race.Contestant, first: Bench, rounds: int, device: torch.device) -> Row:
    """Time `entry` in turn with the first contestant."""
    bench = first if entry is first.entry else Bench(entry, device)
    replay = bench.graph()
    times: dict[str, list[tuple[float, float]]] = {"update": [], "step": []}
    replays: list[float] = []
    for _ in range(rounds):
        for kind, found in times.items():
            found.append((milliseconds(getattr(bench, kind)), milliseconds(getattr(first, kind))))
        if replay is not None:
            replays.append(milliseconds(replay))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    steady = torch.cuda.memory_allocated(device)
    bench.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device) - steady
    ms = {kind: statistics.median(own for own, _ in found) for kind, found in times.items()}
    share = {kind: statistics.median(own / peer for own, peer in found) for kind, found in times.items()}
    return Row(
        entry.name, ms["update"], share["update"], ms["step"], share["step"],
        statistics.median(replays) if replays else None,
        launches(bench.update), launches(bench.step), bench.bytes_per_param(), peak / 2**20,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here, so nothing was measured")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    entries = contestants()
    first = Bench(entries[0], device)
    rows: list[Row] = []
    for entry in entries:
        row = measure(entry, first, arguments.rounds, device)
        rows.append(row)
        print(
            f"{row.name:40} update {row.update_ms:6.2f} ms ({row.update_share:4.2f}) step {row.step_ms:6.2f} "
            f"ms ({row.step_share:4.2f})  launches {row.update_launches}/{row.step_launches}  "
            f"{row.bytes_per_param:5.2f} bytes",
            flush=True,
        )
        gc.collect()
        torch.cuda.empty_cache()
    report = {
        "machine": f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}",
        "parameters": sum(p.numel() for p in first.params),
        "rounds": arguments.rounds,
        "results": [asdict(row) for row in rows],
    }
    (arguments.out or result("optimizer_cuda")).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
