"""Options that several commands have: how they look in help, and what of them is refused before any work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from halfstep import devices
from halfstep.errors import ConfigError


def with_metavar(value: str, **more: Any) -> object:
    """Return an annotation that names the value of an option, as in `--steps COUNT`."""
    return tyro.conf.arg(metavar=value, help_behavior_hint=_hint, **more)


def _hint(default: str) -> str:
    return "" if default in ("None", "''", "", "False") else f"(default: {default})"


Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint=_hint)]


def set_threads(count: int | None) -> None:
    """Have torch use so many CPU threads; ConfigError for a number that it cannot."""
    most = 16 * (os.cpu_count() or 1)  # torch ends without a word where threads cannot be made
    if count is not None and not 1 <= count <= most:
        raise ConfigError(f"--threads {count}: expected 1 or more, at most {most} on this machine")
    if count is not None:
        torch.set_num_threads(count)


def computing_device(name: str | None) -> torch.device:
    """The device to compute on; None gives the accelerator if there is one. ConfigError where it cannot."""
    device = devices.resolve(name)
    if device.type == "meta":
        raise ConfigError("device 'meta' has no values to compute with; choose cpu or an accelerator")
    return device


def check_report(path: Path | None, option: str = "--report") -> None:
    """Raise ConfigError unless a file can be written there, before the work that it is to tell of."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; give a file name such as {path / 'report.html'}")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot write into {folder}; create it or choose another")
