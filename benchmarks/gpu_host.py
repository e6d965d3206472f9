"""What the CPU does in a step on a GPU, launches left out, beside torch's fused AdamW on the same CPU.

    OMP_NUM_THREADS=1 python benchmarks/gpu_host.py

Prints the median thread time of `measure` and `step` together in microseconds, for bf16 weights with exact
masters, as a share of torch's fused fp32 step, its arithmetic included; steps alternate, and gradients lie
elsewhere in each. Needs Triton.
"""

import os
import statistics
import time
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

import halfstep as hs
from halfstep.kernels.cuda import launch as cuda

COUNTS = (148, 400, 1000)
ROUNDS = 60
Grads = list[torch.Tensor]


def parameters(count: int, dtype: torch.dtype) -> tuple[Grads, list[Grads]]:
    """Parameters, and two sets of gradients for them."""
    params = [torch.nn.Parameter(torch.randn(8, 8).to(dtype)) for _ in range(count)]
    return list(params), [[torch.randn_like(p) * 1e-3 for p in params] for _ in "ab"]


class Case:
    """One optimizer and what is timed of it."""

    def __init__(self, kind: str, count: int) -> None:
        own = kind != "torch"
        self.params, self._grads = parameters(count, torch.bfloat16 if own else torch.float32)
        self._released, self._round = kind == "released", 0
        options: dict[str, Any] = {"fused": True}
        if own:
            options = {"backend": "triton", "release_gradients": self._released}
        self.optimizer: Any = (hs.optim if own else torch.optim).AdamW(self.params, lr=1e-3, **options)
        self._own = own

    def once(self) -> float:
        """Thread time of a step, in microseconds."""
        self._round += 1
        for p, grad in zip(self.params, self._grads[self._round % 2]):
            p.grad = grad
        began = time.thread_time()
        if self._released:
            for p in self.params:
                self.optimizer.release._on_gradient(p)
        if self._own:
            self.optimizer.measure()
        self.optimizer.step()
        return (time.thread_time() - began) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cuda.launch = lambda *args, **constants: None
    for count in COUNTS:
        cases = {kind: Case(kind, count) for kind in ("torch", "halfstep", "released")}
        times: dict[str, list[float]] = {kind: [] for kind in cases}
        for number in range(ROUNDS + 3):
            for kind, case in cases.items():
                spent = case.once()
                if number > 2:
                    times[kind].append(spent)
        base, ours, released = (statistics.median(t) for t in times.values())
        print(
            f"{count}: torch {base:.0f} us; halfstep {ours:.0f} us, {ours / base:.2f} times torch; "
            f"released gradients {released:.0f} us, {released / base:.2f} times"
        )


if __name__ == "__main__":
    main()
