"""The recipes' data: scikit-learn's real digits, the standard library's source, MNIST from IDX files.

`Batches` serves two tensors in shuffled batches and knows its position, so that a resumed run sees the
batches the unstopped one would have seen. Models and training do not belong here.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError, DataError
from halfstep.idx import read_idx

_MNIST_FILES = {
    "train images": "train-images-idx3-ubyte",
    "train labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class Dataset:
    """Training and test tensors; the first dimension of each counts examples."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            x, y = getattr(self, f"{part}_x"), getattr(self, f"{part}_y")
            if len(x) != len(y) or len(x) == 0:
                raise DataError(
                    f"{self.name}: {part} has {len(x)} inputs and {len(y)} targets; need equal, > 0"
                )


class Batches:
    """Endless shuffled batches of (x, y), whose order depends on (seed, epoch) alone.

    Every pass draws a fresh permutation and drops the last incomplete batch. Iterating yields the rest of
    the current pass, so `for x, y in batches` is one epoch. `state_dict()` holds the position.
    """

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, *, seed: int = 0) -> None:
        if len(x) != len(y):
            raise DataError(f"{len(x)} inputs but {len(y)} targets; give one target for each input")
        if not 1 <= batch_size <= len(x):
            raise ConfigError(f"batch_size={batch_size} with {len(x)} examples; use 1 to {len(x)}")
        self.x, self.y, self.batch_size, self.seed = x, y, batch_size, seed
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return len(self.x) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        order = torch.randperm(len(self.x), generator=generator).to(self.x.device)
        while self.position < len(self):
            start = self.position * self.batch_size
            take = order[start : start + self.batch_size]
            self.position += 1
            yield self.x[take], self.y[take]
        self.epoch += 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        """Position: seed, epoch, batches already served in it."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        self.seed, self.epoch, self.position = int(state["seed"]), int(state["epoch"]), int(state["position"])


class TextBatches(Batches):
    """Random windows of a character stream: x [batch, context] int64 and y, the same shifted by one."""

    def __init__(self, text: Tensor, batch_size: int, context: int, *, seed: int = 0) -> None:
        if len(text) <= context + 1:
            raise DataError(f"text of {len(text)} characters is too short for a context of {context}")
        starts = torch.arange(0, len(text) - context - 1, max(1, context // 2))
        super().__init__(starts, starts, min(batch_size, len(starts)), seed=seed)
        self.text = text
        self._window = torch.arange(context)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for starts, _ in super().__iter__():
            at = starts[:, None] + self._window
            yield self.text[at], self.text[at + 1]


@cache
def digits() -> Dataset:
    """Return the 1,797 handwritten 8x8 digits of scikit-learn, scaled up to [N, 1, 28, 28] in 0..255, fp32.

    500 are the test, in a split that is fixed (seed 0), so that seeds of a run vary training alone. Needs
    scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits need scikit-learn: pip install scikit-learn") from error
    bunch: Any = load_digits()
    small = torch.tensor(bunch.images, dtype=torch.float32)[:, None] * (255.0 / 16.0)
    images = torch.nn.functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-500], order[-500:]
    return Dataset("digits", images[train], labels[train], images[test], labels[test])


def normalise(data: Dataset, mean: float, std: float) -> Dataset:
    """(x / 255 - mean) / std on both parts of an image data set in 0..255."""
    train, test = ((x / 255.0 - mean) / std for x in (data.train_x, data.test_x))
    return replace(data, train_x=train, test_x=test)


def _mnist_file(folder: Path, stem: str) -> Path:
    names = [stem, f"{stem}.gz", stem.replace("-idx", ".idx"), stem.replace("-idx", ".idx") + ".gz"]
    for name in names:
        for path in (folder / name, folder / "MNIST" / "raw" / name):
            if path.is_file():
                return path
    raise DataError(
        f"no {stem} (or {stem}.gz) in {folder}; --data wants a folder with MNIST's four IDX files"
    )


def mnist(folder: str | Path) -> Dataset:
    """MNIST from its four IDX files in `folder`: images fp32 [N, 1, H, W] in 0..255, labels int64 [N]."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; --data wants a folder with MNIST's four IDX files")
    parts: dict[str, Tensor] = {}
    for part, stem in _MNIST_FILES.items():
        path = _mnist_file(folder, stem)
        tensor = read_idx(path)
        dims = 3 if part.endswith("images") else 1
        if tensor.dim() != dims:
            raise DataError(f"{path} has {tensor.dim()} dimensions; {part} have {dims}")
        if dims == 1 and len(tensor) and int(tensor.max()) > 9:
            raise DataError(f"{path} holds label {int(tensor.max())}; labels are 0 to 9")
        parts[part] = tensor
    images = {k: parts[f"{k} images"].float()[:, None] for k in ("train", "test")}
    labels = {k: parts[f"{k} labels"].long() for k in ("train", "test")}
    return Dataset("mnist", images["train"], labels["train"], images["test"], labels["test"])


def image_data(folder: str | Path | None) -> Dataset:
    """MNIST when a folder is given, else the bundled digits; always [N, 1, 28, 28] in 0..255."""
    data = digits() if folder is None else mnist(folder)
    if data.train_x.shape[-2:] != (28, 28):
        raise DataError(f"images in {folder} are {list(data.train_x.shape[-2:])}; the recipe wants 28x28")
    return data


_ALPHABET = "\n" + "".join(chr(c) for c in range(32, 127))
VOCABULARY = len(_ALPHABET)
CHARACTERS = 1_000_000  # of text at most


def encode(text: str) -> Tensor:
    """Characters as int64 codes 0..95: newline, then printable ASCII; tabs become spaces, the rest '?'."""
    codes = torch.full((256,), _ALPHABET.index("?"), dtype=torch.int64)
    for code, char in enumerate(_ALPHABET):
        codes[ord(char)] = code
    codes[ord("\t")] = _ALPHABET.index(" ")
    raw = text.encode("latin-1", errors="replace")
    return codes[torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()]


@cache
def stdlib_text() -> tuple[Tensor, Tensor]:
    """Return the standard library's top-level modules in name order, as codes: (train, test = last 5 %)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[str] = []
    total = 0
    for path in sorted(folder.glob("*.py")):
        pieces.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(pieces[-1])
        if total >= CHARACTERS:
            break
    if total < 10_000:
        raise DataError(f"found {total} characters of Python source in {folder}; text-gpt needs 10,000")
    codes = encode("".join(pieces)[:CHARACTERS])
    cut = int(0.95 * len(codes))
    return codes[:cut], codes[cut:]
