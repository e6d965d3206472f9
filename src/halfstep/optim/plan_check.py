"""Decides at the start of every step whether what was remembered of an optimizer still holds.

The kernels get bare addresses, so each must belong to a tensor whose size, dtype, strides and device were
looked at in this very step. All are looked at in one pass; what fails is made anew from what the user sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, cast

from torch import Tensor

from halfstep.optim.state import State
from halfstep.optim.tensor_facts import facts_of

Group = Mapping[str, Any]
Entry = dict[str, Any]
Options = Sequence[tuple[Any, ...]]


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
        self._params: list[Sequence[Tensor]] = [group["params"] for group in groups]
        self._members = [list(params) for params in self._params]
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
            and all(map(_same_params, groups, self._params, self._members))
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


def _same_params(group: Group, known: Sequence[Tensor], members: list[Tensor]) -> bool:
    params = group["params"]
    return (params is known and type(params) is tuple) or _same(params, members)


def _same(these: Any, those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))
