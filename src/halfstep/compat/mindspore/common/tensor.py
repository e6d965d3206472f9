"""mindspore.common.tensor: where older scripts take Tensor from."""

from halfstep.compat.mindspore._tensor import Tensor

__all__ = ["Tensor"]
