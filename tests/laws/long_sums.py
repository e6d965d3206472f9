"""The property of law 18: how far an op's output and gradients are from fp64's as its sums grow longer.

Cases come from torch's own lists of ops and modules (OpInfo, ModuleInfo), which no list of ours limits. A
sample is made longer by tiling one of its dimensions, in one tensor or wherever its size occurs, or by
enlarging a number among its arguments, such as the size of a window; what the op then refuses is no case.
Values and upstream gradients are positive, so that sums are of one sign: errors are those of rounding, and
of an accumulator that stops growing.
"""

from __future__ import annotations

import contextlib
import functools
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
MOST_OUTPUTS = 256  # of an op that splits a tensor, which has no sum
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A call and its arguments, of which a dimension of `size` can be longer: in all tensors, or in one.

    Or the integer `number[0]` is larger, over the last `number[1]` dimensions of the first tensor.
    """

    name: str
    call: Call
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    size: int
    place: tuple[int, int] | None = None  # tensor and dimension
    parameters: int | None = None  # so many of the first tensors are weights; of an op, all but the first
    number: tuple[int, int] | None = None

    def is_weight(self, number: int) -> bool:
        """Whether the tensor of this number is fp32 at O1."""
        return number > 0 if self.parameters is None else number < self.parameters

    def long(self, n: int) -> Any:
        """The arguments with sums of about n terms; ValueError where they are too large."""
        times, numbers, integers = max(1, n // self.size), itertools.count(), itertools.count()
        which, over = self.number or (None, 0)
        size = round(n ** (1 / max(1, over)))

        def grow(leaf: Any) -> Any:
            if type(leaf) is int and next(integers) == which:
                return size
            if not isinstance(leaf, Tensor):
                return leaf
            number = next(numbers)
            dims = [d for d, s in enumerate(leaf.shape) if s == self.size]
            if self.place is not None:
                dims = [self.place[1]] if number == self.place[0] else []
            repeats = [times if d in dims else 1 for d in range(leaf.dim())]
            if self.number is not None:
                wide = range(leaf.dim() - over, leaf.dim()) if number == (self.parameters or 0) else ()
                repeats = [-(-2 * size // s) if d in wide else 1 for d, s in enumerate(leaf.shape)]
                dims = [*wide]
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


def cases(name: str, call: Call, *args: Any, parameters: int | None = None, **kwargs: Any) -> Iterator[Case]:
    """All ways to make one sample longer; so many first tensors are parameters and stay as they are."""
    arguments: Any = pytree.tree_map(positive, (args, kwargs))
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
    first = parameters or 0
    fixed = {s for t in tensors[:first] for s in t.shape}
    for size in sorted({s for t in tensors[first:] for s in t.shape if s > 1} - fixed):
        yield Case(f"{name}, all of size {size}", call, arguments, size, parameters=parameters)
    for i, t in list(enumerate(tensors))[first : first + 4]:
        for d, s in enumerate(t.shape):
            if s:
                yield Case(f"{name}, tensor {i} dimension {d}", call, arguments, s, (i, d), parameters)


def cases_of_numbers(name: str, call: Call, *args: Any, **kwargs: Any) -> Iterator[Case]:
    """All ways to enlarge a number of a sample, alone or over dimensions of the first tensor."""
    arguments: Any = pytree.tree_map(positive, (args, kwargs))
    integers = [i for i in pytree.tree_leaves(arguments) if type(i) is int]
    for which, over in itertools.product(range(len(integers)), (0, 1, 2)):
        word = f"{name}, number {which} over {over} dimensions"
        yield Case(word, call, arguments, 1, number=(which, over))


class Found(NamedTuple):
    """Outputs of a call, and gradients of its floating inputs."""

    outputs: list[Tensor]
    gradients: list[Tensor]


class Way(NamedTuple):
    """How a call is run: its region, its dtype, whether its weights are fp32, and what compiles it."""

    region: Call = contextlib.nullcontext
    dtype: torch.dtype = FP64
    fp32_weights: bool = False
    backend: str | None = None


EXACT = Way()


def run(case: Case, arguments: Any, way: Way = EXACT, moved: float = 0.0, scale: float = 1.0) -> Found:
    """Outputs, and gradients of all floating inputs, under positive upstream gradients times `scale`.

    moved: by this share, up or down, all values and upstream gradients are moved first.
    """
    leaves: list[Tensor] = []
    generator, numbers = torch.Generator().manual_seed(1), itertools.count()

    def near(t: Tensor) -> Tensor:
        return t * (1 + moved * torch.empty(t.shape).uniform_(-1, 1, generator=generator)) if moved else t

    def ready(leaf: Any) -> Any:
        is_wide = isinstance(leaf, Tensor) and way.fp32_weights and case.is_weight(next(numbers))
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf = near(leaf.detach()).to(FP32 if is_wide else way.dtype).requires_grad_()
            leaves.append(leaf)
        return leaf

    args, kwargs = pytree.tree_map(ready, arguments)
    torch.manual_seed(0)
    call = case.call
    if way.backend:
        torch._dynamo.reset()
        call = torch.compile(call, backend=way.backend, dynamic=False)
    with way.region():
        out = call(*args, **kwargs)
    outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    trained = [t for t in outputs if t.requires_grad]
    upstream = [
        near(scale * torch.linspace(0.25, 0.75, t.numel()).to(BF16).float()).reshape(t.shape).to(t.dtype)
        for t in trained
    ]
    found = torch.autograd.grad(trained, leaves, upstream, allow_unused=True) if trained else ()
    gradients = [g for g in found if g is not None and g.layout is torch.strided]
    return Found([t.detach() for t in outputs], gradients)


def usable(right: Tensor, dtype: torch.dtype) -> bool:
    """Whether there is a number to compare with, and one that fp16 holds."""
    norm = right.double().norm()
    if not (norm > 0 and bool(right.isfinite().all())):
        return False
    return dtype is not torch.float16 or bool(
        right.abs().max() < 2.0**15 and norm / right.numel() ** 0.5 > 2.0**-12
    )


def errors(got: Found, right: Found, dtype: torch.dtype, scale: float = 1.0) -> list[float]:
    """The relative error of each output and gradient; nan where there is no number to compare with."""

    def error(g: Tensor, r: Tensor) -> float:
        r = r.double()
        return float((g.double() - r).norm() / r.norm()) if usable(r, dtype) else math.nan

    outputs = [error(g, r) for g, r in zip(got.outputs, right.outputs, strict=True)]
    in_range = dtype is not torch.float16 or all(bool((r.abs() < 2.0**15).all()) for r in right.outputs)
    pairs = zip(got.gradients, right.gradients, strict=True)
    return outputs + [error(g, r * scale) if in_range else math.nan for g, r in pairs]


class Growth(NamedTuple):
    """Errors of an output or gradient: of short sums, of long ones, and of those in fp32 of moved inputs."""

    short: float
    long: float
    moved: float

    def outgrows(self, dtype: torch.dtype = BF16) -> bool:
        """Whether a long sum lost more than rounding its terms or its result would.

        Where fp32 itself moves by a tenth as values move by half a unit of 16 bits, nothing can be said.
        """
        unit = torch.finfo(dtype).eps / 2
        return not self.moved > 0.1 and self.long > max(5 * unit, 3 * self.short, 5 * self.moved)


class Long:
    """A case with sums of n terms, and what fp64 makes of it; ValueError where it is too large."""

    def __init__(self, case: Case, n: int) -> None:
        self.case, self.arguments = case, case.long(n)
        self.right = run(case, self.arguments)
        total = sum(t.numel() for t in self.right.outputs)
        if len(self.right.outputs) > MOST_OUTPUTS or total > 4 * MOST * max(1, n // 4096):
            raise ValueError("too large")

    @functools.cached_property
    def scale(self) -> float:
        """A power of 2 that brings gradients near 1, as a loss scale does for fp16."""
        largest = max((float(g.abs().max()) for g in self.right.gradients if g.numel()), default=1.0)
        return 2.0 ** min(14, max(0, round(-math.log2(largest)))) if 0 < largest < math.inf else 1.0

    def errors(self, way: Way) -> list[float]:
        """Of this way; where an op refuses fp32 weights beside 16 bits, all are 16 bits."""
        scale = self.scale if way.dtype is torch.float16 else 1.0
        try:
            got = run(self.case, self.arguments, way, scale=scale)
        except Exception:
            if not way.fp32_weights:
                raise
            got = run(self.case, self.arguments, way._replace(fp32_weights=False), scale=scale)
        return errors(got, self.right, way.dtype, scale)

    def growth(self, way: Way) -> list[Growth]:
        """How errors grow from sums of 32 terms; what the op refuses raises what it raises."""
        longs = self.errors(way)
        if not any(Growth(0.0, e, 0.0).outgrows(way.dtype) for e in longs):
            return [Growth(0.0, e, 0.0) for e in longs]
        shorts = Long(self.case, SHORT).errors(way)
        nearby = run(self.case, self.arguments, Way(dtype=FP32), moved=torch.finfo(way.dtype).eps / 2)
        moved = errors(nearby, self.right, FP32)
        return [Growth(*numbers) for numbers in zip(shorts, longs, moved, strict=True)]


def op_cases(
    share: int = 1, samples: int = 2, each: int = 5, numbers: bool = False
) -> Iterator[tuple[str, list[Case]]]:
    """Cases of each differentiable op, or of one op in `share`, by its name; `numbers`: enlarged ones too."""
    for info in op_db:
        if not info.supports_autograd or zlib.crc32(info.full_name.encode()) % share:
            continue
        torch.manual_seed(0)
        found: list[Case] = []
        with contextlib.suppress(Exception):  # what it is to be given needs more than a CPU
            for sample in itertools.islice(info.sample_inputs("cpu", FP32, requires_grad=False), samples):
                made = cases(info.full_name, info.op, sample.input, *sample.args, **sample.kwargs)
                found += itertools.islice(made, each)
            for sample in itertools.islice(info.sample_inputs("cpu", FP32, requires_grad=False), 8 * numbers):
                found += cases_of_numbers(
                    info.full_name, info.op, sample.input, *sample.args, **sample.kwargs
                )
        yield info.full_name, found


def module_cases(share: int = 1, each: int = 6) -> Iterator[tuple[str, list[Case]]]:
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
                count = len(parameters)
                made_of = cases(info.name, call, parameters, *given.args, parameters=count, **given.kwargs)
                found += itertools.islice(made_of, each)
        yield info.name, found


def steps_case(name: str, layer: nn.RNNBase, x: Tensor) -> Case:
    """A recurrent layer on x (steps, 1, width), of which more sequences make its sums longer than steps."""
    parameters = dict(layer.named_parameters())
    arguments: Any = pytree.tree_map(positive, ((parameters, x), {}))
    count = len(parameters)
    return Case(f"{name}, {len(x)} steps", _with_parameters(layer), arguments, len(x), (count, 1), count)


def _with_parameters(module: nn.Module) -> Call:
    def call(parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        wide = FP64 if any(t.dtype is FP64 for t in given) else FP32  # statistics, as they are at each level
        made = {name: b.clone() for name, b in module.named_buffers()}
        buffers = {name: b.to(wide) if b.is_floating_point() else b for name, b in made.items()}
        return torch.func.functional_call(module, (parameters, buffers), args, kwargs)

    return call
