"""Parts of gpu.py about the step alone: ceilings, optimizers of three sizes, peers, kernels' constants."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from _gpu import DEVICE, TINY, device_ms, gpt2, graph_ms, host_ms, label_of_ours, launches, memory, row
from torch import nn

import halfstep as hs
from halfstep.kernels.cuda import launch as cuda
from halfstep.optim.backends import triton as plans

BF16, FP32 = torch.bfloat16, torch.float32
Params = list[nn.Parameter]
PEERS = (("flashoptim", "FlashAdamW"), ("bitsandbytes.optim", "AdamW8bit"), ("torchao.optim", "AdamW8bit"))
"""The last compiles with Inductor, for up to a minute."""
OURS = (("exact", "fp32"), ("exact", "bf16"), ("exact", "8bit"), ("stochastic", "8bit"), ("fp32", "fp32"))


class Contestant(NamedTuple):
    """An optimizer, and its whole step: unscaled, checked, clipped."""

    name: str
    dtype: torch.dtype
    make: Callable[[Params], Any]
    step: Callable[[Any, Params], None]


def ceilings() -> None:
    """What the memory and the tensor cores of this device give at most."""
    size, n = (1 << 16, 64) if TINY else (1 << 30, 8192)

    def copy() -> list[float]:
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        return [round(2 * size / ms / 1e9, 3) for ms in device_ms(lambda: target.copy_(source))]

    def product() -> list[float]:
        a, b = (torch.randn(n, n, device=DEVICE, dtype=BF16) for _ in "ab")
        return [round(2 * n**3 / ms / 1e9) for ms in device_ms(lambda: a @ b)]

    row("copy, terabytes a second", copy)
    row("bf16 product, teraflops", product)


class ScaledStep:
    """The whole step with torch's GradScaler, kept from step to step."""

    def __init__(self) -> None:
        self._scaler: Any = None

    def __call__(self, optimizer: Any, params: Params) -> None:
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=10**6)
            self._scaler.scale(torch.ones((), device=DEVICE))
        self._scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        self._scaler.step(optimizer)
        self._scaler.update()


def clipped(optimizer: Any, params: Params) -> None:
    """The whole step of one that scales no loss."""
    nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()


def fused(params: Params) -> Any:
    """torch's own, so that a graph can capture it too."""
    return torch.optim.AdamW(params, lr=1e-3, fused=True, capturable=not TINY)


def torchs(again: bool = False) -> Contestant:
    """What all others are compared with; first and last, so that a drift of the clocks is seen."""
    return Contestant("torch fused, fp32" + (", again" if again else ""), FP32, fused, ScaledStep())


def ours(master: str | None, states: str) -> Contestant:
    """hs.optim.AdamW; its name says where the reference runs in place of kernels."""

    def make(params: Params) -> Any:
        options: dict[str, Any] = {"clip_norm": 1.0, "skip_nonfinite": True}
        return hs.optim.AdamW(params, lr=1e-3, master=master, state_dtype=states, **options)

    dtype = FP32 if master is None else BF16
    name = f"{label_of_ours()} {'fp32' if master is None else f'bf16, {master}'} / {states}"
    return Contestant(name, dtype, make, lambda optimizer, _: optimizer.step(inv_scale=1.0))


def optimizers() -> None:
    """Update and whole step at the sizes of GPT-2, on device and host, eager and from a graph."""
    kept = [ours(*kind) for kind in OURS[: 1 if TINY else None]]
    bare = Contestant("torch fused, bf16 without masters", BF16, fused, clipped)
    for contestant in (torchs(), *kept, ours(None, "fp32"), bare, torchs(again=True)):
        row(contestant.name, lambda c=contestant: contest(list(gpt2()), c))


def peers() -> None:
    """The same for other people's optimizers, those that are installed."""
    for module, name in PEERS:
        try:
            cls = getattr(importlib.import_module(module), name)
        except Exception as error:
            row(f"{module}.{name}", lambda e=error: f"left out: {e!r}"[:200])
            continue
        contestant = Contestant(f"{module}.{name}", BF16, lambda params, c=cls: c(params, lr=1e-3), clipped)
        row(contestant.name, lambda c=contestant: contest(list(gpt2()), c))


def small() -> None:
    """Many small tensors, and one large one."""
    many = {"31 of 32x1024": [(32, 1024)] * 31, "400 of 64x64": [(64, 64)] * 400}
    if not TINY:
        many |= {"1,000 of 64x64": [(64, 64)] * 1000, "one of 16384x8192": [(1 << 14, 1 << 13)]}
    else:
        many = {"4 of 32x64": [(32, 64)] * 4}
    for label, shapes in many.items():
        for contestant in (torchs(), ours("exact", "fp32"), ours("exact", "8bit")):
            row(f"{label}: {contestant.name}", lambda c=contestant, s=shapes: contest(s, c, more=False))


def large() -> None:
    """1.3 billion parameters, for which torch's step takes 21 GB and its norms more."""
    if torch.cuda.get_device_properties(DEVICE).total_memory < 30e9:
        row("all", lambda: "left out: needs 30 GB")
        return
    for contestant in (
        torchs(),
        *(ours("exact", states) for states in ("fp32", "bf16", "8bit")),
        torchs(again=True),
    ):
        row(contestant.name, lambda c=contestant: contest(list(gpt2(large=True)), c, more=False))


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Params:
    """With gradients."""
    made = torch.Generator(DEVICE).manual_seed(0)
    params = [
        nn.Parameter((torch.randn(shape, device=DEVICE, generator=made) * 0.02).to(dtype)) for shape in shapes
    ]
    for p in params:
        p.grad = (torch.randn(p.shape, device=DEVICE, generator=made) * 1e-3).to(dtype)
    return params


def contest(shapes: Sequence[tuple[int, ...]], contestant: Contestant, more: bool = True) -> dict[str, Any]:
    """Milliseconds of the update and of the whole step, memory, bytes; with `more` graphs and launches."""
    params = parameters(shapes, contestant.dtype)
    optimizer = contestant.make(params)

    def whole() -> None:
        contestant.step(optimizer, params)

    def update() -> None:
        if hasattr(optimizer, "one_pass"):  # without the clip and the check of its own
            optimizer.step(inv_scale=1.0, clip_coef=0.5, found_inf=False)
        else:
            optimizer.step()

    values: dict[str, Any] = {f"first_step_{key}": value for key, value in memory(whole).items()}
    update()
    kept = [
        *params,
        *(v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)),
    ]
    moved = sum(2 * t.nbytes for t in kept) + sum(p.grad.nbytes for p in params if p.grad is not None)
    values["update_ms"] = device_ms(update)
    values["update_terabytes_a_second"] = round(moved / values["update_ms"][0] / 1e9, 3)
    values |= {"step_ms": device_ms(whole), "update_host_ms": host_ms(update), "step_host_ms": host_ms(whole)}
    values |= memory(whole)
    gradients = sum(p.grad.nbytes for p in params if p.grad is not None)
    count = sum(p.numel() for p in params)
    values["bytes_a_parameter"] = round((sum(t.nbytes for t in kept) + gradients) / count, 2)
    if more and hasattr(optimizer, "measure"):
        values["measure_ms"] = device_ms(lambda: optimizer.measure(inv_scale=1.0))
    if more:
        values["step_launches"] = len(launches(whole))
        values |= {"update_graph_ms": graph_ms(update), "step_graph_ms": graph_ms(whole)}
    return values


# ---- what kernels could gain ----------------------------------------------------------------------------


def knobs() -> None:
    """Warps, tile and work item: what the update and the measure take with others; each is compiled anew."""
    if cuda.why_not(DEVICE):
        row("all", lambda: f"left out: hs.optim runs on {cuda.why_not(DEVICE)}")
        return
    changes: list[dict[str, int]] = [
        {},
        {"num_warps": 2, "TILE": 512},
        {"num_warps": 8, "TILE": 2048},
        {"ITEM": 16384},
        {"ITEM": 65536},
    ]
    for warps in (2, 1, 4)[: 1 if TINY else None]:
        for master in ("exact", "stochastic"):
            name = f"update {master} / 8bit, {warps} warps"
            row(name, lambda m=master, w=warps: timed("8bit", m, "update", num_warps=w))
    for states in ("fp32", "bf16"):
        for change in changes[: 2 if TINY else None]:
            row(
                f"update exact / {states}, {change}",
                lambda s=states, c=change: timed(s, "exact", "update", **c),
            )
    for change in ({}, {"TILE": 2048}, {"num_warps": 8, "TILE": 4096}, {"num_warps": 8, "TILE": 2048}):
        row(f"measure bf16, {change}", lambda c=change: timed("fp32", "exact", "measure", **c))


def timed(states: str, master: str, kernel: str, **changed: int) -> list[float]:
    """Milliseconds of `kernel`'s pass with some of its constants changed."""
    launch, item = cuda.launch, plans.ITEM
    constants = {name: value for name, value in changed.items() if name != "ITEM"}

    def other(which: Any, *args: Any, **options: Any) -> None:
        launch(which, *args, **{**options, **(constants if which.fn.__name__ == kernel else {})})

    cuda.launch, plans.ITEM = other, changed.get("ITEM", item)
    try:
        optimizer = hs.optim.AdamW(parameters(list(gpt2()), BF16), state_dtype=states, master=master)
        if kernel == "measure":
            return device_ms(lambda: optimizer.measure(inv_scale=1.0))
        return device_ms(lambda: optimizer.step(inv_scale=1.0, clip_coef=0.5, found_inf=False))
    finally:
        cuda.launch, plans.ITEM = launch, item


def profiled() -> None:
    """For a profiler such as ncu: two updates each of three kinds, nothing timed."""
    for states in ("fp32", "bf16", "8bit"):
        optimizer = hs.optim.AdamW(parameters(list(gpt2()), BF16), state_dtype=states)
        for _ in range(2):
            optimizer.measure(inv_scale=1.0)
            optimizer.step(inv_scale=1.0, clip_coef=0.5, found_inf=False)
        torch.cuda.synchronize()
