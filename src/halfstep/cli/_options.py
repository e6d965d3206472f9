"""How an option looks in a command's help: a word for its value, and a default only where there is one."""

from __future__ import annotations

from typing import Annotated, Any

import tyro


def shown(value: str, **more: Any) -> object:
    """An annotation that names the value of an option, as in `--steps COUNT`."""
    return tyro.conf.arg(metavar=value, help_behavior_hint=_hint, **more)


def _hint(default: str) -> str:
    return "" if default in ("None", "''", "", "False") else f"(default: {default})"


Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint=_hint)]
