"""Optimizers side by side: time of an update and of a step, bytes a parameter, how far weights move.

Everything is measured on weights that exist; nothing is computed from a formula. Used by
`halfstep bench step` and by the benchmark of the optimizers.
"""

import gc
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.optim import AdamW
from halfstep.recipes.measure import storage_bytes
from halfstep.torch_private import is_traceable_wrapper_subclass
from halfstep.tuning.engine import clock_of

CLIP = 1.0
SCALE = 65536.0


def fp32_value(optimizer: Any, p: nn.Parameter) -> Tensor:
    """Return a weight as its optimizer knows it: the master where there is one."""
    return optimizer.master_of(p) if isinstance(optimizer, AdamW) else p.detach()


@dataclass(frozen=True)
class Contestant:
    """One contestant: `make` builds its optimizer on parameters; the dtype is that of weights and gradients.

    `step` takes (optimizer, parameters): the whole step with unscaling, finite check and clipping, from
    scaled gradients; the optimizer's own `step` is the bare update. `value` is a weight as the optimizer
    knows it.
    """

    name: str
    dtype: torch.dtype
    make: Callable[[list[nn.Parameter]], Any]
    step: Callable[[Any, list[nn.Parameter]], None]
    value: Callable[[Any, nn.Parameter], Tensor] = fp32_value


@dataclass(frozen=True)
class Result:
    """Milliseconds (medians), the same as shares of the first contestant's in the same rounds, and bytes.

    Shares are medians of ratios of neighbouring runs. Bytes a parameter: weights, gradients and optimizer.
    """

    name: str
    update_ms: float
    update_share: float
    step_ms: float
    step_share: float
    bytes_per_param: float


def _one_pass(optimizer: Any, params: list[nn.Parameter]) -> None:
    stats = optimizer.measure(inv_scale=1 / SCALE)
    clip = torch.clamp(CLIP / (stats.norm + 1e-6), max=1.0)
    optimizer.step(inv_scale=1 / SCALE, clip_coef=clip, found_inf=~stats.finite)


def _scaler_clip_step(optimizer: Any, params: list[nn.Parameter]) -> None:
    scaler = torch.amp.GradScaler(params[0].device.type, init_scale=SCALE)
    scaler.scale(torch.ones((), device=params[0].device))
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(params, CLIP)
    scaler.step(optimizer)
    scaler.update()


def _clip_step(optimizer: Any, params: list[nn.Parameter]) -> None:
    """Step on 16-bit gradients, which torch's GradScaler does not divide: they carry no scale."""
    nn.utils.clip_grad_norm_(params, CLIP)
    optimizer.step()


def ours(master: str | None = "exact", state_dtype: str = "fp32") -> Contestant:
    """`hs.optim.AdamW` in one of its modes."""

    def make(params: list[nn.Parameter]) -> AdamW:
        return AdamW(params, master=master, state_dtype=state_dtype)

    return Contestant(f"hs.optim.AdamW {master} / {state_dtype}", torch.bfloat16, make, _one_pass)


def torch_adamw(**options: Any) -> Contestant:
    """torch's AdamW on fp32 weights, its whole step through torch's GradScaler and clip_grad_norm_."""
    name = "torch AdamW " + ", ".join(key for key, value in options.items() if value)
    return Contestant(name, torch.float32, lambda p: torch.optim.AdamW(p, **options), _scaler_clip_step)


def contestants() -> list[Contestant]:
    """torch's AdamW fused and foreach, and ours in every mode."""
    modes = [
        ("exact", "fp32"),
        ("exact", "bf16"),
        ("exact", "8bit"),
        ("fp32", "fp32"),
        ("stochastic", "8bit"),
    ]
    return [torch_adamw(fused=True), torch_adamw(foreach=True), *(ours(m, s) for m, s in modes), ours(None)]


PEERS: dict[str, tuple[str, str, str, torch.dtype, dict[str, Any]]] = {
    "bitsandbytes": ("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit", torch.float32, {}),
    "optimi": ("torch-optimi AdamW, Kahan", "optimi", "AdamW", torch.bfloat16, {"lr": 1e-3, "triton": False}),
    "torchao": ("torchao AdamW8bit", "torchao.optim", "AdamW8bit", torch.float32, {}),
}
"""AdamW of other packages: its name here, its module and class there, the dtype of weights, and options."""


def peer(package: str) -> Contestant:
    """Another package's AdamW; ImportError where it is not installed."""
    name, module, kind, dtype, options = PEERS[package]
    make = partial(getattr(importlib.import_module(module), kind), **options)
    return Contestant(name, dtype, make, _scaler_clip_step if dtype == torch.float32 else _clip_step)


class TimedContestant:
    """One contestant with weights and gradients in place."""

    def __init__(self, contestant: Contestant, sizes: Sequence[int], device: torch.device) -> None:
        self.contestant = contestant
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        drawn = [torch.randn(1, n, device=device, generator=generator).mul_(0.02) for n in sizes]
        self.params = [nn.Parameter(values.to(contestant.dtype)) for values in drawn]
        self.optimizer = contestant.make(self.params)
        for p in self.params:
            p.grad = torch.empty_like(p)
        self.refill()

    def refill(self) -> None:
        """Put scaled gradients back: torch's unscale and clip write them."""
        for p in self.params:
            assert p.grad is not None
            p.grad.copy_(p.detach()).mul_(SCALE / 20)

    def seconds(self, kind: str) -> float:
        """Time one `update` or `step`: processor time where one thread works, else the clock's."""
        self.refill()
        clock = clock_of(self.device)
        start = clock()
        if kind == "update":
            self.optimizer.step()
        else:
            self.contestant.step(self.optimizer, self.params)
        return clock() - start

    def bytes_per_param(self) -> float:
        """Storage of weights, gradients and all optimizer tensors, each once, over the parameter count."""
        tensors = [*self.params, *(p.grad for p in self.params if p.grad is not None)]
        for state in self.optimizer.state.values():
            tensors += [t for value in state.values() if isinstance(value, Tensor) for t in _plain(value)]
        return sum(storage_bytes(tensors).values()) / sum(p.numel() for p in self.params)


def _plain(t: Any) -> Iterator[Tensor]:
    """Yield the tensors of which a wrapper is made, as torchao's states are, or the tensor itself."""
    if is_traceable_wrapper_subclass(t):
        for name in t.__tensor_flatten__()[0]:
            yield from _plain(getattr(t, name))
    else:
        yield t


def race(
    contestants: Sequence[Contestant], sizes: Sequence[int], rounds: int, device: torch.device
) -> Iterator[Result]:
    """Time each contestant, its rounds interleaved with the first one's; yields one result each."""
    first = TimedContestant(contestants[0], sizes, device)
    for contestant in contestants:
        bench = first if contestant is contestants[0] else TimedContestant(contestant, sizes, device)
        times: dict[str, list[tuple[float, float]]] = {"update": [], "step": []}
        for turn in range(rounds + 1):
            for kind, pairs in times.items():
                seconds = bench.seconds(kind)
                pair = (seconds, seconds if bench is first else first.seconds(kind))
                if turn:  # the first round builds states and compiles
                    pairs.append(pair)
        ms = {kind: statistics.median(seconds for seconds, _ in pairs) * 1e3 for kind, pairs in times.items()}
        share = {
            kind: statistics.median(seconds / peer for seconds, peer in pairs)
            for kind, pairs in times.items()
        }
        size = bench.bytes_per_param()
        yield Result(contestant.name, ms["update"], share["update"], ms["step"], share["step"], size)
        if bench is not first:
            del bench
            gc.collect()


def movement(contestant: Contestant, start: float, lr: float, steps: int, count: int = 4096) -> float:
    """How far weights of `start` moved under unit gradients, as a share of what AdamW in fp32 moves them.

    The mean over `count` weights without weight decay; what an optimizer knows beyond the weight counts. Each
    step gets a new gradient: some optimizers write into it. Peers may leave tensors below 4,096 elements
    uncompressed.
    """
    return _distance_moved(contestant, start, lr, steps, count) / _distance_moved(
        torch_adamw(), start, lr, steps, 16
    )


def _distance_moved(contestant: Contestant, start: float, lr: float, steps: int, count: int) -> float:
    p = nn.Parameter(torch.full((1, count), start, dtype=contestant.dtype))
    optimizer = contestant.make([p])
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        group["weight_decay"] = 0.0
    p.grad = torch.empty_like(p)
    begin = float(contestant.value(optimizer, p).double().mean())
    for _ in range(steps):
        p.grad.fill_(1.0)
        optimizer.step()
    return begin - float(contestant.value(optimizer, p).double().mean())
