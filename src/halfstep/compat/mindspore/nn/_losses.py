"""Loss functions with MindSpore's names and defaults."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore.nn._cell import Cell
from halfstep.errors import ConfigError


class LossBase(Cell):
    """Base of the losses; one of your own ends with `return self.get_loss(values)`."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("none", "mean", "sum"):
            raise ConfigError(
                f"For '{type(self).__name__}', the 'reduction' must be in ['none', 'mean', 'sum'], "
                f"but got {reduction}."
            )
        self.reduction = reduction

    def get_loss(self, x: torch.Tensor, weights: float | torch.Tensor = 1.0) -> torch.Tensor:
        """`x` times `weights` in fp32, as one number or as it is by `reduction`; in the dtype of `x`."""
        weighted = x.float() * weights
        reduced = {"mean": weighted.mean, "sum": weighted.sum}.get(self.reduction)
        return (weighted if reduced is None else reduced()).to(x.dtype)


class CrossEntropyLoss(LossBase):
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


class SoftmaxCrossEntropyWithLogits(LossBase):
    """Softmax and cross entropy; `sparse=True` takes classes, otherwise probabilities (one-hot)."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, C] and [N], or [N, C] where not sparse."""
        target = labels.long() if self.sparse else labels.to(logits.dtype)
        return F.cross_entropy(logits, target, reduction=self.reduction)


class MSELoss(LossBase):
    """Squared differences."""

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape."""
        return F.mse_loss(logits, labels, reduction=self.reduction)


class L1Loss(LossBase):
    """Absolute differences."""

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape."""
        return F.l1_loss(logits, labels, reduction=self.reduction)


class BCEWithLogitsLoss(LossBase):
    """Sigmoid and binary cross entropy."""

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape."""
        return F.binary_cross_entropy_with_logits(logits, labels, reduction=self.reduction)


class NLLLoss(LossBase):
    """Negative log likelihood of classes, from log-probabilities."""

    def __init__(
        self, weight: torch.Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__(reduction)
        self.weight, self.ignore_index = weight, ignore_index

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, C, ...] and classes [N, ...] of any integer dtype."""
        return F.nll_loss(
            logits, labels.long(), self.weight, ignore_index=self.ignore_index, reduction=self.reduction
        )


class BCELoss(LossBase):
    """Binary cross entropy of probabilities."""

    def __init__(self, weight: torch.Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.weight = weight

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape."""
        return F.binary_cross_entropy(logits, labels, self.weight, reduction=self.reduction)


class SmoothL1Loss(LossBase):
    """Squared below `beta`, absolute above."""

    def __init__(self, beta: float = 1.0, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.beta = beta

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape."""
        return F.smooth_l1_loss(logits, labels, reduction=self.reduction, beta=self.beta)
