"""Models compiled in place by `model.compile()`, and the way back, which torch has no word for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn


class Compiled:
    """Models whose calls torch compiles; `revert()` gives each the attributes it had before.

    What `nn.Module.compile` sets is seen by comparing, so that no private name is needed. A model that is
    gone needs no way back, and is not kept.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._changes: list[tuple[weakref.ref[nn.Module], list[str], dict[str, Any]]] = []
        for model in models:
            before = dict(vars(model))
            model.compile()
            names = [name for name, value in vars(model).items() if before.get(name) is not value]
            earlier = {name: before[name] for name in names if name in before}
            self._changes.append((weakref.ref(model), names, earlier))

    def __bool__(self) -> bool:
        return bool(self._changes)

    def revert(self) -> None:
        """Undo `model.compile()`; a second call does nothing."""
        for reference, names, earlier in self._changes:
            if (model := reference()) is not None:
                for name in names:
                    vars(model).pop(name, None)
                vars(model).update(earlier)
        self._changes = []
