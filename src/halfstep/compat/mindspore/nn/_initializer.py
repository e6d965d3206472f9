"""How weights begin: MindSpore's initializer names, numbers and tensors, written into a parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from halfstep.errors import ConfigError


class Initializer(ABC):
    """A way for a weight to begin; those of `common.initializer` say which."""

    @abstractmethod
    def fill(self, t: torch.Tensor) -> None:
        """Write the values in place."""


Init = str | float | torch.Tensor | Initializer | None

_INITIALIZERS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "zeros": torch.nn.init.zeros_,
    "ones": torch.nn.init.ones_,
    "normal": lambda t: torch.nn.init.normal_(t, std=0.01),
    "uniform": lambda t: torch.nn.init.uniform_(t, -0.07, 0.07),
    "zero": torch.nn.init.zeros_,
    "one": torch.nn.init.ones_,
    "xavieruniform": torch.nn.init.xavier_uniform_,
    "xaviernormal": torch.nn.init.xavier_normal_,
    "heuniform": torch.nn.init.kaiming_uniform_,
    "henormal": torch.nn.init.kaiming_normal_,
    "truncatednormal": lambda t: torch.nn.init.trunc_normal_(t, std=0.01, a=-0.02, b=0.02),
}
"""MindSpore's initializer names, lower case without underscores, with MindSpore's default ranges."""


def initialize(parameter: torch.Tensor | None, init: Init) -> None:
    if parameter is None or init is None:
        return
    with torch.no_grad():
        if isinstance(init, str):
            name = init.lower().replace("_", "")
            if name not in _INITIALIZERS:
                raise ConfigError(f"unknown initializer {init!r}: expected one of {', '.join(_INITIALIZERS)}")
            _INITIALIZERS[name](parameter)
        elif isinstance(init, Initializer):
            init.fill(parameter)
        elif isinstance(init, torch.Tensor):
            parameter.copy_(init)
        else:
            parameter.fill_(init)
