"""Memory layout of convolution weights: channels_last is faster for some networks and slower for others.

Values, shapes and names stay what they are; only the order in memory changes, so that everything computed
differs by rounding alone. Activations follow the weights: torch's convolutions give channels_last where
either operand has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, show
from halfstep.torch_private import Convolution

LAYOUTS = ("keep", "auto", "channels_last")

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def check_layout(layout: str) -> str:
    """Return the layout; ConfigError for a word that is none."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout={show(layout)}: expected one of {', '.join(LAYOUTS)}")
    return layout


def convolution_weights(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the weights whose order in memory a layout can change: those of 2-d and 3-d convolutions."""
    weights: dict[int, nn.Parameter] = {}
    for model in models:
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if not isinstance(module, Convolution) or not isinstance(weight, nn.Parameter):
                continue
            if not isinstance(weight, nn.UninitializedParameter) and weight.dim() in _FORMATS:
                weights.setdefault(id(weight), weight)
    return list(weights.values())


class Relayout:
    """Convolution weights put into channels_last; `revert()` puts them back as they were."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        weights = convolution_weights(models)
        self._before = [(weight, weight.stride()) for weight in weights]
        for weight in weights:
            _reorder(weight, weight.data.to(memory_format=_FORMATS[weight.dim()]))

    def __bool__(self) -> bool:
        return bool(self._before)

    def revert(self) -> None:
        """Give every weight its former strides; a second call does nothing."""
        for weight, stride in self._before:
            if weight.stride() != stride:
                _reorder(weight, _copy_with_stride(weight.data, stride))
        self._before = []


def _reorder(weight: Tensor, data: Tensor) -> None:
    gradient, weight.grad = weight.grad, None
    weight.data = data
    if gradient is not None:
        weight.grad = _copy_with_stride(gradient, data.stride())


def _copy_with_stride(t: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)
