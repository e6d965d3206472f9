"""A training step beside torch.autocast: one thread, interleaved, medians of ratios (step.json).

Each pair runs steps of ours and of the peer's, in changing order, in the thread's own processor time. The
peer is `torch.autocast` with the same model and batch and torch's optimizer of the same kind, timed with
our kernels out of the dispatcher. Gradients are dropped by both. Targets: O1 bf16 at most 1.02 on every
recipe (as it is, with an optimizer of `halfstep.optim`); O2 bf16 at most 1.05 on text-gpt and on a
2048-wide MLP; fp16 O1 at most 0.06 on a 768x512x512 linear, forward and backward; an op that the policy
does not touch at most 0.1 us more. "torch's optimizer" at O1 has no target: a session then reads all
gradients once more than the peer, to say whether they are finite and how large.
"""

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _machine import save
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.casting import regions
from halfstep.recipes import RECIPES

Step = Callable[[], object]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Result:
    """`value` is ours / peer's for ratios, a difference in microseconds for the untouched op."""

    name: str
    value: float
    target: float | None
    unit: str
    ours: float
    peer: float
    pairs: int

    @property
    def passed(self) -> bool:
        return self.target is None or self.value <= self.target


def timed(step: Step, inner: int) -> float:
    """Seconds of this thread's own time for one of `inner` steps, after one that is not counted."""
    step()
    started = time.thread_time()
    for _ in range(inner):
        step()
    return (time.thread_time() - started) / inner


def pairs_of(ours: Step, peer: Step, count: int) -> list[tuple[float, float]]:
    """Seconds of `count` pairs; the order alternates, short steps are repeated within a pair."""
    inner = max(1, round(0.02 / timed(ours, 2)))
    found = []
    for turn in range(count):
        seconds = {}
        for step in (ours, peer) if turn % 2 else (peer, ours):
            if step is peer:
                regions.release()
            seconds[step] = timed(step, inner)
        found.append((seconds[ours], seconds[peer]))
    return found


def ratio(name: str, ours: Step, peer: Step, target: float | None, count: int) -> Result:
    """The median over the pairs of ours / peer's."""
    pairs = pairs_of(ours, peer, count)
    value = statistics.median(a / b for a, b in pairs)
    mine, theirs = (statistics.median(side) for side in zip(*pairs))
    return Result(name, value, target, "ratio", mine, theirs, count)


KINDS: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    hs.optim.AdamW: torch.optim.AdamW,
    hs.optim.SGD: torch.optim.SGD,
}


def torchs(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Torch's optimizer of the same kind, with the arguments of ours."""
    kind = KINDS[type(optimizer)]
    known = set(inspect.signature(kind).parameters) & set(optimizer.defaults)
    return kind(model.parameters(), **{name: optimizer.defaults[name] for name in known})


def steps_of(
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    loss_fn: Loss,
    batch: tuple[Tensor, Tensor],
    level: str,
    torch_on_both: bool = False,
) -> tuple[Step, Step]:
    """Whole steps (forward, loss, backward, update, zero), ours at `level` and torch.autocast's, bf16.

    `build` gives an optimizer of halfstep's; the peer has torch's, and so have we with `torch_on_both`.
    """
    x, y = batch
    model, optimizer = build()
    if torch_on_both:
        optimizer = torchs(optimizer, model)
    amp = hs.prepare(model, optimizer, level=level, dtype="bf16")
    theirs, given = build()
    their_optimizer = torchs(given, theirs)

    def ours() -> None:
        with amp.autocast():
            loss = loss_fn(model(x), y)
        amp.backward(loss)
        amp.step()

    def peer() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(theirs(x), y)
        loss.backward()
        their_optimizer.step()
        their_optimizer.zero_grad()

    return ours, peer


def wide_mlp() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )
    return model, hs.optim.AdamW(model.parameters(), lr=1e-4)


def fp16_linear() -> tuple[Step, Step]:
    """Forward and backward of [768, 512] through 512 -> 512 in fp16, ours and torch.autocast's."""
    torch.manual_seed(0)
    layer, x = nn.Linear(512, 512), torch.randn(768, 512, requires_grad=True)

    def run(region: object) -> None:
        with region:  # type: ignore[attr-defined]
            out = layer(x)
        out.float().sum().backward()
        layer.zero_grad()
        x.grad = None

    def peer() -> None:
        run(torch.autocast("cpu", torch.float16))

    return lambda: run(hs.autocast("cpu", "fp16")), peer


def untouched_op(count: int, calls: int = 2000) -> Result:
    """Microseconds that one op without a rule costs more in our region than in torch's."""
    x = torch.ones(8)

    def ours() -> None:
        with hs.autocast("cpu", "bf16"):
            for _ in range(calls):
                x.neg()

    def peer() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(calls):
                x.neg()

    pairs = pairs_of(ours, peer, count)
    extra = statistics.median((a - b) / calls * 1e6 for a, b in pairs)
    mine, theirs = (statistics.median(side) / calls for side in zip(*pairs))
    return Result("untouched op", extra, 0.1, "us more", mine, theirs, count)


def measure(count: int) -> list[Result]:
    found: list[Result] = []

    def add(result: Result) -> None:
        found.append(result)
        verdict = "pass" if result.passed else "FAIL"
        limit = "" if result.target is None else f"<= {result.target:5.2f}  {verdict}"
        print(f"{result.name:38} {result.value:7.3f} {result.unit:8} {limit}", flush=True)

    for recipe in RECIPES.values():
        batch = next(iter(recipe.task().train(0)))
        for both, suffix, target in ((False, "", 1.02), (True, ", torch's optimizer", None)):
            steps = steps_of(lambda r=recipe: r.build(0), recipe.loss, batch, "O1", both)
            add(ratio(f"O1 bf16 {recipe.name}{suffix}", *steps, target, count))
    gpt = RECIPES["text-gpt"]
    batch = next(iter(gpt.task().train(0)))
    wide = torch.randn(64, 2048), torch.randint(0, 10, (64,))
    for both, suffix in ((False, ""), (True, ", torch's optimizer")):
        steps = steps_of(lambda: gpt.build(0), gpt.loss, batch, "O2", both)
        add(ratio(f"O2 bf16 text-gpt{suffix}", *steps, 1.05, count))
        steps = steps_of(wide_mlp, F.cross_entropy, wide, "O2", both)
        add(ratio(f"O2 bf16 mlp 2048{suffix}", *steps, 1.05, count))
    add(ratio("O1 fp16 linear 768x512x512", *fp16_linear(), 0.06, count))
    add(untouched_op(count))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = hs.devices.keep_freed_memory()  # for both sides: else page faults drown what is compared
    results = measure(max(20, options.pairs))
    rows = [asdict(result) | {"passed": result.passed} for result in results]
    save("step", {"rows": rows}, options.out, freed_memory_kept=kept)
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
