"""What a conversion to 16 bits did to the weights: which parameters it took to zero or to infinity."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep.convert import conversion
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


def _sizes(model: nn.Module) -> dict[str, _Size]:
    found: dict[str, _Size] = {}
    with torch.no_grad():
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
    """Notes what `.half()`, `.to(dtype)` and our own conversions flush, while it listens."""

    def __init__(self) -> None:
        self.flushes: list[Flush] = []
        self._inside = False

    def install(self, stack: ExitStack) -> None:
        """Listens until `stack` closes."""
        conversion.around.append(self._watched)
        stack.callback(conversion.around.remove, self._watched)
        apply = nn.Module._apply

        def applied(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self._watched(module):
                return apply(module, *args, **kwargs)

        stack.callback(setattr, nn.Module, "_apply", apply)
        nn.Module._apply = applied

    @contextmanager
    def _watched(self, model: nn.Module) -> Generator[None]:
        """Compares the parameters after what happens within to those before; the outermost alone."""
        if self._inside:
            yield
            return
        self._inside, before = True, _sizes(model)
        try:
            yield
        finally:
            self._inside = False
        self._compare(before, _sizes(model))

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
