"""mindspore.dataset.vision: what the tutorial does to images, on [H, W, C] or [N, H, W, C] at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfstep.errors import ConfigError


class Rescale:
    """x * rescale + shift, as float32."""

    whole_batches = True

    def __init__(self, rescale: float, shift: float) -> None:
        self.rescale, self.shift = float(rescale), float(shift)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Any shape and dtype."""
        return image.float() * self.rescale + self.shift


class Normalize:
    """(x - mean) / std by channel."""

    whole_batches = True

    def __init__(self, mean: Sequence[float], std: Sequence[float], is_hwc: bool = True) -> None:
        if len(mean) != len(std) or min(std) <= 0:
            raise ConfigError(f"Normalize takes as many means as positive stds, got mean={mean}, std={std}")
        shape = (-1,) if is_hwc else (-1, 1, 1)
        self.mean, self.std = (torch.tensor(v, dtype=torch.float32).reshape(shape) for v in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """[..., H, W, C], or [..., C, H, W] with `is_hwc=False`."""
        return (image.float() - self.mean.to(image.device)) / self.std.to(image.device)


class HWC2CHW:
    """[..., H, W, C] to [..., C, H, W]."""

    whole_batches = True

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Any dtype."""
        return image.movedim(-1, -3).contiguous()
