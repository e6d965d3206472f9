"""Parts of gpu.py about whole training steps of GPT-2 small, eager and compiled, beside torch.amp."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _gpu import DEVICE, MIB, TINY, host_ms, label_of_ours, launches, row, sizes, steps_ms
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.casting import regions as our_regions

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Block(nn.Module):
    """A pre-norm block of GPT-2 with heads of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(width // 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """GPT-2's shape: learned positions, the output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        width, layers, tokens, self.context = sizes()
        self.words, self.places = nn.Embedding(tokens, width), nn.Embedding(self.context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.words.weight)


class Kind(NamedTuple):
    """How a network is trained; `options` are those of hs.optim.AdamW, None takes torch's fused one."""

    level: str | None
    dtype: str
    options: dict[str, Any] | None = None

    @property
    def label(self) -> str:
        """The name of its row."""
        if self.level is None:
            return f"torch.amp {self.dtype}"
        optimizer = "torch's fused AdamW" if self.options is None else "hs.optim"
        more = "".join(f", {key}={value}" for key, value in (self.options or {}).items())
        return f"{label_of_ours()} {self.level} {self.dtype}, {optimizer}{more}"


TORCH, O1, O2 = Kind(None, "bf16"), Kind("O1", "bf16", {}), Kind("O2", "bf16", {})
MORE = (
    Kind("O2", "bf16", {"state_dtype": "8bit"}),
    Kind("O1", "bf16"),
    Kind("O2", "bf16"),
    Kind(None, "fp16"),
    Kind("O1", "fp16", {}),
    Kind("O2", "fp16", {}),
    Kind("O2", "bf16", {"release_gradients": True}),
    Kind(None, "fp32"),
)


def fused(net: nn.Module) -> torch.optim.Optimizer:
    """torch's own."""
    return torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)


class TorchAmp:
    """torch.autocast, GradScaler for fp16, clipping and fused AdamW behind a session's methods."""

    def __init__(self, net: nn.Module, dtype: str) -> None:
        self._net, self._dtype, self._optimizer = net, dtype, fused(net)
        self._scaler = torch.amp.GradScaler("cuda", enabled=dtype == "fp16")

    def autocast(self) -> Any:
        return torch.autocast("cuda", DTYPES[self._dtype], enabled=self._dtype != "fp32")

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def step(self, clip_norm: float) -> None:
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self._net.parameters(), clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()


def session(net: nn.Module, kind: Kind) -> Any:
    """What trains `net`."""
    if kind.level is None:
        return TorchAmp(net, kind.dtype)
    made = fused(net) if kind.options is None else hs.optim.AdamW(net.parameters(), lr=3e-4, **kind.options)
    return hs.prepare(net, made, level=kind.level, dtype=kind.dtype)


def training() -> None:
    """8 x 1,024 tokens keep the device busy, 1 x 64 the host; torch first and last."""
    for kind in (TORCH, O1, O2, *MORE[: 1 if TINY else None]):
        row(kind.label, lambda k=kind: train(k))
    row(f"{TORCH.label}, again", lambda: train(TORCH))


def compiled() -> None:
    """The same with every block under torch.compile; equal blocks are compiled once."""
    for kind in (TORCH, O1, O2):
        row(kind.label, lambda k=kind: train(k, compiled=True))
    row(f"{TORCH.label}, again", lambda: train(TORCH, compiled=True))


def train(kind: Kind, compiled: bool = False) -> dict[str, Any]:
    """Milliseconds a step, memory, losses."""
    torch.manual_seed(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    net = Transformer().to(DEVICE)
    tokens, context = sizes()[2], 8 if TINY else net.context
    data = [torch.randint(0, tokens, (2 if TINY else 8, context + 1), device=DEVICE) for _ in range(4)]
    amp = session(net, kind)
    if compiled:
        for block in net.blocks:
            block.compile(backend="aot_eager" if TINY else "inductor")
    losses: list[Tensor] = []

    def step(x: Tensor | None = None) -> None:
        x = data[len(losses) % 4] if x is None else x
        with amp.autocast():
            loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        losses.append(loss.detach())
        amp.backward(loss)
        amp.step(clip_norm=1.0)

    few, began = data[0][:1, :65].contiguous(), time.perf_counter()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    values: dict[str, Any] = {"first_four_steps_s": round(time.perf_counter() - began, 2)}
    values["step_ms"] = steps_ms(step, 8)
    peak = torch.cuda.max_memory_allocated()
    values |= {"peak_mib": round(peak / MIB), "peak_above_start_mib": round((peak - start) / MIB)}
    values["host_ms"] = host_ms(step, 2 if TINY else 5)
    values["loss, first and last"] = [round(loss.item(), 4) for loss in (losses[0], losses[-1])]
    for _ in range(3):
        step(few)
    values["1 x 64: step_ms"] = steps_ms(lambda: step(few), 20)
    return values


def launched() -> None:
    """What one step puts on the device, by name and time."""
    for level, dtype in (("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")):
        for options in ({}, None):
            kind = Kind(level, dtype, options)
            row(kind.label, lambda k=kind: of_one_step(k))


def of_one_step(kind: Kind) -> list[str]:
    """The launches of `step` after a few, without those of forward and backward."""
    net = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(DEVICE)
    amp, x, seen = session(net, kind), torch.randn(64, 512, device=DEVICE), list[str]()
    for _ in range(4):
        with amp.autocast():
            loss = net(x).float().square().mean()
        amp.backward(loss)
        seen = launches(lambda: amp.step(clip_norm=1.0))
    return seen


def regions() -> None:
    """Host milliseconds of what runs in a region, ours and torch's, whose turns have ours out of the way."""
    torch.manual_seed(0)
    width = sizes()[0]
    block, hidden = Block(width).to(DEVICE), torch.randn(1, 16, width, device=DEVICE)
    layer, x = nn.Linear(8, 8).to(DEVICE), torch.randn(4, 8, device=DEVICE)

    def trained() -> None:
        block(hidden).float().sum().backward()

    works: dict[str, tuple[Callable[[], object], int]] = {
        "200 times sin": (lambda: x.sin(), 200),
        "200 times linear": (lambda: layer(x), 200),
        "a block, trained": (trained, 1),
    }
    for name, (work, times) in works.items():

        def both(work: Callable[[], object] = work, times: int = times) -> dict[str, list[float]]:
            return {f"{who}_ms": in_region(who, work, times) for who in ("halfstep", "torch")}

        row(name, both)


def in_region(who: str, work: Callable[[], object], times: int) -> list[float]:
    """Host milliseconds of `times` runs of `work` in a region."""
    region = hs.autocast if who == "halfstep" else torch.autocast

    def inside() -> None:
        with region("cuda", torch.bfloat16):
            for _ in range(times):
                work()

    if who == "torch":
        our_regions.release()
    inside()
    return host_ms(inside)
