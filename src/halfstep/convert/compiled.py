"""Models compiled in place by `model.compile()`, and the way back, which torch has no word for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from halfstep.errors import ConfigError


class Compiled:
    """Models whose calls torch compiles; `revert()` gives each the attributes it had before.

    What `nn.Module.compile` sets is seen by comparing, so that no private name is needed. A model that is
    gone needs no way back, and is not kept. ConfigError for one of torch's own modules alone, of which
    `model.compile()` compiles nothing, in silence.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._changes: list[tuple[weakref.ref[nn.Module], list[str], dict[str, Any]]] = []
        for model in models:
            if all(type(m).forward.__module__.startswith("torch.") for m in model.modules()):
                raise ConfigError(
                    f"compile=True: model.compile() would compile nothing of {type(model).__name__}, since "
                    "its modules are all torch's own: put it into a module with a forward of yours, or call "
                    "torch.compile(model) after prepare()"
                )
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
