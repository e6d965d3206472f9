"""Mean average precision at an intersection over union of 0.5, the area under the precision envelope."""

import numpy as np
from torch import Tensor

from .model import iou


def mean_average_precision(found: list[Tensor], truth: list[Tensor], classes: int) -> float:
    """mAP@0.5 over the classes that occur in `truth`.

    found: per image rows (confidence, class, x, y, w, h); truth: per image rows (class, x, y, w, h).
    """
    scores = [_average_precision(found, truth, kind) for kind in range(classes)]
    present = [score for score in scores if score is not None]
    return float(np.mean(present)) if present else 0.0


def _average_precision(found: list[Tensor], truth: list[Tensor], kind: int) -> float | None:
    total = sum(int((rows[:, 0] == kind).sum()) for rows in truth)
    if total == 0:
        return None
    hits: list[tuple[float, bool]] = []
    for mine, theirs in zip(found, truth):
        mine, theirs = mine[mine[:, 1] == kind], theirs[theirs[:, 0] == kind]
        hits += _match(mine, theirs)
    if not hits:
        return 0.0
    correct = np.array([hit for _, hit in sorted(hits, key=lambda pair: -pair[0])], float)
    recall = np.cumsum(correct) / total
    precision = np.cumsum(correct) / np.arange(1, len(correct) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * envelope))


def _match(mine: Tensor, theirs: Tensor) -> list[tuple[float, bool]]:
    """Each detection, best first, takes the free true box it overlaps most; at 0.5 or more it is a hit."""
    free = [True] * len(theirs)
    hits = []
    overlap = iou(mine[:, None, 2:], theirs[None, :, 1:])[0]
    for n in mine[:, 0].argsort(descending=True).tolist():
        best = max(((float(overlap[n, j]), j) for j in range(len(theirs)) if free[j]), default=(0.0, -1))
        if best[0] >= 0.5:
            free[best[1]] = False
        hits.append((float(mine[n, 0]), best[0] >= 0.5))
    return hits
