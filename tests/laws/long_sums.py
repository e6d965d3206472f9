"""The property of law 18: how far an op's output and gradients are from fp32's as its sums grow longer.

Cases come from torch's own lists of ops and modules (OpInfo, ModuleInfo), which no list of ours limits. A
sample is made longer by tiling one of its dimensions, in one tensor or wherever its size occurs; what the op
then refuses is no case. Values and upstream gradients are positive, so that sums are of one sign: errors are
those of rounding, and of an accumulator that stops growing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

SHORT = 32
MOST = 2**17  # elements of one tensor of a case with sums of 4,096
BF16, FP32 = torch.bfloat16, torch.float32
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A call and its arguments, of which a dimension of `size` can be longer: in all tensors, or in one."""

    name: str
    call: Call
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    size: int
    place: tuple[int, int] | None = None  # tensor and dimension

    def long(self, n: int) -> Any:
        """The arguments with sums of about n terms; ValueError where they are too large."""
        times, numbers = max(1, n // self.size), itertools.count()

        def grow(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            number = next(numbers)
            dims = [d for d, s in enumerate(leaf.shape) if s == self.size]
            if self.place is not None:
                dims = [self.place[1]] if number == self.place[0] else []
            repeats = [times if d in dims else 1 for d in range(leaf.dim())]
            if leaf.numel() * math.prod(repeats) > MOST * max(1, n // 4096):
                raise ValueError("too large")
            return leaf.repeat(repeats) if dims else leaf

        return pytree.tree_map(grow, self.arguments)


def positive(leaf: Any) -> Any:
    """Values of one sign that bf16 holds, between 0.25 and 0.95, where most ops are defined."""
    if not (isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided):
        return leaf
    values = leaf.detach().float().frac().abs() * 0.7 + 0.25
    return values.nan_to_num(0.5).to(BF16).float()


def cases(name: str, call: Call, *args: Any, **kwargs: Any) -> Iterator[Case]:
    """All ways to make one sample longer."""
    arguments: Any = pytree.tree_map(positive, (args, kwargs))
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
    for size in sorted({s for t in tensors for s in t.shape if s > 1}):
        yield Case(f"{name}, all of size {size}", call, arguments, size)
    for i, t in enumerate(tensors[:4]):
        for d, s in enumerate(t.shape):
            if s:
                yield Case(f"{name}, tensor {i} dimension {d}", call, arguments, s, (i, d))


def run(
    call: Call, arguments: Any, dtype: torch.dtype, region: Any = None, moved: float = 0.0
) -> list[Tensor]:
    """Outputs, and gradients of all floating inputs, under positive upstream gradients.

    moved: by this share, up or down, all values and upstream gradients are moved first.
    """
    leaves: list[Tensor] = []
    generator = torch.Generator().manual_seed(1)

    def near(t: Tensor) -> Tensor:
        return t * (1 + moved * torch.empty(t.shape).uniform_(-1, 1, generator=generator)) if moved else t

    def ready(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf = near(leaf.detach()).to(dtype).requires_grad_()
            leaves.append(leaf)
        return leaf

    args, kwargs = pytree.tree_map(ready, arguments)
    torch.manual_seed(0)
    with region or contextlib.nullcontext():
        out = call(*args, **kwargs)
    outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    trained = [t for t in outputs if t.requires_grad]
    upstream = [
        near(torch.linspace(0.25, 0.75, t.numel()).to(BF16).float()).reshape(t.shape).to(t.dtype)
        for t in trained
    ]
    found = torch.autograd.grad(trained, leaves, upstream, allow_unused=True) if trained else ()
    gradients = [g for g in found if g is not None and g.layout is torch.strided]
    return [t.detach() for t in outputs] + gradients


def errors(got: list[Tensor], right: list[Tensor]) -> list[float]:
    """The relative error of each; nan where there is no number to compare with."""
    found: list[float] = []
    for g, r in zip(got, right, strict=True):
        norm = r.double().norm()
        usable = norm > 0 and bool(r.isfinite().all())
        found.append(float((g.double() - r.double()).norm() / norm) if usable else math.nan)
    return found


class Growth(NamedTuple):
    """Errors of an output or gradient: of short sums, of long ones, and what moved inputs do to those."""

    short: float
    long: float
    moved: float

    def outgrows(self, dtype: torch.dtype = BF16) -> bool:
        """Whether a long sum lost more than rounding its terms or its result would.

        Where fp32 itself moves by a tenth as values move by half a unit of 16 bits, nothing can be said.
        """
        unit = torch.finfo(dtype).eps / 2
        return not self.moved > 0.1 and self.long > max(5 * unit, 3 * self.short, 5 * self.moved)


def growth(case: Case, region: Call, n: int, dtype: torch.dtype = BF16) -> list[Growth]:
    """How errors grow from sums of 32 terms to sums of n; what the op refuses raises what it raises."""
    long = case.long(n)
    right = run(case.call, long, FP32)
    longs = errors(run(case.call, long, dtype, region()), right)
    if not any(Growth(0.0, e, 0.0).outgrows(dtype) for e in longs):
        return [Growth(0.0, e, 0.0) for e in longs]
    short = case.long(SHORT)
    shorts = errors(run(case.call, short, dtype, region()), run(case.call, short, FP32))
    moved = errors(run(case.call, long, FP32, moved=torch.finfo(dtype).eps / 2), right)
    return [Growth(*numbers) for numbers in zip(shorts, longs, moved, strict=True)]


def op_cases(share: int = 1, samples: int = 2, each: int = 5) -> Iterator[tuple[str, list[Case]]]:
    """Cases of each differentiable op, or of one op in `share`, by its name."""
    for info in op_db:
        if not info.supports_autograd or zlib.crc32(info.full_name.encode()) % share:
            continue
        torch.manual_seed(0)
        found: list[Case] = []
        with contextlib.suppress(Exception):  # what it is to be given needs more than a CPU
            for sample in itertools.islice(info.sample_inputs("cpu", FP32, requires_grad=False), samples):
                made = cases(info.full_name, info.op, sample.input, *sample.args, **sample.kwargs)
                found += itertools.islice(made, each)
        yield info.full_name, found


def module_cases(share: int = 1) -> Iterator[tuple[str, list[Case]]]:
    """Cases of each module of torch, its parameters among the arguments."""
    for info in module_db:
        if zlib.crc32(info.name.encode()) % share:
            continue
        torch.manual_seed(0)
        found: list[Case] = []
        with contextlib.suppress(Exception):
            made = info.module_inputs_func(info, device="cpu", dtype=FP32, requires_grad=False, training=True)
            for sample in itertools.islice((m for m in made if m.forward_input is not None), 2):
                module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
                given = sample.forward_input
                call = _with_parameters(module)
                parameters = dict(module.named_parameters())
                made_of = cases(info.name, call, parameters, *given.args, **given.kwargs)
                fixed = {s for p in parameters.values() for s in p.shape}  # what its parameters say stays
                found += [
                    c
                    for c in made_of
                    if (c.size not in fixed if c.place is None else c.place[0] >= len(parameters))
                ][:6]
        yield info.name, found


def _with_parameters(module: nn.Module) -> Call:
    def call(parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        return torch.func.functional_call(module, (parameters, buffers), args, kwargs)

    return call
