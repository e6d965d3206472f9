"""Loss functions with MindSpore's names and defaults."""

from __future__ import annotations

import inspect
from typing import Any

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


class SoftmaxCrossEntropyWithLogits(LossBase):
    """Softmax and cross entropy; `sparse=True` takes classes, otherwise probabilities (one-hot)."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, C] and [N], or [N, C] where not sparse."""
        target = labels.long() if self.sparse else labels.to(logits.dtype)
        return F.cross_entropy(logits, target, reduction=self.reduction)


def _row(name: str, says: str, function: Any, *, classes: bool = False, **defaults: Any) -> Any:
    """The class of losses that call a function with logits, labels and these arguments, in this order.

    Labels that are `classes` may have any integer dtype.
    """
    taken = inspect.Signature(
        [
            inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=v)
            for key, v in defaults.items()
        ]
    )

    def made(self: LossBase, *args: Any, **kwargs: Any) -> None:
        given = taken.bind(*args, **kwargs)
        given.apply_defaults()
        LossBase.__init__(self, given.arguments["reduction"])
        vars(self).update(given.arguments)

    def construct(self: LossBase, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = labels.long() if classes and not labels.is_floating_point() else labels
        return function(logits, labels, **{key: getattr(self, key) for key in defaults})

    body = {"__init__": made, "construct": construct, "__signature__": taken}
    return type(name, (LossBase,), {**body, "__doc__": says, "__module__": __name__})


MSELoss = _row("MSELoss", "Squared differences.", F.mse_loss, reduction="mean")
L1Loss = _row("L1Loss", "Absolute differences.", F.l1_loss, reduction="mean")
BCEWithLogitsLoss = _row(
    "BCEWithLogitsLoss", "Sigmoid and binary cross entropy.", F.binary_cross_entropy_with_logits,
    reduction="mean",
)  # fmt: skip
CrossEntropyLoss = _row(
    "CrossEntropyLoss", "Softmax and negative log likelihood of classes, or of class probabilities.",
    F.cross_entropy, classes=True, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0,
)  # fmt: skip
NLLLoss = _row(
    "NLLLoss", "Negative log likelihood of classes, from log-probabilities.",
    F.nll_loss, classes=True, weight=None, ignore_index=-100, reduction="mean",
)  # fmt: skip
BCELoss = _row(
    "BCELoss", "Binary cross entropy of probabilities.", F.binary_cross_entropy, weight=None, reduction="mean"
)
SmoothL1Loss = _row(
    "SmoothL1Loss", "Squared below `beta`, absolute above.", F.smooth_l1_loss, beta=1.0, reduction="none"
)
