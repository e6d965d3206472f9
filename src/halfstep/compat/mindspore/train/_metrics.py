"""Metrics by name. Each is fed batch by batch and keeps sums, in float64 on the host."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from halfstep.compat.mindspore._tensor import check_kind
from halfstep.errors import ConfigError

__all__ = [
    "F1",
    "MAE",
    "MSE",
    "Accuracy",
    "ConfusionMatrix",
    "Loss",
    "Metric",
    "Perplexity",
    "Precision",
    "Recall",
    "Top1CategoricalAccuracy",
    "Top5CategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "get_metric_fn",
    "names",
]


def _array(x: Any) -> np.ndarray[Any, Any]:
    return x.detach().double().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)


class Metric(abc.ABC):
    """Base of the metrics: `clear`, `update` with a batch, `eval`."""

    def __init__(self) -> None:
        self.clear()

    @abc.abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abc.abstractmethod
    def update(self, *inputs: Any) -> None:
        """Take in one batch: (output, label), or the loss for `Loss`."""

    @abc.abstractmethod
    def eval(self) -> Any:
        """The value over all batches."""


def _at_least_one(metric: Metric, count: float) -> None:
    if not count:
        raise RuntimeError(
            f"The '{type(metric).__name__}' can not be calculated: the number of samples is 0."
        )


class _Mean(Metric):
    """A sum over batches divided by a count."""

    def clear(self) -> None:
        """Forget everything."""
        self._sum, self._count = 0.0, 0.0

    def eval(self) -> float:
        """The mean; RuntimeError before the first batch."""
        _at_least_one(self, self._count)
        return float(self._sum / self._count)

    def _add(self, total: Any, count: float) -> None:
        self._sum += float(total)
        self._count += count


class Loss(_Mean):
    """The mean of the batches' losses."""

    def update(self, *inputs: Any) -> None:
        """Take in the loss of one batch."""
        self._add(_array(inputs[0]).mean(), 1)


class MAE(_Mean):
    """Sum of absolute differences by number of samples."""

    _of: Callable[..., Any] = np.abs

    def update(self, *inputs: Any) -> None:
        """(output, label) of one shape, samples first."""
        output, label = map(_array, inputs)
        self._add(type(self)._of(output.reshape(label.shape) - label).sum(), len(label))


class MSE(MAE):
    """Sum of squared differences by number of samples."""

    _of = np.square


def _classes(label: np.ndarray[Any, Any], output: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Labels as classes, given as such or one-hot."""
    return (label.argmax(1) if label.ndim == output.ndim else label).astype(np.int64)


class TopKCategoricalAccuracy(_Mean):
    """Share of samples whose label is among the k largest outputs."""

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ConfigError(f"For 'TopKCategoricalAccuracy', the argument 'k' must be at least 1, got {k}")
        self.k = k

    def update(self, *inputs: Any) -> None:
        """[N, C] and classes [N] or one-hot [N, C]."""
        output, label = map(_array, inputs)
        best = np.argsort(-output, axis=1, kind="stable")[:, : self.k]
        self._add((best == _classes(label, output)[:, None]).any(1).sum(), len(output))


class Top1CategoricalAccuracy(TopKCategoricalAccuracy):
    """Share of samples whose label is the largest output."""

    def __init__(self) -> None:
        super().__init__(1)


class Top5CategoricalAccuracy(TopKCategoricalAccuracy):
    """Share of samples whose label is among the five largest outputs."""

    def __init__(self) -> None:
        super().__init__(5)


class Accuracy(Top1CategoricalAccuracy):
    """Share of right samples."""


class Perplexity(_Mean):
    """exp of the mean of -log probability of the label."""

    def update(self, *inputs: Any) -> None:
        """Probabilities [N, C] and classes [N]."""
        output, label = map(_array, inputs)
        rows = output.reshape(-1, output.shape[-1])
        chosen = rows[np.arange(len(rows)), label.reshape(-1).astype(np.int64)]
        self._add(-np.log(np.maximum(chosen, 1e-10)).sum(), len(rows))

    def eval(self) -> float:
        """The perplexity; RuntimeError before the first batch."""
        return math.exp(super().eval())


class ConfusionMatrix(Metric):
    """Counts of samples by label (row) and prediction (column)."""

    def __init__(self, num_classes: int | None = None) -> None:
        self.num_classes = num_classes
        super().__init__()

    def clear(self) -> None:
        """Forget everything."""
        n = self.num_classes or 0
        self._counts = np.zeros((n, n))

    def update(self, *inputs: Any) -> None:
        """[N, C], or classes [N], and classes [N] or one-hot [N, C]."""
        output, label = map(_array, inputs)
        predicted = (output.argmax(1) if output.ndim > 1 else output).astype(np.int64)
        classes = _classes(label, output)
        n = self.num_classes or (
            output.shape[1] if output.ndim > 1 else int(max(predicted.max(), classes.max())) + 1
        )
        if n > len(self._counts):
            self._counts = np.pad(self._counts, (0, n - len(self._counts)))
        np.add.at(self._counts, (classes, predicted), 1)

    def eval(self) -> Any:
        """[num_classes, num_classes] counts."""
        _at_least_one(self, self._counts.sum())
        return self._counts


class Precision(ConfusionMatrix):
    """By class, the share of its predictions that are right."""

    def eval(self, average: bool = False) -> Any:
        """[num_classes], or their mean."""
        counts = super().eval()
        value = self._share(np.diag(counts), counts.sum(0), counts.sum(1))
        return float(value.mean()) if average else value

    def _share(self, hits: Any, predicted: Any, support: Any) -> Any:
        return hits / np.maximum(predicted, 1)


class Recall(Precision):
    """By class, the share of its samples that are found."""

    def _share(self, hits: Any, predicted: Any, support: Any) -> Any:
        return hits / np.maximum(support, 1)


class F1(Precision):
    """By class, the harmonic mean of precision and recall."""

    def _share(self, hits: Any, predicted: Any, support: Any) -> Any:
        return 2 * hits / np.maximum(predicted + support, 1)


_METRICS: Mapping[str, Callable[..., Metric]] = {
    "accuracy": Accuracy,
    "acc": Accuracy,
    "precision": Precision,
    "recall": Recall,
    "F1": F1,
    "topk": TopKCategoricalAccuracy,
    "top_1_accuracy": Top1CategoricalAccuracy,
    "top_5_accuracy": Top5CategoricalAccuracy,
    "mae": MAE,
    "mse": MSE,
    "loss": Loss,
    "perplexity": Perplexity,
    "confusion_matrix": ConfusionMatrix,
}


def names() -> list[str]:
    """The names of the metrics."""
    return sorted(_METRICS)


def get_metric_fn(name: str, *args: Any, **kwargs: Any) -> Metric:
    """The metric of a name, made with these arguments; KeyError for a name that is none."""
    if name not in _METRICS:
        raise KeyError(
            f"For 'get_metric_fn', unsupported metric {name}: expected one of {', '.join(names())}"
        )
    return _METRICS[name](*args, **kwargs)


def get_metrics(metrics: Any) -> dict[str, Metric]:
    """Metrics given as a set of names, or as a dict of names and Metrics."""
    if metrics is None:
        return {}
    if isinstance(metrics, dict):
        for name, metric in metrics.items():
            check_kind("Model", f"metric {name}", metric, Metric)
        return dict(metrics)
    check_kind("Model", "metrics", metrics, dict, set)
    return {name: get_metric_fn(name) for name in sorted(metrics)}
