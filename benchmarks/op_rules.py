"""What each contested rule costs in error, time and memory: the 16-bit kernel against fp32 with casts.

Run: python benchmarks/op_rules.py. Writes op_rules.json, which the reasons in the op table cite.

For one op and dtype, on the same inputs of 16 bits, parameters in 16 bits and in fp32:
  keep   the op in 16 bits, as a region runs it under the rule KEEP
  torch  the op in 16 bits, as torch runs it outside a region
  full   inputs cast to fp32, the op in fp32, the result left in fp32
  round  `full`, then its result cast back to 16 bits, as the next LOW op would do
error is |result - float64 result| / mean |float64 result|, averaged; the same for the gradient of every
input and every parameter. Sums have 32, 4,096 and 65,536 terms; upstream gradients are positive, inputs of
both signs and of one. What is written of an error or ratio is the worst of these cases.
"""

import contextlib
import functools
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _machine import facts, result
from torch import Tensor

import halfstep as hs
from halfstep.policy.ops import TABLES, Rule

torch.set_num_threads(1)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (32, 4096, 65536)
WINDOWS = (32, 4096)
"""Of ops whose work grows with the square of their windows."""
PAIRS = 21
Tensors = dict[str, Tensor]
Op = Callable[..., Tensor]
Made = tuple[Op, Tensors]
"""An op and the tensors that it takes by name: those of `PARAMETERS` are fp32 at level O1."""
PARAMETERS = ("weight", "bias")
REGION = {
    word: hs.Policy(dtype).with_rules(
        keep=[n for n, r in TABLES["halfstep"].items() if r.rule is not Rule.LOW]
    )
    for word, dtype in DTYPES.items()
}


def values(*shape: int) -> Tensor:
    return torch.randn(shape) * 2 + 0.5


def rows(op: Op, names: str = "input", width: int = 16, plus: float = 0.0) -> Callable[[int], Made]:
    """Sums over n rows; parameters are as wide as a row."""
    return lambda n: (
        op,
        {k: values(*[width] if k in PARAMETERS else (n, width)) + plus for k in names.split()},
    )


def lines(op: Op, names: str = "input") -> Callable[[int], Made]:
    """Sums of n terms along the last of two dimensions."""
    return lambda n: (op, {name: values(4, n) for name in names.split()})


def images(op: Op) -> Callable[[int], Made]:
    """Sums of the n elements of a channel."""
    return lambda n: (op, {"input": values(n // 32, 8, 4, 8), "weight": values(8), "bias": values(8)})


def classes(x: Tensor) -> Tensor:
    return torch.arange(len(x)) % x.shape[1]


def labels(x: Tensor) -> Tensor:
    return (torch.arange(x.numel()).reshape(x.shape) % 2).to(x.dtype)


def sampled(n: int) -> Made:
    """An image of which n points are read."""
    op = functools.partial(F.grid_sample, align_corners=False)
    return lambda input, grid: op(input, grid), {
        "input": values(1, 4, 8, 8),
        "grid": torch.rand(1, n, 1, 2) - 0.5,
    }


OPS: dict[str, Callable[[int], Made]] = {
    "layer_norm": rows(
        lambda input, weight, bias: F.layer_norm(input, weight.shape, weight, bias), "input weight bias"
    ),
    "rms_norm": rows(lambda input, weight: F.rms_norm(input, weight.shape, weight), "input weight"),
    "group_norm": images(lambda input, weight, bias: F.group_norm(input, 4, weight, bias)),
    "batch_norm": images(lambda input, weight, bias: F.batch_norm(input, None, None, weight, bias, True)),
    "instance_norm": images(lambda input, weight, bias: F.instance_norm(input, None, None, weight, bias)),
    "softmax": lines(lambda input: F.softmax(input, -1)),
    "log_softmax": lines(lambda input: F.log_softmax(input, -1)),
    "max_pool": lambda n: (lambda input: F.max_pool1d(input, n, 1), {"input": values(1, 4, 2 * n)}),
    "max_pool3d": lambda n: (lambda input: F.max_pool3d(input, 2), {"input": values(1, 4, 4, 4, n)}),
    "avg_pool": lambda n: (lambda input: F.avg_pool1d(input, n, 1), {"input": values(1, 4, 2 * n)}),
    "adaptive_avg_pool": lambda n: (
        lambda input: F.adaptive_avg_pool1d(input, 1),
        {"input": values(1, 4, n)},
    ),
    "upsample": lambda n: (
        lambda input: F.interpolate(input, 2 * n, mode="linear"),
        {"input": values(1, 4, 2)},
    ),
    "pad": lambda n: (lambda input: F.pad(input, (n, 0), mode="replicate"), {"input": values(1, 4, 2)}),
    "grid_sampler": sampled,
    "relu": rows(torch.relu),
    "gelu": rows(F.gelu),
    "sigmoid": rows(torch.sigmoid),
    "exp": rows(torch.exp),
    "sum": rows(lambda input: input.sum(0)),
    "mean": rows(lambda input: input.mean(0)),
    "sum_of_squares": rows(lambda input: (input * input).sum(0)),
    "var": rows(lambda input: input.var(0), plus=8.0),
    "cumsum": rows(lambda input: input.cumsum(0)),
    "logcumsumexp": rows(lambda input: input.logcumsumexp(0)),
    "vecdot": lines(lambda input, other: torch.linalg.vecdot(input, other), "input other"),
    "index_add": lambda n: (
        lambda input, added: input.index_add(0, torch.zeros(n, dtype=torch.int32), added),
        {"input": values(1, 16), "added": values(n, 16)},
    ),
    "mse_loss": rows(lambda input, other: F.mse_loss(input, other), "input other"),
    "sigmoid_then_bce": rows(lambda input: F.binary_cross_entropy(input.sigmoid(), labels(input))),
    "bce_with_logits": rows(lambda input: F.binary_cross_entropy_with_logits(input, labels(input))),
    "norm": lines(lambda input: torch.linalg.vector_norm(input, dim=-1)),
    "cross_entropy": rows(lambda input: F.cross_entropy(input, classes(input))),
}
SQUARE = ("max_pool", "avg_pool")


def with_gradients(op: Op, tensors: Tensors) -> Tensors:
    """The result, as "", and the gradient of each tensor by its name."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    y = op(**leaves)
    generator = torch.Generator().manual_seed(1)
    upstream = (torch.rand(y.shape, generator=generator) * 0.5 + 0.25).to(torch.bfloat16).to(y.dtype)
    y.backward(upstream)
    return {"": y.detach(), **{name: t.grad for name, t in leaves.items()}}


def errors(got: Tensors, exact: Tensors) -> dict[str, float]:
    means = {k: e.abs().mean() for k, e in exact.items()}
    return {
        k: float((got[k].double() - e).abs().mean() / means[k]) for k, e in exact.items() if means[k] > 1e-12
    }


def kept(op: Op, word: str) -> Op:
    def run(**tensors: Tensor) -> Tensor:
        with hs.autocast("cpu", policy=REGION[word], kernels="native"):
            return op(**tensors)

    return run


def full(op: Op) -> Op:
    return lambda **tensors: op(**{name: t.float() for name, t in tensors.items()})


def rounded(op: Op, word: str) -> Op:
    return lambda **tensors: full(op)(**tensors).to(DTYPES[word])


def gradients_rounded(found: Tensors, word: str) -> Tensors:
    """Those of fp32 parameters are rounded once too, as a gradient of 16 bits is."""
    return {k: t.to(DTYPES[word]) for k, t in found.items()}


def saved_bytes(op: Op, tensors: Tensors) -> int:
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = op(**leaves)
    return sum(saved.values()) + y.untyped_storage().nbytes()


def time_ratio(ours: Op, other: Op, tensors: Tensors) -> float:
    """Return the ratio of their times, forward and backward, median over interleaved pairs."""
    ratios: list[float] = []
    for _ in range(PAIRS):
        spent = []
        for op in (ours, other):
            start = time.perf_counter()
            with_gradients(op, tensors)
            spent.append(time.perf_counter() - start)
        ratios.append(spent[0] / spent[1])
    return statistics.median(ratios)


def given(tensors: Tensors, dtype: torch.dtype, wide: bool, one_sign: bool) -> Tensors:
    """Values that bf16 and fp16 both hold, so that only the op's own error is seen."""
    held = {k: (t.abs() if one_sign else t).to(torch.bfloat16).to(torch.float16) for k, t in tensors.items()}
    return {k: t.float() if wide and k in PARAMETERS else t.to(dtype) for k, t in held.items()}


def measure(name: str, word: str) -> dict[str, float]:
    """Errors, and ratios to those of `round`, each the worst of its cases; time and bytes of the longest."""
    torch.manual_seed(0)
    row: dict[str, float] = {}

    def note(key: str, value: float) -> None:
        row[key] = max(row.get(key, 0.0), math.inf if math.isnan(value) else value)

    op, tensors = OPS[name](LENGTHS[0])
    for n, wide, one_sign in itertools.product(
        WINDOWS if name in SQUARE else LENGTHS, (False, True), (False, True)
    ):
        if wide and not set(tensors) & set(PARAMETERS):
            continue
        op, tensors = OPS[name](n)
        low = given(tensors, DTYPES[word], wide, one_sign)
        exact = with_gradients(op, {k: t.double() for k, t in low.items()})
        ways = {"keep": kept(op, word), "torch": op, "full": full(op), "round": rounded(op, word)}
        found = {}
        for way, run in ways.items():
            with contextlib.suppress(RuntimeError):  # torch refuses some mixed dtypes
                got = with_gradients(run, low)
                found[way] = errors(gradients_rounded(got, word) if way == "round" else got, exact)
        if "keep" not in found:
            continue
        for way, of in found.items():
            for k, value in of.items():
                key = f"grad_{way}" if k else way
                note(f"{'grad_' if k else ''}error_{way}", value)
                if way in ("keep", "torch"):
                    note(f"{key}_over_round", value / max(found["round"][k], 1e-12))
        note("keep_over_full", found["keep"][""] / max(found["full"][""], 1e-12))
    row["time_keep_over_round"] = time_ratio(kept(op, word), rounded(op, word), low)
    row["bytes_keep_over_full"] = saved_bytes(kept(op, word), low) / saved_bytes(full(op), low)
    return {key: float(f"{value:.3g}") for key, value in row.items()}


def main() -> None:
    # rms_norm says that it leaves its fused kernel when the weight is fp32.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in OPS:
        results[name] = {word: measure(name, word) for word in DTYPES}
        for word, found in results[name].items():
            keys = ("keep_over_round", "grad_keep_over_round", "torch_over_round", "grad_torch_over_round")
            shown = "  ".join(f"{key} {found[key]:.3g}" for key in (*keys, "time_keep_over_round"))
            print(f"{name:18} {word}  {shown}  bytes {found['bytes_keep_over_full']:.3g}", flush=True)
    document = {"lengths": LENGTHS, "lengths_of_windows": WINDOWS, "pairs": PAIRS, "ops": results}
    text = json.dumps({"machine": facts(), **document}, indent=1)
    result("op_rules").write_text(text.replace("Infinity", "null").replace("NaN", "null") + "\n")


if __name__ == "__main__":
    main()
