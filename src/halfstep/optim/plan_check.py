"""Decides at the start of every step whether what was remembered of an optimizer still holds.

The kernels get bare addresses, so each must belong to a tensor whose size, dtype, strides and device were
looked at in this very step. All are looked at in one pass; what fails is made anew from what the user sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from operator import is_
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor

from halfstep.optim.state import State

Group = Mapping[str, Any]
Entry = dict[str, Any]
Options = Sequence[tuple[Any, ...]]


class Facts(Protocol):
    """Where some tensors lie and what they are, as it was when this was made."""

    addresses: Any
    """int64 array: where the tensors of the last `alike` lie."""

    def hold(self) -> bool:
        """Whether the tensors still are what and where they were."""
        ...

    def alike(self, others: Sequence[Any]) -> bool:
        """Whether `others` are such tensors, at any address; notes the addresses."""
        ...


def facts_of(tensors: Sequence[Tensor]) -> Facts:
    """The facts of tensors that have an address; the compiled way where there is one."""
    kernels = _kernels()
    return PlainFacts(tensors) if kernels is None else _CompiledFacts(tensors, kernels)


@cache
def _kernels() -> Any:
    try:
        from halfstep.kernels.cpu import facts
    except ImportError:
        return None
    return facts if facts.functions() is not None else None


class _CompiledFacts:
    def __init__(self, tensors: Sequence[Tensor], kernels: Any) -> None:
        given: tuple[int, ...] = kernels.functions()
        self._compare = kernels.comparer()
        self._objects = np.fromiter(tensors, object, len(tensors))
        self._place = self._objects.ctypes.data
        self.addresses = np.zeros(len(tensors), np.int64)
        self._facts = np.zeros(sum(kernels.HEAD + 2 * t.dim() for t in tensors), np.int64)
        self._scratch = np.zeros(8, np.int64)
        places = (a.ctypes.data for a in (self._scratch, self._facts, self.addresses))
        self._given = (*given, len(tensors), *places)  # plain numbers: each array would take 0.2 us a call
        if kernels.reader()(*self._given, self._place) != len(self._facts):
            raise AssertionError("a tensor without an address was given to the kernels")

    def hold(self) -> bool:
        return self._compare(*self._given, self._place, False)

    def alike(self, others: Sequence[Any]) -> bool:
        objects = np.fromiter(others, object, len(self._objects))
        return self._compare(*self._given, objects.__array_interface__["data"][0], True)


class PlainFacts:
    """`Facts` in Python, for where nothing can be compiled."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._known = [_facts(t) for t in tensors]
        self.addresses = np.array([t.data_ptr() for t in tensors], np.int64)
        self._places = self.addresses.tolist()

    def hold(self) -> bool:
        """See `Facts`."""
        known = [_facts(t) for t in self._tensors] == self._known
        return known and [t.data_ptr() for t in self._tensors] == self._places

    def alike(self, others: Sequence[Any]) -> bool:
        """See `Facts`."""
        known = all(isinstance(t, Tensor) and _facts(t) == facts for t, facts in zip(others, self._known))
        if known:
            self.addresses[:] = [t.data_ptr() for t in others]
        return known


def _facts(t: Tensor) -> tuple[Any, ...]:
    return t.layout, t.device, t.dtype, t.shape, t.stride()


class PlanCheck:
    """What slots were made of: groups, their options, parameters, entries of the state and their tensors.

    `tensors` are those whose addresses the slots hold.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        options: Options,
        state: Mapping[Tensor, Entry],
        tensors: Sequence[Tensor],
    ) -> None:
        self._groups, self._options = list(groups), list(options)
        self._params: list[Tensor] = [p for group in groups for p in group["params"]]
        self._state = state
        self._seen = state.changes.count if isinstance(state, State) and state.is_watched else None
        self._owners, self._entries = list(state), list(state.values())
        self._keys = list(map(tuple, self._entries))
        self._values = list(chain.from_iterable(map(dict.values, self._entries)))
        self._facts = facts_of(tensors)

    def holds(self, groups: Sequence[Group], options: Options, state: Mapping[Tensor, Entry]) -> bool:
        """Whether nothing was replaced, moved, resized or recast, and the options are the same."""
        return (
            options == self._options
            and _same(groups, self._groups)
            and _same([p for group in groups for p in group["params"]], self._params)
            and self._holds_state(state)
            and self._facts.hold()
        )

    def _holds_state(self, state: Mapping[Tensor, Entry]) -> bool:
        if self._seen is not None and state is self._state:
            return cast(State, state).changes.count == self._seen
        return (
            _same(state, self._owners)
            and _same(state.values(), self._entries)
            and list(map(tuple, self._entries)) == self._keys
            and all(map(is_, chain.from_iterable(map(dict.values, self._entries)), self._values))
        )


def _same(these: Any, those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))
