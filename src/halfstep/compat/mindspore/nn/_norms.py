"""Normalisation layers with MindSpore's names, arguments and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halfstep.compat.mindspore.nn._cell import Cell, check_positive
from halfstep.compat.mindspore.nn._initializer import Init, initialize
from halfstep.errors import ConfigError


class _BatchNorm:
    """MindSpore's momentum is the share of the old statistics, torch's that of the new."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        gamma_init: Init = None,
        beta_init: Init = None,
    ) -> None:
        check_positive(self, num_features=num_features)
        if not 0.0 <= momentum <= 1.0:
            raise ConfigError(
                f"For '{type(self).__name__}', the 'momentum' must be in range [0, 1], but got {momentum}."
            )
        base: Any = super()
        base.__init__(num_features, eps, 1.0 - momentum, affine)
        initialize(self.weight, gamma_init)  # type: ignore[attr-defined]
        initialize(self.bias, beta_init)  # type: ignore[attr-defined]


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d, Cell):
    """Batch normalisation of [N, C] or [N, C, L]."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d, Cell):
    """Batch normalisation of [N, C, H, W]."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d, Cell):
    """Batch normalisation of [N, C, D, H, W]."""


class LayerNorm(torch.nn.LayerNorm, Cell):
    """Normalisation over the last dimensions, which have `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: Sequence[int],
        *,
        gamma_init: Init = None,
        beta_init: Init = None,
        epsilon: float = 1e-7,
    ) -> None:
        if not isinstance(normalized_shape, tuple | list):
            raise TypeError(
                "For 'LayerNorm', the type of 'normalized_shape' must be tuple[int] or list[int], but got "
                f"{normalized_shape!r} and the type is '{type(normalized_shape).__name__}'."
            )
        super().__init__(list(normalized_shape), epsilon)
        initialize(self.weight, gamma_init)
        initialize(self.bias, beta_init)


class GroupNorm(torch.nn.GroupNorm, Cell):
    """Normalisation of [N, C, ...] over groups of channels."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        gamma_init: Init = None,
        beta_init: Init = None,
    ) -> None:
        check_positive(self, num_groups=num_groups, num_channels=num_channels)
        super().__init__(num_groups, num_channels, eps, affine)
        initialize(self.weight if affine else None, gamma_init)
        initialize(self.bias if affine else None, beta_init)


class _InstanceNorm:
    """As in MindSpore affine by default, and by the statistics of the batch at hand in evaluation too."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        gamma_init: Init = None,
        beta_init: Init = None,
    ) -> None:
        base: Any = super()
        base.__init__(num_features, eps, momentum, affine)
        initialize(self.weight, gamma_init)  # type: ignore[attr-defined]
        initialize(self.bias, beta_init)  # type: ignore[attr-defined]


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d, Cell):
    """Normalisation of each channel of each sample of [N, C, L]."""


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d, Cell):
    """Normalisation of each channel of each sample of [N, C, H, W]."""


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d, Cell):
    """Normalisation of each channel of each sample of [N, C, D, H, W]."""
