"""Loss functions with MindSpore's names and defaults."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore.nn._cell import Cell
from halfstep.errors import ConfigError


class _Loss(Cell):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("none", "mean", "sum"):
            raise ConfigError(
                f"For '{type(self).__name__}', the 'reduction' must be in ['none', 'mean', 'sum'], "
                f"but got {reduction}."
            )
        self.reduction = reduction


class CrossEntropyLoss(_Loss):
    """Softmax and negative log likelihood of classes, or of class probabilities."""

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(reduction)
        self.weight, self.ignore_index, self.label_smoothing = weight, ignore_index, label_smoothing

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] and classes [N, ...] of any integer dtype, or probabilities [N, C, ...]."""
        target = labels if labels.is_floating_point() else labels.long()
        return F.cross_entropy(
            logits,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class SoftmaxCrossEntropyWithLogits(_Loss):
    """Softmax and cross entropy; `sparse=True` takes classes, otherwise probabilities (one-hot)."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, C] and [N], or [N, C] where not sparse."""
        target = labels.long() if self.sparse else labels.to(logits.dtype)
        return F.cross_entropy(logits, target, reduction=self.reduction)


class MSELoss(_Loss):
    """Squared differences."""

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape."""
        return F.mse_loss(logits, labels, reduction=self.reduction)


class L1Loss(_Loss):
    """Absolute differences."""

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape."""
        return F.l1_loss(logits, labels, reduction=self.reduction)


class BCEWithLogitsLoss(_Loss):
    """Sigmoid and binary cross entropy."""

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape."""
        return F.binary_cross_entropy_with_logits(logits, labels, reduction=self.reduction)
