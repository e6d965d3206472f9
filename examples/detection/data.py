"""Detection data: bundled digits on bundled photographs, or a folder with YOLO or COCO labels.

Every source gives images as float32 (n, 3, size, size) in [0, 1] and, per image, an array of rows
(class, centre x, centre y, width, height), all but the class as shares of the image's sides.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Labels = list[np.ndarray]


@dataclass(frozen=True)
class Images:
    """Images with their boxes, and the names of the classes."""

    pixels: Tensor
    labels: Labels
    names: list[str]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Images and one row (index in the batch, class, x, y, w, h) for every box in them."""
        rows = [np.insert(self.labels[i], 0, n, axis=1) for n, i in enumerate(indices)]
        return self.pixels[torch.from_numpy(indices)], torch.from_numpy(np.concatenate(rows)).float()


def load(data: str, size: int, train_images: int) -> tuple[Images, Images]:
    """Training and held-out images of `digits`, of a YOLO folder or of a COCO json file.

    A YOLO folder holds `images/` and `labels/`, one txt for each image; a COCO json lies beside its images.
    """
    if data == "digits":
        return digits_on_photographs(train_images, size, seed=0), digits_on_photographs(
            256, size, seed=1, held_out=True
        )
    path = Path(data)
    if path.is_file() and path.suffix == ".json":
        return _split(read_coco(path, size))
    if (path / "labels").is_dir():
        return _split(read_yolo(path, size))
    raise SystemExit(
        f"detect: --data {data!r}: expected 'digits', a folder with labels/, or a COCO .json file"
    )


def _split(images: Images) -> tuple[Images, Images]:
    """The last fifth is held out."""
    cut = max(1, len(images) * 4 // 5)
    return (
        Images(images.pixels[:cut], images.labels[:cut], images.names),
        Images(images.pixels[cut:], images.labels[cut:], images.names),
    )


@cache
def _photographs() -> list[np.ndarray]:
    from sklearn.datasets import load_sample_images

    return [image.astype(np.float32) / 255 for image in load_sample_images().images]


@cache
def _digits(held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    mine = np.arange(len(bunch.target)) % 5 == 0
    mine = mine if held_out else ~mine
    return bunch.images[mine].astype(np.float32) / 16, bunch.target[mine]


def digits_on_photographs(count: int, size: int, seed: int, held_out: bool = False) -> Images:
    """Images with one to four handwritten digits each, coloured, of several sizes, on crops of photographs.

    Held-out images use digits that no training image shows.
    """
    rng = np.random.default_rng(seed)
    glyphs, targets = _digits(held_out)
    pixels = np.empty((count, 3, size, size), np.float32)
    labels: Labels = []
    for image in pixels:
        photo = _photographs()[rng.integers(2)]
        top, left = rng.integers(photo.shape[0] - size), rng.integers(photo.shape[1] - size)
        image[:] = photo[top : top + size, left : left + size].transpose(2, 0, 1)
        labels.append(_place(image, glyphs, targets, rng))
    return Images(torch.from_numpy(pixels), labels, [str(digit) for digit in range(10)])


def _place(
    image: np.ndarray, glyphs: np.ndarray, targets: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Paint digits into free places of the image; return their rows."""
    size = image.shape[1]
    taken = np.zeros((size, size), bool)
    rows = []
    for _ in range(rng.integers(1, 5)):
        which, scale = rng.integers(len(targets)), rng.integers(2, 4)
        glyph = np.kron(glyphs[which], np.ones((scale, scale), np.float32))
        side = len(glyph)
        y, x = rng.integers(size - side + 1, size=2)
        if taken[y : y + side, x : x + side].any():
            continue
        taken[y : y + side, x : x + side] = True
        patch = image[:, y : y + side, x : x + side]
        colour = (patch.mean() < 0.5) * 0.7 + rng.uniform(0, 0.3, (3, 1, 1))
        patch[:] = patch * (1 - glyph) + colour * glyph
        inked = np.argwhere(glyph > 0.2)
        (y0, x0), (y1, x1) = inked.min(0), inked.max(0) + 1
        box = (x + (x0 + x1) / 2, y + (y0 + y1) / 2, x1 - x0, y1 - y0)
        rows.append([targets[which], *(v / size for v in box)])
    return np.array(rows, np.float32).reshape(-1, 5)


def _read_image(path: Path, size: int) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        resized = image.convert("RGB").resize((size, size))
        return np.asarray(resized, np.float32).transpose(2, 0, 1) / 255


def read_yolo(folder: Path, size: int) -> Images:
    """Read `images/NAME.*` with `labels/NAME.txt`: lines of class, centre x, centre y, width, height."""
    pixels, labels = [], []
    for image in sorted((folder / "images").iterdir()):
        text = folder / "labels" / f"{image.stem}.txt"
        lines = text.read_text().splitlines() if text.exists() else []
        rows = [[float(word) for word in line.split()] for line in lines if line.strip()]
        if any(len(row) != 5 or not all(0 <= v <= 1 for v in row[1:]) for row in rows):
            raise SystemExit(f"detect: {text}: expected lines of class x y w h with x y w h between 0 and 1")
        pixels.append(_read_image(image, size))
        labels.append(np.array(rows, np.float32).reshape(-1, 5))
    if not pixels:
        raise SystemExit(f"detect: {folder / 'images'} holds no images")
    classes = 1 + max((int(rows[:, 0].max()) for rows in labels if len(rows)), default=0)
    return Images(torch.from_numpy(np.stack(pixels)), labels, [str(c) for c in range(classes)])


def read_coco(path: Path, size: int) -> Images:
    """Read a COCO json: boxes in pixels (left, top, width, height) become shares of each image."""
    table = json.loads(path.read_text())
    missing = {"images", "annotations", "categories"} - set(table)
    if missing:
        raise SystemExit(f"detect: {path} is no COCO file: {', '.join(sorted(missing))} missing")
    order = {category["id"]: n for n, category in enumerate(table["categories"])}
    rows: dict[int, list[list[float]]] = {image["id"]: [] for image in table["images"]}
    sizes = {image["id"]: (image["width"], image["height"]) for image in table["images"]}
    for box in table["annotations"]:
        left, top, width, height = box["bbox"]
        across, down = sizes[box["image_id"]]
        centre = ((left + width / 2) / across, (top + height / 2) / down)
        rows[box["image_id"]].append([order[box["category_id"]], *centre, width / across, height / down])
    pixels = np.stack([_read_image(path.parent / image["file_name"], size) for image in table["images"]])
    labels = [np.array(rows[image["id"]], np.float32).reshape(-1, 5) for image in table["images"]]
    return Images(torch.from_numpy(pixels), labels, [category["name"] for category in table["categories"]])
