"""A step of hs.optim.AdamW beside torch's fused AdamW, for many small tensors and some large ones.

    OMP_NUM_THREADS=1 python benchmarks/many_tensors.py

Prints the median thread time of each in microseconds and their ratio; steps alternate.
"""

import statistics
import time

import torch

import halfstep as hs

SIZES = ((6, (64, 64)), (148, (64, 64)), (400, (8, 8)), (1000, (8, 8)), (148, (512, 512)))


def optimizer_of(kind: str, count: int, shape: tuple[int, int]) -> torch.optim.Optimizer:
    dtype = torch.float32 if kind == "torch" else torch.bfloat16
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    if kind == "torch":
        return torch.optim.AdamW(params, lr=1e-3, fused=True)
    return hs.optim.AdamW(params, lr=1e-3, master="exact")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for count, shape in SIZES:
        optimizers = {kind: optimizer_of(kind, count, shape) for kind in ("torch", "halfstep")}
        times: dict[str, list[float]] = {kind: [] for kind in optimizers}
        for round_ in range(18 if shape[0] > 64 else 63):
            for kind, optimizer in optimizers.items():
                began = time.thread_time()
                optimizer.step()
                if round_ > 2:
                    times[kind].append((time.thread_time() - began) * 1e6)
        torch_us, ours = (statistics.median(t) for t in times.values())
        print(f"{count} of {shape[0]}x{shape[1]}: {torch_us:.0f} us, {ours:.0f} us, {ours / torch_us:.2f}")


if __name__ == "__main__":
    main()
