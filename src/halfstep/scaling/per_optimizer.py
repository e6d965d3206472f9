"""What a GradScaler knows of each optimizer between two updates of the scale, in torch's own shape.

Subclasses of torch's GradScaler, sharded ones above all, read this table and write into it, so it is the
state and no copy of it. Where torch goes by `id(optimizer)` alone, a row here also knows weakly whose it is.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState

State = dict[str, Any]


def _fresh() -> State:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def flags_of(state: State) -> list[Tensor]:
    """The found-inf flags of an optimizer, one a device; empty before its gradients were looked at."""
    return list(state["found_inf_per_device"].values())


class PerOptimizer(defaultdict[int, State]):
    """Rows by `id(optimizer)`: `stage`, `found_inf_per_device`, and ours: `owner`, `norm`, `amax`."""

    def __init__(self, rows: Mapping[int, State] | None = None) -> None:
        super().__init__(_fresh, rows or {})

    def of(self, optimizer: Any) -> State:
        """The row of an optimizer. One of a dead optimizer that lived at the same address is set aside."""
        state = self[id(optimizer)]
        owner = state.setdefault("owner", weakref.ref(optimizer))
        if owner() is optimizer:
            return state
        self[-id(optimizer)] = state  # no address: its flags still count in `update`
        del self[id(optimizer)]
        return self.of(optimizer)

    def looked_at(self) -> list[State]:
        """The rows of optimizers whose gradients were looked at."""
        return [state for state in self.values() if state["found_inf_per_device"]]

    def __deepcopy__(self, memo: dict[int, Any]) -> PerOptimizer:
        twin = PerOptimizer()
        for state in self.values():
            optimizer = state["owner"]() if "owner" in state else None
            if optimizer is not None:
                copied = memo.get(id(optimizer), optimizer)
                flags = dict(state["found_inf_per_device"])
                twin[id(copied)] = state | {"owner": weakref.ref(copied), "found_inf_per_device": flags}
        return twin
