"""`optimizer.state` and its entries: dictionaries that count their changes, so that no step compares them.

Copies and pickles are plain dictionaries. Entries that a user puts in stay the user's own objects; of those
nothing is known between steps, and `PlanCheck` compares them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor

_CHANGING = (
    "__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"
)  # fmt: skip


class Changes:
    """How often a state and its entries were changed."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Entry(dict[str, Any]):
    """The state of one parameter."""

    __slots__ = ("changes",)

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self.changes = changes

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class State(defaultdict[Tensor, Any]):
    """The states of all parameters, by parameter; a missing entry is made when it is asked for."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.changes = Changes()

    def __missing__(self, key: Tensor) -> Entry:
        entry = self[key] = Entry(self.changes)
        return entry

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, dict(self))

    @property
    def is_watched(self) -> bool:
        """Whether every change is counted: no entry is a dictionary of the user's."""
        return all(type(entry) is Entry and entry.changes is self.changes for entry in self.values())


def _counting(kind: type, name: str) -> Any:
    method = getattr(kind, name)

    def change(self: Entry | State, *args: Any, **values: Any) -> Any:
        self.changes.count += 1
        return method(self, *args, **values)

    return change


for _name in _CHANGING:
    setattr(Entry, _name, _counting(dict, _name))
    setattr(State, _name, _counting(defaultdict, _name))
