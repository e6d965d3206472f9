"""What a conversion to 16 bits did to the weights: which parameters it took to zero or to infinity."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep.formats import dtype_name, format_of
from halfstep.names import fqn
from halfstep.numerics.histogram import amax
from halfstep.numerics.locations import look

_LOST = 0.5


@dataclass(frozen=True)
class Flush:
    """A parameter of which a conversion left `kept` of its `count` values neither zero nor infinite.

    `overflow`: what is lost became infinite.
    """

    name: str
    owner: str
    kind: str
    dtype: str
    count: int
    kept: int
    amax: float
    file: str
    line: int
    overflow: bool = False

    @property
    def text(self) -> str:
        """What happened, in words."""
        lost = f"{self.count - self.kept} of the {self.count} values of {self.name}"
        if self.overflow:
            end = format_of(self.dtype).max
            text = f"{lost} (up to {self.amax:.3g}) became infinite in {self.dtype}"
            return f"range: {text}, which ends at {end:.5g}"
        smallest = format_of(self.dtype).smallest_subnormal
        return (
            f"precision: {lost} "
            f"(up to {self.amax:.3g}) became zero in {self.dtype}, whose smallest value is {smallest:.3g}"
        )


@dataclass(frozen=True)
class _Size:
    """A parameter before or after a conversion."""

    dtype: torch.dtype
    other_than_zero: int
    infinite: int
    amax: float
    owner: str
    kind: str


def _sizes(models: list[nn.Module]) -> dict[str, _Size]:
    found: dict[str, _Size] = {}
    with torch.no_grad():
        for model in models:
            modules = dict(model.named_modules())
            for name, p in model.named_parameters():
                if p.is_floating_point() and not p.is_meta:
                    owner = name.rpartition(".")[0]
                    kind = type(modules[owner]).__name__ if owner in modules else ""
                    largest = float(amax(p)) if p.numel() else 0.0
                    infinite = 0 if math.isfinite(largest) else int(torch.isinf(p).sum())
                    found[name] = _Size(p.dtype, int(torch.count_nonzero(p)), infinite, largest, owner, kind)
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

    def _compare(self, before: dict[str, _Size], after: dict[str, _Size]) -> None:
        _, file, line = look()
        for name, new in after.items():
            old = before.get(name)
            if old is None or old.dtype == new.dtype or old.other_than_zero == 0:
                continue
            overflow = new.infinite > 0 and math.isfinite(old.amax)
            if not overflow and new.other_than_zero > _LOST * old.other_than_zero:
                continue
            kept = new.other_than_zero - new.infinite
            self.flushes.append(
                Flush(
                    fqn(name), fqn(new.owner), new.kind, dtype_name(new.dtype),
                    old.other_than_zero, kept, old.amax, file, line, overflow,
                )
            )  # fmt: skip
