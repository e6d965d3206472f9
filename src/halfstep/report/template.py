"""Pages from their templates (every value escaped), written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError


def text_of(name: str) -> str:
    """Return a file of this package: a style, a script, a template."""
    return files("halfstep.report").joinpath(name).read_text(encoding="utf-8")


def fill(name: str, context: Mapping[str, Any], **filters: Callable[..., Any]) -> str:
    """Return the page that a template makes of these values."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(loader=FunctionLoader(text_of), autoescape=True, undefined=StrictUndefined)
    environment.filters.update(filters)
    return environment.get_template(name).render(context)


def write_page(page: str, path: str | Path) -> Path:
    """Write a finished page to `path`, whole or not at all; ConfigError where that is impossible."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the report {path}: {error}") from error
    return path
