"""mindspore.dataset.transforms: TypeCast."""

from __future__ import annotations

import torch


class TypeCast:
    """Another dtype."""

    whole_batches = True

    def __init__(self, output_type: torch.dtype) -> None:
        self.output_type = output_type

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return x.to(self.output_type)
