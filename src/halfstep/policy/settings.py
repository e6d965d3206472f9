"""What a plan may say beside its rules: level, dtype, layout and compiling, and what was measured of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.errors import PlanError, show
from halfstep.formats import dtype_name, parse_dtype
from halfstep.policy.levels import level_of


@dataclass(frozen=True)
class Measured:
    """One setting that was tried: milliseconds a step, distances to fp32's loss and gradients, a remark."""

    setting: str
    milliseconds: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Settings:
    """The arguments of `prepare` that a plan stands for, why, and what was measured.

    Raises PlanError for a level that is none and a dtype it cannot run in.
    """

    level: str
    dtype: torch.dtype | None = None
    layout: str = "keep"
    compile: bool = False
    reason: str = ""
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        """Check that level and dtype fit."""
        if self.dtype is not None:
            object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        level, word = level_of(self.level)
        level.check_dtype(self.dtype if self.dtype is not None else word)
        object.__setattr__(self, "measured", tuple(self.measured))

    def to_table(self) -> dict[str, Any]:
        """Return the TOML table `[settings]`, as plain values."""
        return {
            "level": self.level,
            **({"dtype": dtype_name(self.dtype)} if self.dtype is not None else {}),
            "layout": self.layout,
            **({"compile": True} if self.compile else {}),
            "reason": self.reason,
        }

    @classmethod
    def from_tables(cls, table: Any, measured: Any) -> Settings:
        """Read `[settings]` and `[[measured]]`; PlanError names the key that cannot be read."""
        rows = measured if isinstance(measured, Sequence) else ()
        return cls(
            **check_table("[settings] of the plan", table, _SETTINGS),
            measured=tuple(Measured(**check_table("[measured] of the plan", row, _MEASURED)) for row in rows),
        )


_Kinds = Mapping[str, type | tuple[type, ...]]
_SETTINGS: _Kinds = {**dict.fromkeys(("level", "dtype", "layout", "reason"), str), "compile": bool}
_NUMBERS = dict.fromkeys(("milliseconds", "loss_error", "gradient_error"), (int, float))
_MEASURED: _Kinds = {"setting": str, **_NUMBERS, "note": str}


def check_table(where: str, table: Any, keys: _Kinds) -> dict[str, Any]:
    """A table of a TOML file; PlanError unless it has the first of these keys, and values of these kinds."""
    first = next(iter(keys))
    if not isinstance(table, Mapping) or first not in table:
        raise PlanError(f"{where} has no {first}: each needs one, given {show(table)}")
    for key, value in table.items():
        kind = keys.get(key)
        if kind is None:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(keys)}"
            raise PlanError(f"{where} ({table[first]!r:.60}) has the unknown key {key!r}: {hint}")
        if not isinstance(value, kind):
            name = kind.__name__ if isinstance(kind, type) else kind[-1].__name__
            raise PlanError(f"{where}: {key} must be a {name}, given {show(value)}")
    return dict(table)
