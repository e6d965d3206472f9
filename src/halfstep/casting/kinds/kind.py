"""What the kinds of op have in common: how they are divided into classes, measured, met and run.

Each kind has one file: its geometries, its implementations, its probes, and how the arguments of torch's ops
are read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.torch_private import DispatchKey, exclude_key, is_key_excluded

SIZES = ("tiny", "small", "medium", "large")
F32 = torch.float32
Grads = tuple[Tensor | None, ...]
Args = Sequence[Any]
Call = Callable[[Args, Mapping[str, Any]], Any]
Candidates = dict[str, Callable[[], object]]
"""By implementation: a call without arguments, to be timed."""


@dataclass(frozen=True, order=True)
class OpClass:
    """Ops that are taken to be equally fast: kind, dtype by name, geometry, size and torch's threads."""

    op: str
    dtype: str
    geometry: str
    size: str
    threads: int


@dataclass(frozen=True)
class Choice:
    """The implementation of each direction; a direction that is not needed says `native`."""

    forward: str = "native"
    input: str = "native"
    weight: str = "native"

    @property
    def is_native(self) -> bool:
        """Whether torch's own kernels do all of it."""
        return self.forward == self.input == self.weight == "native"


NATIVE = Choice()
ROUNDED = Choice("rounded", "rounded", "rounded")


class OpCall(NamedTuple):
    """One op met with certain arguments: its class, what needs a gradient, and how a choice runs it."""

    op: str
    geometry: str
    work: float
    needs: str
    run: Callable[[Choice, Args, Mapping[str, Any]], Any]


Reader = Callable[[Args, Mapping[str, Any]], OpCall | None]
"""From the arguments of an op: how it was met; None where no implementation of ours fits."""


@dataclass(frozen=True)
class Kind:
    """Ops that share their arithmetic.

    geometries: what they are divided into, the usual one first. limits: multiplications at which a size
    ends, between those of the probes. probe: the implementations of one direction of a class, on tensors of
    its own. readers: by the name of an op's overload. stands_for: ops without a Function of ours, rounded as
    a whole where this kind is. one_backward: one kernel gives all gradients, and the direction `input` is
    that of `weight` too. layer: an op of a class in fp32 and what it is called with, where a small op may
    win less than the Python around it costs.
    """

    geometries: tuple[str, ...]
    limits: tuple[float, float, float]
    probe: Callable[[OpClass, str], Candidates]
    readers: Mapping[str, Reader] = field(default_factory=dict[str, Reader])
    stands_for: tuple[str, ...] = ()
    one_backward: bool = False
    layer: Callable[[OpClass], tuple[Callable[..., Tensor], list[Tensor]]] | None = None


def sizes(geometry: str) -> tuple[str, ...]:
    """Return the sizes that a geometry is divided into; beyond the last of them nothing changes."""
    common = geometry[:2] in ("1d", "3d", "th") or geometry.endswith("channels_last")
    return SIZES[:3] if common else SIZES


def values_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Ordinary numbers between -1 and 1; no generator is asked."""
    count = math.prod(shape)
    return (
        torch.linspace(-1, 1, count, dtype=torch.float32, device="cpu")
        .add_(seed / 97)
        .to(dtype)
        .reshape(shape)
    )


def ways(names: Iterable[str], function: Callable[..., object], *args: Any) -> Candidates:
    """Return the function with these arguments, by every implementation that is named."""
    return {name: functools.partial(function, name, *args) for name in names}


def needs_of(first: Tensor, second: Tensor) -> str:
    """Return which of an input and a weight need a gradient, as `Row.needs` says it."""
    if not torch.is_grad_enabled():
        return ""
    return ("i" if first.requires_grad else "") + ("w" if second.requires_grad else "")


def argument(args: Args, place: int, default: Any) -> Any:
    """Return a positional argument, or what holds where it was not given."""
    return args[place] if len(args) > place else default


@contextmanager
def no_autocast() -> Generator[None]:
    """A backward runs in the dtypes it was made with, also where it is called inside a region."""
    before = is_key_excluded(DispatchKey.AutocastCPU)
    exclude_key(DispatchKey.AutocastCPU, True)
    try:
        yield
    finally:
        exclude_key(DispatchKey.AutocastCPU, before)
