"""The detector: a convolutional backbone, a head over a grid, and the box, objectness and class losses."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STRIDE = 8


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
    )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(block(channels, channels), block(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Detector(nn.Module):
    """Images (n, 3, s, s) to raw predictions (n, s/8, s/8, 5 + classes): x, y, w, h, objectness, classes."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            block(3, width, 2),
            block(width, 2 * width, 2),
            Residual(2 * width),
            block(2 * width, 4 * width, 2),
            Residual(4 * width),
        )
        self.head = nn.Sequential(block(4 * width, 4 * width), nn.Conv2d(4 * width, 5 + classes, 1))
        nn.init.constant_(self.head[-1].bias[4], -4.0)  # few cells hold an object

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images * 2 - 1)).permute(0, 2, 3, 1)


def boxes_of(raw: Tensor) -> Tensor:
    """Decode (n, g, g, >=4) into boxes (x, y, w, h) as shares of the image."""
    grid = raw.shape[1]
    cell = torch.arange(grid, device=raw.device, dtype=raw.dtype)
    offset = torch.stack([cell.expand(grid, grid), cell[:, None].expand(grid, grid)], -1)
    centre = (raw[..., :2].sigmoid() * 2 - 0.5 + offset) / grid
    return torch.cat([centre, (raw[..., 2:4].sigmoid() * 2) ** 2 * 0.25], -1)


def iou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes (..., 4) and the generalised one (Rezatofighi et al., CVPR 2019)."""
    low_a, high_a = a[..., :2] - a[..., 2:] / 2, a[..., :2] + a[..., 2:] / 2
    low_b, high_b = b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2
    common = (torch.minimum(high_a, high_b) - torch.maximum(low_a, low_b)).clamp(min=0).prod(-1)
    union = a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - common
    hull = (torch.maximum(high_a, high_b) - torch.minimum(low_a, low_b)).prod(-1)
    overlap = common / (union + 1e-7)
    return overlap, overlap - (hull - union) / (hull + 1e-7)


def detection_loss(raw: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of box, objectness and class loss, and the three.

    raw: predictions; targets: rows (image, class, x, y, w, h).
    """
    raw = raw.float()
    grid = raw.shape[1]
    image, label = targets[:, 0].long(), targets[:, 1].long()
    column, row = ((targets[:, 2:4] * grid).long().clamp(0, grid - 1)).unbind(1)
    chosen = raw[image, row, column]
    overlap, generalised = iou(boxes_of(raw)[image, row, column], targets[:, 2:])
    objectness = torch.zeros_like(raw[..., 4])
    objectness[image, row, column] = overlap.detach().clamp(min=0.3)
    box = (1 - generalised).mean() if len(targets) else raw.sum() * 0
    kind = F.cross_entropy(chosen[:, 5:], label) if len(targets) else raw.sum() * 0
    found = F.binary_cross_entropy_with_logits(raw[..., 4], objectness) * grid
    parts = torch.stack([box, found, kind])
    return 2 * box + found + kind, parts.detach()


@torch.no_grad()
def detections(raw: Tensor, keep: int = 20) -> list[Tensor]:
    """Per image rows (confidence, class, x, y, w, h) after suppression of lower boxes of the same class."""
    raw = raw.float().flatten(1, 2)
    boxes = boxes_of(raw.unflatten(1, (int(raw.shape[1] ** 0.5), -1))).flatten(1, 2)
    confidence, label = (raw[..., 4:5].sigmoid() * raw[..., 5:].softmax(-1)).max(-1)
    return [_suppress(c, k, b, keep) for c, k, b in zip(confidence, label, boxes)]


def _suppress(confidence: Tensor, label: Tensor, boxes: Tensor, keep: int) -> Tensor:
    order = confidence.argsort(descending=True)[: 4 * keep]
    order = order[confidence[order] > 0.01]
    rows = torch.cat([confidence[order, None], label[order, None].float(), boxes[order]], 1)
    overlap = iou(rows[:, None, 2:], rows[None, :, 2:])[0]
    alive = torch.ones(len(rows), dtype=torch.bool)
    for n in range(len(rows)):
        if alive[n]:
            alive[n + 1 :] &= ~((overlap[n, n + 1 :] > 0.5) & (rows[n + 1 :, 1] == rows[n, 1]))
    return rows[alive][:keep]
