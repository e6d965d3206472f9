"""What a GradScaler knows of each optimizer's gradients between two updates of the scale."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Stage(Enum):
    """Where an optimizer stands within one iteration."""

    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass(frozen=True)
class Checked:
    """What the gradients of one optimizer were found to be in this iteration."""

    stage: Stage
    found_inf: Tensor
    norm: Tensor
    max_abs: Tensor | None


class PerOptimizer:
    """Entries of one iteration, weakly tied to optimizer objects; copies follow copied optimizers."""

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[Any], Checked]] = []

    def get(self, optimizer: Any) -> Checked | None:
        """The entry of an optimizer; None before it was looked at."""
        return next((entry for ref, entry in self._entries if ref() is optimizer), None)

    def put(self, optimizer: Any, entry: Checked) -> None:
        """Set the entry of an optimizer."""
        others = [(ref, e) for ref, e in self._entries if ref() is not optimizer]
        self._entries = [*others, (weakref.ref(optimizer), entry)]

    def __iter__(self) -> Iterator[Checked]:
        return (entry for _, entry in self._entries)

    def items(self) -> Iterator[tuple[Any, Checked]]:
        """Optimizers that still live, with their entries."""
        return ((optimizer, entry) for ref, entry in self._entries if (optimizer := ref()) is not None)

    def entry_of(self, found_inf: Tensor) -> Checked:
        """The entry of gradients of which only this flag is known; they count as unscaled."""
        return Checked(Stage.UNSCALED, found_inf, torch.full((), torch.nan), None)

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> PerOptimizer:
        twin = PerOptimizer()
        for ref, entry in self._entries:
            if (optimizer := ref()) is not None:
                twin.put(memo.get(id(optimizer), optimizer), entry)
        return twin
