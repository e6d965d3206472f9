"""mindspore.common.initializer: ways for weights to begin, as objects, with MindSpore's defaults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from typing import Any

import torch
from torch.nn import init

from halfstep.compat.mindspore._tensor import Tensor, as_tensor
from halfstep.errors import ConfigError

__all__ = [
    "Constant",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "Normal",
    "One",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "Zero",
    "initializer",
]


class Initializer(ABC):
    """A way for a weight to begin; those of `common.initializer` say which."""

    @abstractmethod
    def fill(self, t: torch.Tensor) -> None:
        """Write the values in place."""


Init = str | float | torch.Tensor | Initializer | None


def _row(name: str, says: str, fill: Callable[..., Any], **defaults: Any) -> Any:
    """The class of initializers that fill a tensor in place, with their arguments in this order."""

    def fill_tensor(self: Initializer, t: torch.Tensor) -> None:
        fill(t, *(getattr(self, argument) for argument in defaults))

    fields = [
        (argument, Any, value) if value is not ... else (argument, Any)
        for argument, value in defaults.items()
    ]
    return make_dataclass(
        name,
        fields,
        bases=(Initializer,),
        namespace={"fill": fill_tensor, "__doc__": says, "__module__": __name__},
    )


def _normal(t: torch.Tensor, sigma: float, mean: float) -> None:
    init.normal_(t, mean, sigma)


def _fill_truncated_normal(t: torch.Tensor, sigma: float, mean: float, a: float, b: float) -> None:
    init.trunc_normal_(t, mean, sigma, mean + a * sigma, mean + b * sigma)


def _uniform(t: torch.Tensor, scale: float) -> None:
    init.uniform_(t, -scale, scale)


_HE: dict[str, Any] = {"negative_slope": 0, "mode": "fan_in", "nonlinearity": "leaky_relu"}
Normal = _row("Normal", "A normal distribution.", _normal, sigma=0.01, mean=0.0)
TruncatedNormal = _row(
    "TruncatedNormal",
    "A normal distribution cut off `a` deviations below and `b` above its mean.",
    _fill_truncated_normal,
    sigma=0.01,
    mean=0.0,
    a=-2.0,
    b=2.0,
)
Uniform = _row("Uniform", "Uniform within plus and minus `scale`.", _uniform, scale=0.07)
XavierUniform = _row("XavierUniform", "Glorot and Bengio 2010, uniform.", init.xavier_uniform_, gain=1)
XavierNormal = _row("XavierNormal", "Glorot and Bengio 2010, normal.", init.xavier_normal_, gain=1)
HeUniform = _row("HeUniform", "He et al. 2015, uniform.", init.kaiming_uniform_, **_HE)
HeNormal = _row("HeNormal", "He et al. 2015, normal.", init.kaiming_normal_, **_HE)
Constant = _row("Constant", "One number everywhere.", init.constant_, value=...)
Zero = _row("Zero", "0 everywhere.", init.zeros_)
One = _row("One", "1 everywhere.", init.ones_)


_KINDS = (Normal, TruncatedNormal, Uniform, XavierUniform, XavierNormal, HeUniform, HeNormal)
_NAMED: dict[str, Any] = {
    "zero": Zero,
    "zeros": Zero,
    "one": One,
    "ones": One,
    **{kind.__name__.lower(): kind for kind in _KINDS},
}


@torch.no_grad()
def initialize(parameter: torch.Tensor | None, init: Init) -> None:
    """Write a beginning into a parameter: by name in any case, an Initializer, a tensor or a number."""
    if parameter is None or init is None:
        return
    if isinstance(init, str):
        if (name := init.lower().replace("_", "")) not in _NAMED:
            raise ConfigError(f"unknown initializer {init!r}: expected one of {', '.join(_NAMED)}")
        init = _NAMED[name]()
    if isinstance(init, Initializer):
        init.fill(parameter)
    elif isinstance(init, torch.Tensor):
        parameter.copy_(init)
    else:
        parameter.fill_(init)  # pyright: ignore[reportCallIssue, reportArgumentType]


def initializer(
    init: Initializer | str | float | torch.Tensor,
    shape: Sequence[int] | int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A new tensor of this shape, filled at once.

    Raises:
        ValueError: a name that no initializer has.
    """
    sizes = init.shape if shape is None and isinstance(init, torch.Tensor) else shape
    tensor = torch.empty((sizes,) if isinstance(sizes, int) else tuple(sizes or ()))
    initialize(tensor, init)
    return as_tensor(tensor.to(dtype))
