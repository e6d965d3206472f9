"""What a tape is made of: ops that ran, and values that must be finite and are not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.numerics.histogram import amax
from halfstep.numerics.locations import OpLocation, op_label
from halfstep.torch_private import schema_of, tree_flatten


def is_finite(t: Tensor) -> bool:
    """Whether every element is finite (reads the device); integer tensors always are."""
    if not (t.is_floating_point() or t.is_complex()) or t.numel() == 0 or t.is_meta:
        return True
    return math.isfinite(amax(t).item())


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


@dataclass(eq=False)
class Node:
    """One op that ran. `parents[i]`: which node made the i-th tensor argument, as which of its results
    (None: it came from outside the step).

    `origins`: indices of the nodes whose non-finite results reached this one; its own index if it is one.
    `names`: for an origin, its tensors by the names of the user's variables.
    """

    index: int
    func: Any
    phase: str
    location: OpLocation
    args: Any = ()
    kwargs: Any = None
    outs: list[Tensor] = field(default_factory=list)
    parents: list[tuple[Node, int] | None] = field(default_factory=list)
    origins: frozenset[int] = frozenset()
    intended: bool = False
    outside: list[Tensor] = field(default_factory=list)
    dropped: bool = False
    names: dict[str, Tensor] = field(default_factory=dict)

    @property
    def aten(self) -> str:
        """Full name of the kernel: `aten.mm.default`."""
        return str(self.func)

    @property
    def base(self) -> str:
        """The op's name without namespace and overload: `mm`."""
        return schema_of(self.func).name.split("::")[-1]

    @property
    def op(self) -> str:
        """The op as the user called it (`linear`), or the kernel's name where no call is known.

        A cast is a `cast`, unless it rounds the result of the same call: that is part of the op.
        """
        if self.base == "_to_copy":
            made = self.parents[0][0] if self.parents and self.parents[0] else None
            if made is None or made.base == "_to_copy" or not 0 < self.location.call == made.location.call:
                return "cast"
        return op_label(self.location.function, self.base)

    def tensors(self) -> list[Tensor]:
        """The tensor arguments, as they were before the op ran."""
        return tensors_in((self.args, self.kwargs))

    def given(self) -> list[Tensor]:
        """What the user's call was given, where this op only rounds its result; else its own tensors."""
        if self.base != "_to_copy" or self.op == "cast" or not self.outs:
            return self.tensors()
        return self._given_to_call(self.outs[0].dtype)

    def _given_to_call(self, dtype: torch.dtype) -> list[Tensor]:
        """Follows ops of the same call to what they began with; what autocast made `dtype` is that."""
        found: list[Tensor] = []
        for t, parent in zip(self.tensors(), self.parents):
            made = None if parent is None else parent[0]
            own = made is not None and not made.dropped and made.location.call == self.location.call
            if made is None or not own or (made.base == "_to_copy" and t.dtype == dtype):
                found.append(t)
            else:
                found += made._given_to_call(dtype)
        return found


@dataclass(frozen=True)
class End:
    """A value that must be finite and is not: `kind` is loss, gradient, parameter, buffer or state."""

    kind: str
    name: str
    origins: frozenset[int]
