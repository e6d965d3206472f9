"""What tensors are and where they lie, looked at in one pass: compiled where torch can be asked, else Python.

The kernels get bare addresses; what is said here, in the very step that uses them, is all that stands behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

_version = vars(torch._C.TensorBase)["_version"].__get__  # pyright: ignore[reportPrivateUsage]


class Facts(Protocol):
    """Where some tensors lie and what they are, as it was when this was made; keeps them alive."""

    def hold(self) -> bool:
        """Whether the tensors still are what and where they were."""
        ...


class Likeness(Protocol):
    """What some tensors were when this was made; they themselves may be gone."""

    addresses: Any
    """int64 array: where the tensors of the last `alike` lie."""

    def alike(self, others: Sequence[Any]) -> bool:
        """Whether `others` are such tensors, at any address; notes the addresses."""
        ...


class Gradients(Protocol):
    """The gradients of some parameters, which are others at every step."""

    addresses: Any
    """int64 array, one and the same for good: where the gradients of the last `alike` lie."""

    def alike(self) -> bool:
        """Whether every parameter has a gradient such as it had when this was made."""
        ...


class Versions(Protocol):
    """How often tensors were changed, by autograd's count."""

    def total(self) -> int:
        """The sum over all."""
        ...

    def count(self) -> None:
        """Tell autograd that each was changed in place."""
        ...


def facts_of(tensors: Sequence[Tensor]) -> Facts:
    """The facts of tensors that have an address; the compiled way where there is one."""
    kernels = compiled_facts()
    return PlainFacts(tensors) if kernels is None else CompiledFacts(tensors, kernels)


def likeness_of(tensors: Sequence[Tensor]) -> Likeness:
    """What these tensors are, to be looked for in others."""
    kernels = compiled_facts()
    return PlainLikeness(tensors) if kernels is None else CompiledLikeness(tensors, kernels)


def gradients_of(params: Sequence[Tensor]) -> Gradients:
    """The gradients that lie at `params`, each of which has one."""
    kernels = compiled_facts()
    return PlainGradients(params) if kernels is None else _CompiledGradients(params, kernels)


def versions_of(tensors: Iterable[Tensor]) -> Versions:
    """The versions of tensors that are no inference tensors."""
    kernels, known = compiled_facts(), list(tensors)
    return PlainVersions(known) if kernels is None else _CompiledVersions(known, kernels)


# ---- compiled ---------------------------------------------------------------------------------------------


@cache
def compiled_facts() -> Any:
    """The kernels' module, where what torch answers them is what it says in Python; else None."""
    try:
        from halfstep.kernels.cpu import facts
    except ImportError:
        return None
    return facts if _answers_right(facts) else None


def addresses_of(objects: Sequence[object]) -> Any:
    """Where Python objects lie, an int64 array: whoever hands it to compiled code keeps them alive."""
    return np.fromiter(map(id, objects), np.int64, len(objects))


class _Tensors:
    """Tensors, and the addresses of their C++ ones, as compiled code is given them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        from halfstep.kernels.cpu import torch_functions

        inside, asked = torch_functions.inside(), torch_functions.table()
        assert inside is not None
        self._alive = list(tensors)
        self._places = addresses_of(self._alive) + inside
        self.given = asked.ctypes.data, len(tensors), self._places.ctypes.data


class CompiledLikeness:
    """`Likeness` by one call of compiled code."""

    def __init__(self, tensors: Sequence[Tensor], kernels: Any) -> None:
        given = _Tensors(tensors)
        self._compare = kernels.comparer()
        self.addresses = np.zeros(len(tensors), np.int64)
        self._facts = np.zeros(sum(kernels.HEAD + 2 * t.dim() for t in tensors), np.int64)
        self._scratch = np.zeros(kernels.SCRATCH, np.int64)
        self._rest = self._scratch.ctypes.data, self._facts.ctypes.data
        if kernels.reader()(*given.given, *self._rest) != len(self._facts):
            raise AssertionError("a tensor without an address was given to the kernels")
        self.asked, count, _ = given.given
        self._noted = self.addresses.ctypes.data
        self._others = self.asked, count

    def alike_at(self, places: int) -> bool:
        """`alike` of tensors of which these are the C++ ones' addresses, as compiled code wrote them."""
        return self._compare(*self._others, places, *self._rest, self._noted)

    def alike(self, others: Sequence[Any]) -> bool:
        """See `Likeness`."""
        if not all(issubclass(kind, Tensor) for kind in set(map(type, others))):
            return False
        now = _Tensors(others)  # lives through the call, which is given bare addresses of it
        return self._compare(*now.given, *self._rest, self._noted)


class CompiledFacts(CompiledLikeness):
    """`Facts` by one call of compiled code."""

    def __init__(self, tensors: Sequence[Tensor], kernels: Any) -> None:
        super().__init__(tensors, kernels)
        self._tensors = _Tensors(tensors)
        self._given = (*self._tensors.given, *self._rest, 0)

    def hold(self) -> bool:
        """See `Facts`."""
        return self._compare(*self._given)


class _CompiledGradients:
    def __init__(self, params: Sequence[Tensor], kernels: Any) -> None:
        self._find, self._params = kernels.gradients(), _Tensors(params)
        self._likeness = CompiledLikeness([p.grad for p in params if p.grad is not None], kernels)
        self.addresses = self._likeness.addresses
        self._found, self._count = np.zeros(len(params), np.int64), len(params)
        self._places = self._found.ctypes.data
        self._where = (*self._params.given, self._places)

    def alike(self) -> bool:
        return self._find(*self._where) == self._count and self._likeness.alike_at(self._places)


class _CompiledVersions:
    def __init__(self, tensors: Sequence[Tensor], kernels: Any) -> None:
        self._add, self._bump, self._tensors = kernels.versions(), kernels.bumper(), _Tensors(tensors)
        self._given = self._tensors.given

    def total(self) -> int:
        return self._add(*self._given)

    def count(self) -> None:
        self._bump(*self._given)


def _answers_right(kernels: Any) -> bool:
    """Whether the kernels say of some tensors what Python says."""
    from halfstep.kernels.cpu import torch_functions

    if torch_functions.table() is None or torch_functions.inside() is None:
        return False
    half = torch.nn.Parameter(torch.ones(7, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    tensors = [torch.ones(3, 5), torch.ones(2, 4, dtype=torch.bfloat16).t()[1:], half, torch.ones(())]
    given = _Tensors(tensors)
    words = np.zeros(sum(kernels.HEAD + 2 * t.dim() for t in tensors), np.int64)
    scratch, found = np.zeros(kernels.SCRATCH, np.int64), np.zeros(len(tensors), np.int64)
    if kernels.reader()(*given.given, scratch.ctypes.data, words.ctypes.data) != len(words):
        return False
    said, k = list[list[int]](), 0
    for t in tensors:
        said.append([int(words[k]), int(words[k + 1]), *map(int, words[k + kernels.HEAD :][: 2 * t.dim()])])
        k += kernels.HEAD + 2 * t.dim()
    expected = [
        [t.data_ptr(), t.dim(), *(n for pair in zip(t.shape, t.stride()) for n in pair)] for t in tensors
    ]
    there = kernels.gradients()(*given.given, found.ctypes.data)
    before, versions = [t._version for t in tensors], _CompiledVersions(tensors, kernels)
    added = versions.total() == sum(before)
    versions.count()
    turned = _Tensors([torch._neg_view(torch.ones(3))])  # pyright: ignore
    return (
        said == expected
        and len({int(words[k]) for k in (2, 10, 18)}) == 3
        and there == 1
        and added
        and [t._version for t in tensors] == [n + 1 for n in before]
        and kernels.reader()(*turned.given, scratch.ctypes.data, words.ctypes.data) == -1
    )


# ---- in Python --------------------------------------------------------------------------------------------


class PlainLikeness:
    """`Likeness` in Python, for where nothing can be compiled."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = [_facts(t) for t in tensors]
        self.addresses = np.array([t.data_ptr() for t in tensors], np.int64)

    def alike(self, others: Sequence[Any]) -> bool:
        """See `Likeness`."""
        known = all(isinstance(t, Tensor) and _facts(t) == facts for t, facts in zip(others, self._known))
        if known:
            self.addresses[:] = [t.data_ptr() for t in others]
        return known


class PlainFacts(PlainLikeness):
    """`Facts` in Python."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._tensors = list(tensors)
        self._places = self.addresses.tolist()

    def hold(self) -> bool:
        """See `Facts`."""
        known = [_facts(t) for t in self._tensors] == self._known
        return known and [t.data_ptr() for t in self._tensors] == self._places


def _facts(t: Tensor) -> tuple[Any, ...]:
    return t.layout, t.device, t.dtype, t.shape, t.stride(), t.is_neg()


class PlainGradients:
    """`Gradients` in Python."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self._likeness = PlainLikeness([p.grad for p in params if p.grad is not None])
        self.addresses = self._likeness.addresses

    def alike(self) -> bool:
        """See `Gradients`."""
        return self._likeness.alike([p.grad for p in self._params])


class PlainVersions:
    """`Versions` in Python."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def total(self) -> int:
        """See `Versions`."""
        with torch._C.DisableTorchFunctionSubclass():  # the getter else asks every DTensor's class for one
            return sum(map(_version, self._tensors))

    def count(self) -> None:
        """See `Versions`."""
        increment_version(self._tensors)
