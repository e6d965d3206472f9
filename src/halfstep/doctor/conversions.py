"""What a conversion to 16 bits did to the weights: which parameters it flushed to zero or to infinity."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep.formats import dtype_name, format_of
from halfstep.names import canonical
from halfstep.numerics.histogram import max_abs
from halfstep.numerics.sites import look

_LOST = 0.5


@dataclass(frozen=True)
class Flush:
    """A parameter of which a conversion left `kept` of its `count` values other than zero."""

    name: str
    owner: str
    kind: str
    dtype: str
    count: int
    kept: int
    top: float
    file: str
    line: int

    @property
    def text(self) -> str:
        """What happened, in words."""
        smallest = format_of(self.dtype).smallest_subnormal
        return (
            f"precision: {self.count - self.kept} of the {self.count} values of {self.name} "
            f"(up to {self.top:.3g}) became zero in {self.dtype}, whose smallest value is {smallest:.3g}"
        )


def _sizes(models: list[nn.Module]) -> dict[str, tuple[torch.dtype, int, float, str, str]]:
    found: dict[str, tuple[torch.dtype, int, float, str, str]] = {}
    with torch.no_grad():
        for model in models:
            modules = dict(model.named_modules())
            for name, p in model.named_parameters():
                if p.is_floating_point() and not p.is_meta:
                    owner = name.rpartition(".")[0]
                    kind = type(modules[owner]).__name__ if owner in modules else ""
                    found[name] = p.dtype, int(torch.count_nonzero(p)), float(max_abs(p)), owner, kind
    return found


class Conversions:
    """Notes what `.half()`, `.to(dtype)`, `prepare` and `convert` flush, while its hooks are in place."""

    def __init__(self) -> None:
        self.flushes: list[Flush] = []
        self._depth = 0

    def install(self, stack: ExitStack) -> None:
        """Puts the hooks in place until `stack` closes."""
        import halfstep

        for owner, name in ((nn.Module, "_apply"), (halfstep, "prepare"), (halfstep, "convert")):
            if hasattr(owner, name):
                function = getattr(owner, name)
                stack.callback(setattr, owner, name, function)
                setattr(owner, name, self._around(function))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def converted(first: Any, *args: Any, **kwargs: Any) -> Any:
            given = first if isinstance(first, list | tuple) else [first]
            models = [m for m in given if isinstance(m, nn.Module)]
            if self._depth or not models:
                return function(first, *args, **kwargs)
            self._depth += 1
            try:
                before = _sizes(models)
                result = function(first, *args, **kwargs)
                self._compare(before, _sizes(models))
            finally:
                self._depth -= 1
            return result

        return converted

    def _compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        _, file, line = look()
        for name, (dtype, kept, _, owner, kind) in after.items():
            old = before.get(name)
            if old is None or old[0] == dtype or old[1] == 0 or kept > _LOST * old[1]:
                continue
            name, owner = canonical(name), canonical(owner)
            self.flushes.append(Flush(name, owner, kind, dtype_name(dtype), old[1], kept, old[2], file, line))
