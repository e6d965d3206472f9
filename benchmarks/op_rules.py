"""What each contested rule costs in error, time and memory: the 16-bit kernel against fp32 with casts.

Run: python benchmarks/op_rules.py. Writes op_rules.json, which the reasons in the op table cite.

For one op and dtype, on the same 16-bit inputs:
  keep   the op in 16 bits
  full   inputs cast to fp32, the op in fp32, the result left in fp32
  round  `full`, then its result cast back to 16 bits, as the next LOW op would do
error is |result - float64 result| / mean |float64 result|, averaged; the same for the input gradient.
"""

import json
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _machine import facts, result
from torch import Tensor

torch.set_num_threads(1)
torch.manual_seed(0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PAIRS = 21


def image(n: int = 8, c: int = 32, s: int = 32) -> Tensor:
    return torch.randn(n, c, s, s) * 2 + 0.5


def tokens(rows: int = 512, width: int = 768) -> Tensor:
    return torch.randn(rows, width) * 2 + 0.5


def affine(width: int) -> tuple[Tensor, Tensor]:
    return torch.rand(width) + 0.5, torch.randn(width) * 0.1


def both_16_bit(t: Tensor) -> Tensor:
    """Round to values that bf16 and fp16 both hold, so that only the op's own error is seen."""
    return t.to(torch.bfloat16).to(torch.float16).float()


def same(x: Tensor, p: Tensor) -> Tensor:
    return p.to(x.dtype)


def weight(x: Tensor, p: Tensor) -> Tensor:
    """Weights stay fp32 beside 16-bit inputs, as they do at O1."""
    return p.double() if x.dtype == torch.float64 else p


W768, B768 = affine(768)
W32, B32 = affine(32)
GRID = both_16_bit(torch.rand(8, 32, 32, 2) * 2 - 1)
OTHER = both_16_bit(tokens())
LABELS = (torch.arange(512 * 768).reshape(512, 768) % 2).float()
OPS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (768,), weight(x, W768), weight(x, B768)), tokens()),
    "rms_norm": (lambda x: F.rms_norm(x, (768,), weight(x, W768)), tokens()),
    "group_norm": (lambda x: F.group_norm(x, 8, weight(x, W32), weight(x, B32)), image()),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, weight(x, W32), weight(x, B32), True), image()),
    "instance_norm": (lambda x: F.instance_norm(x, None, None, weight(x, W32), weight(x, B32)), image()),
    "softmax": (lambda x: F.softmax(x, -1), tokens(512, 1024)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), tokens(512, 1024)),
    "max_pool": (lambda x: F.max_pool2d(x, 2), image()),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), image()),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 1), image()),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image(4, 16, 32)),
    "pad": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), image()),
    "grid_sampler": (lambda x: F.grid_sample(x, same(x, GRID), align_corners=False), image()),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), image(4, 16, 16).unflatten(1, (4, 4))),
    "relu": (torch.relu, tokens()),
    "gelu": (F.gelu, tokens()),
    "sigmoid": (torch.sigmoid, tokens()),
    "exp": (torch.exp, tokens()),
    "sum": (lambda x: x.sum(0), tokens(4096, 256)),
    "mean": (lambda x: x.mean(0), tokens(4096, 256)),
    "sum_of_squares": (lambda x: (x * x).sum(0), tokens(65536, 16)),
    "var": (lambda x: x.var(0), tokens(4096, 256) + 8),
    "cumsum": (lambda x: x.cumsum(0), tokens(4096, 64)),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), tokens(1024, 64)),
    "vecdot": (lambda x: torch.linalg.vecdot(x, same(x, OTHER)), tokens()),
    "mse_loss": (lambda x: F.mse_loss(x, same(x, OTHER)), tokens()),
    "sigmoid_then_bce": (lambda x: F.binary_cross_entropy(x.sigmoid(), same(x, LABELS)), tokens() * 2),
    "bce_with_logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, same(x, LABELS)),
        tokens() * 2,
    ),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), tokens()),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(512) % 1024), tokens(512, 1024)),
}


def with_gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = fn(x)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype)
    y.backward(upstream)
    return y.detach(), x.grad


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().mean() / exact.abs().mean())


def as_full(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x.float())


def as_round(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x.float()).to(x.dtype)


def saved_bytes(fn: Callable[[Tensor], Tensor], x: Tensor) -> int:
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fn(x)
    return sum(kept.values()) + y.untyped_storage().nbytes()


def time_ratio(fn: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return time of keep / time of round, forward and backward, median over interleaved pairs."""
    ratios: list[float] = []
    for _ in range(PAIRS):
        spent = []
        for way in (fn, as_round(fn)):
            start = time.perf_counter()
            with_gradient(way, x)
            spent.append(time.perf_counter() - start)
        ratios.append(spent[0] / spent[1])
    return statistics.median(ratios)


def measure(fn: Callable[[Tensor], Tensor], x32: Tensor, dtype: torch.dtype) -> dict[str, float]:
    x = x32.to(dtype)
    exact, exact_grad = with_gradient(fn, x.double())
    row: dict[str, float] = {}
    for word, way in (("keep", fn), ("full", as_full(fn)), ("round", as_round(fn))):
        value, grad = with_gradient(way, x)
        row[f"error_{word}"] = error(value, exact)
        row[f"grad_error_{word}"] = error(grad, exact_grad)
    row["keep_over_round"] = row["error_keep"] / max(row["error_round"], 1e-12)
    row["keep_over_full"] = row["error_keep"] / max(row["error_full"], 1e-12)
    row["grad_keep_over_round"] = row["grad_error_keep"] / max(row["grad_error_round"], 1e-12)
    row["time_keep_over_round"] = time_ratio(fn, x)
    row["bytes_keep_over_full"] = saved_bytes(fn, x) / saved_bytes(as_full(fn), x)
    return {key: float(f"{value:.3g}") for key, value in row.items()}


def main() -> None:
    # rms_norm says that it leaves its fused kernel when the weight is fp32.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    results = {
        name: {word: measure(fn, x, dtype) for word, dtype in DTYPES.items()} for name, (fn, x) in OPS.items()
    }
    document = {
        "pairs": PAIRS,
        "ops": results,
    }
    text = json.dumps({"machine": facts(), **document}, indent=1)
    result("op_rules").write_text(text.replace("Infinity", "null").replace("NaN", "null") + "\n")
    for name, row in results.items():
        for word, values in row.items():
            keys = ("keep_over_round", "keep_over_full", "grad_keep_over_round", "time_keep_over_round")
            shown = "  ".join(f"{key} {values[key]:.3g}" for key in (*keys, "bytes_keep_over_full"))
            print(f"{name:18} {word}  {shown}")


if __name__ == "__main__":
    main()
