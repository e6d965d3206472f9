"""Bytes that an update moves, beside torch.amp's own loop: counted over every op after backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfstep as hs
from halfstep.kernels.cuda import launch as cuda

MASTERS = 18  # bytes an element: gradients widened 6, masters compared with weights 6 and rounded into them 6


class Traffic(TorchDispatchMode):
    """Adds up the bytes of the tensors that ops read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace == "prim" or "empty" in func.__name__:
            return out
        name, schema = func._schema.name, func._schema
        given = [*args, *((kwargs or {}).get(a.name) for a in schema.arguments[len(args) :])]
        copies = name.endswith(("copy_", "zero_", "fill_"))
        for argument, value in zip(schema.arguments, given):
            written = argument.alias_info is not None and argument.alias_info.is_write
            reads = 0 if written and copies else 1
            self.bytes += (reads + written) * _size(value)
        if not any(a.alias_info is not None for a in schema.returns):
            self.bytes += _size(out)
        return out


def _size(tree: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


def moved(update: Callable[[], None], net: nn.Module) -> float:
    """Bytes an element of the weights that an update moves."""
    with Traffic() as traffic:
        update()
    return traffic.bytes / sum(p.numel() for p in net.parameters())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to("cuda")


def of_torch(dtype: torch.dtype, clip_norm: float | None, looks: bool = False) -> float:
    """What torch.amp's own loop moves; with `looks` one that takes the norm of the gradients, to log it."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16, init_scale=256.0)

    def update() -> None:
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        if looks:
            nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    found = 0.0
    for _ in range(2):
        with torch.autocast("cuda", dtype):
            loss = F.mse_loss(net(torch.ones(8, 64, device="cuda")), torch.zeros(8, 64, device="cuda"))
        scaler.scale(loss).backward()
        found = moved(update, net)
    return found


def of_a_session(
    level: str, dtype: str, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, list[str]]:
    """What a session's step moves without its kernels, and the names of those."""
    net, launched = network(), list[str]()
    launch = cuda.launch

    def named(kernel: Any, *args: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            launch(kernel, *args, **constants)

    monkeypatch.setattr(cuda, "launch", named)
    amp = hs.prepare(net, torch.optim.AdamW(net.parameters(), fused=True), level=level, dtype=dtype)
    found = 0.0
    for _ in range(2):
        with amp.autocast():
            loss = F.mse_loss(net(torch.ones(8, 64, device="cuda")), torch.zeros(8, 64, device="cuda"))
        amp.backward(loss)
        launched.clear()
        found = moved(lambda: amp.step(clip_norm=clip_norm) and None, net)
    return found, launched


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_session_moves_no_more_than_torchs_loop(level, dtype, clip_norm, monkeypatch):
    # A scaler and clipping look at the gradients; a session does in any case, to say whether they are finite.
    looks = dtype == "bf16" and clip_norm is None
    theirs = of_torch({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], clip_norm, looks)
    ours, launched = of_a_session(level, dtype, clip_norm, monkeypatch)
    if level == "O2":
        assert launched.count("refresh") == 1
        assert ours + 6 <= theirs * 1.01 + MASTERS
    else:
        assert ours <= 1.1 * theirs
