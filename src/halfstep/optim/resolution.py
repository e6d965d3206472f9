"""Can the chosen master represent the updates? Forecast before training, and the share lost during it.

The ulp of a weight is the distance to the next value its master can hold; an update below half of it is
lost under rounding to nearest, every time. Exact and fp32 masters hold 24 bits, bf16 weights alone 8,
fp16 weights alone 11. Stochastic rounding loses no update on average.
"""

import inspect
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import errors
from halfstep.formats import dtype_name
from halfstep.optim import muon
from halfstep.optim.base import OnePassOptimizer
from halfstep.policy.levels import LOW_DTYPES

SAMPLE = 65536
_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


@dataclass(frozen=True)
class Resolution:
    """One tensor: `ulp` at the median weight, the expected `step`, the share that would freeze."""

    name: str
    master: str | None
    ulp: float
    step: float
    frozen: float

    @property
    def freezes(self) -> bool:
        """Whether more than half of the weights would not move."""
        return self.frozen > 0.5


@torch.no_grad()
def resolution(optimizer: OnePassOptimizer, warn: bool = True) -> list[Resolution]:
    """Compare each tensor's ulp with the step its learning rate makes; warn of those that would freeze.

    The expected step is the learning rate for Adam, AdamW and Lion (their updates are about one), and the
    learning rate times the gradient for SGD, whose tensors are left out while they have no gradient. Weights
    are sampled (at most 65,536 a tensor). Reads values back to the host: call it before training.
    """
    resolutions: list[Resolution] = []
    for p, group, place in optimizer._places():
        step = expected_step(p, group, float(group["lr"]))
        if step is None:
            continue
        bits = 24 if group["master"] in ("exact", "fp32") else _BITS[p.dtype]
        ulp, lost = too_coarse(p, step, bits)
        random = group["master"] == "stochastic"
        frozen = 0.0 if random or lost.numel() == 0 else float(lost.double().mean())
        names = group.get("param_names")
        name = names[place[1]] if names else f"group {place[0]}, parameter {place[1]}"
        resolutions.append(
            Resolution(name, group["master"], float(ulp.median()), float(step.median()), frozen)
        )
    frozen_ones = [r for r in resolutions if r.freezes]
    if warn and frozen_ones:
        worst = max(frozen_ones, key=lambda r: r.frozen)
        errors.warn(
            f"{len(frozen_ones)} of {len(resolutions)} tensors would freeze: in {worst.name} a step of "
            f"{worst.step:.2g} is under half the ulp {worst.ulp:.2g} of master={worst.master!r} for "
            f"{worst.frozen:.0%} of the weights; use master='exact' (2 bytes a parameter more)"
        )
    return resolutions


def expected_step(p: Tensor, group: Mapping[str, Any], rate: float) -> Tensor | None:
    """Return how far an update at this rate moves each sampled weight.

    Adam and Lion move it by about the rate, Muon by what its matrix is adjusted to, SGD by the rate times the
    gradient; None without a gradient.
    """
    if group.get("algorithm") == "muon":
        rate = float(muon.lr_of(rate, group["adjust_lr_fn"], p.shape)) / max(p.shape) ** 0.5
        return torch.tensor(rate, dtype=torch.float64, device="cpu")
    if "betas" in group:
        return torch.tensor(rate, dtype=torch.float64, device="cpu")
    return None if p.grad is None else _sample(p.grad).abs().double() * rate


def too_coarse(p: Tensor, step: Tensor, bits: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the ulp of each sampled weight, and whether a step of this size is lost in it.

    `bits`: of the significand that holds the weight; None means its own dtype's.
    """
    weight = _sample(p).abs().double()
    bits = _BITS[p.dtype] if bits is None else bits
    ulp = torch.exp2(torch.floor(torch.log2(weight.clamp_min(2.0**-126))) - (bits - 1))
    return ulp, (step < ulp / 2) & (step > 0)


@dataclass
class LostShares:
    """Filled in when `lost_updates` ends: the share of updates that did nothing, by parameter and in all."""

    shares: dict[Tensor, float] = field(default_factory=dict[Tensor, float])
    total: float = 0.0


@contextmanager
def lost_updates(optimizer: OnePassOptimizer) -> Generator[LostShares]:
    """Measure around one `step` the share of weights with a gradient that kept their value.

    Weights rounded at random lose none: those that stay make up for those that move too far. Weights are
    sampled (at most 65,536 a tensor); reads values back to the host.
    """
    lost = LostShares()
    before = {
        p: (_sample(optimizer.master_of(p)).clone(), _sample(p.grad) != 0)
        for p, _, _ in optimizer._places()
        if p.grad is not None
    }
    yield lost
    lost_count, all_moving, random = 0, 0, randomly_rounded(optimizer)
    for p, (old, moving) in before.items():
        same = 0 if p in random else int(((_sample(optimizer.master_of(p)) == old) & moving).sum())
        count = int(moving.sum())
        lost.shares[p] = same / count if count else 0.0
        lost_count, all_moving = lost_count + same, all_moving + count
    lost.total = lost_count / all_moving if all_moving else 0.0


_PROBED = 64
"""Weights in a probe: at least two vectors of 16 bits on every CPU that torch has vectors for."""
_HOW = ("fused", "foreach", "capturable", "differentiable")
"""Options that say by which code a step of torch is made."""


def find_idle_steps(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, str, str]]:
    """Yield groups of 16-bit weights that torch's fused step does not move: where, what happens, the fix.

    Measured by steps on 64 weights, in each dtype and on each device that such a group has. (On a CPU torch
    2.13's SGD updates nothing but what follows the last whole vector: pytorch/pytorch issue 191763.)
    """
    for optimizer in optimizers:
        kind = next(base for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim"))
        for number, group in enumerate(optimizer.param_groups):
            fused = kind is not torch.optim.Optimizer and group.get("fused")
            low = (p for p in group["params"] if p.dtype in LOW_DTYPES and p.requires_grad)
            for dtype, device in dict.fromkeys((p.dtype, p.device) for p in low) if fused else ():
                if idle := _count_idle(kind, group, dtype, device):
                    yield (
                        f"{type(optimizer).__name__} group {number}",
                        f"torch's fused {kind.__name__} did not update {idle} of {_PROBED} "
                        f"{dtype_name(dtype)} weights in a test on {device}, and fused=False updated all",
                        "write fused=False, or use an optimizer of hs.optim",
                    )


@torch.no_grad()
def _count_idle(kind: Any, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> int:
    """Count the weights that two fused steps leave far from where plain ones move them."""
    option_names = inspect.signature(kind.__init__).parameters.keys() - {*_HOW, "params", "lr"}
    options, moves = {key: value for key, value in group.items() if key in option_names}, list[Tensor]()
    for fused in (True, False):
        weight = nn.Parameter(torch.ones(_PROBED, dtype=dtype, device=device))
        probe = kind([weight], lr=2.0**-2, fused=fused, foreach=False, **options)
        for _ in range(2):
            weight.grad = torch.full_like(weight, 0.5)
            inspect.unwrap(kind.step)(probe)  # without the hooks that see every optimizer's step
        moves.append(weight.detach().float() - 1)
    by_fused, by_plain = moves
    return int((~((by_fused - by_plain).abs() <= by_plain.abs() / 2)).sum())


def value_tensors(optimizer: torch.optim.Optimizer, p: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that together hold the value of `p`: itself, and its master or lacking bits, if any.

    An update is lost where none of them changed. For any torch optimizer; of `p`'s shape, not copied.
    """
    state = optimizer.state.get(p, {})
    return p.detach(), *(state[key] for key in ("master", "lacking") if key in state)


def randomly_rounded(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Return the parameters that this optimizer rounds stochastically: no update is lost on average."""
    groups = [g["params"] for g in optimizer.param_groups if g.get("master") == "stochastic"]
    return {p for params in groups for p in params if p.dtype == torch.bfloat16}


def _sample(t: Tensor) -> Tensor:
    values = t.detach().reshape(-1)
    return values[:: max(1, values.numel() // SAMPLE)]
