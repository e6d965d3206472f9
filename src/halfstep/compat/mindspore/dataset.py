"""mindspore.dataset: MNIST or arrays, mapped, shuffled and batched, each call giving a new data set.

Whole batches are gathered from memory and transformed at once. `vision` and `transforms` hold operations on
images of [H, W, C] or [N, H, W, C].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore._tensor import Tensor, as_tensor, check_whole
from halfstep.errors import ConfigError, DataError
from halfstep.idx import read_idx

Operation = Callable[[Any], Any]


def _apply(operation: Operation, values: torch.Tensor, each: bool) -> torch.Tensor:
    """`each`: a user's operation sees one sample at a time (it was given before `batch`)."""
    if getattr(operation, "whole_batches", False):
        return operation(values)
    if not each:
        return torch.as_tensor(operation(values.numpy()))
    return torch.as_tensor(np.stack([np.asarray(operation(value.numpy())) for value in values]))


@dataclass
class Dataset:
    """Columns of equal length, in order or shuffled anew each epoch, one by one or in batches.

    `columns`: name -> tensor, samples first. Shuffling draws from torch's generator (`set_seed`).
    """

    columns: Mapping[str, torch.Tensor]
    shuffled: bool = False
    batch_size: int | None = None
    drop_remainder: bool = False
    maps: tuple[tuple[str, Operation, bool], ...] = ()
    repeats: int = 1
    _length: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if not lengths or len(set(lengths.values())) != 1:
            raise DataError(f"the columns of a data set must have one length, got {lengths}")
        self._length = next(iter(lengths.values()))

    def _with(self, **changes: Any) -> Self:
        changed = copy.copy(self)
        for name, value in changes.items():
            setattr(changed, name, value)
        return changed

    def map(self, operations: Any, input_columns: str | Sequence[str] | None = None) -> Self:
        """Apply one operation, or several in turn, to a column (the first, where none is named).

        Those of `vision` and `transforms` take whole batches; others get numpy arrays: one sample before
        `batch`, a batch after it.
        """
        listed = tuple(operations) if isinstance(operations, list | tuple) else (operations,)
        named = [next(iter(self.columns))] if input_columns is None else input_columns
        names = [named] if isinstance(named, str) else list(named)
        for name in names:
            if name not in self.columns:
                raise ConfigError(f"this data set has no column {name!r}, but {', '.join(self.columns)}")
        each = self.batch_size is None
        added = ((name, operation, each) for name in names for operation in listed)
        return self._with(maps=(*self.maps, *added))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Self:
        """Join that many samples; the last batch may be smaller, or is dropped."""
        check_whole("batch", "batch_size", batch_size)
        if self.batch_size is not None:
            raise ConfigError("this data set is in batches already: call batch() once")
        return self._with(batch_size=batch_size, drop_remainder=drop_remainder)

    def shuffle(self, buffer_size: int) -> Self:
        """Shuffle every epoch anew, all samples, whatever the buffer size."""
        return self._with(shuffled=True)

    def repeat(self, count: int) -> Self:
        """Run through the data that many times in one epoch."""
        return self._with(repeats=self.repeats * count)

    def get_dataset_size(self) -> int:
        """Batches (samples, before `batch`) in an epoch."""
        size = self.batch_size or 1
        full = self._length // size if self.drop_remainder else -(-self._length // size)
        return full * self.repeats

    def get_batch_size(self) -> int:
        """Samples in a batch."""
        return self.batch_size or 1

    def get_col_names(self) -> list[str]:
        """The names of the columns."""
        return list(self.columns)

    def _epoch(self) -> Iterator[dict[str, Tensor]]:
        size = self.batch_size or 1
        home = torch.get_default_device()
        for _ in range(self.repeats):
            order = torch.randperm(self._length) if self.shuffled else torch.arange(self._length)
            end = self._length - self._length % size if self.drop_remainder else self._length
            for start in range(0, end, size):
                chosen = order[start : start + size]
                row = {name: column[chosen] for name, column in self.columns.items()}
                for name, operation, each in self.maps:
                    row[name] = _apply(operation, row[name], each)
                single = self.batch_size is None
                yield {name: as_tensor((t[0] if single else t).to(home)) for name, t in row.items()}

    def create_dict_iterator(
        self, num_epochs: int = -1, output_numpy: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Rows by column name, for one epoch; call it again for the next."""
        for row in self._epoch():
            yield {name: t.asnumpy() for name, t in row.items()} if output_numpy else row

    def create_tuple_iterator(
        self, columns: Sequence[str] | None = None, num_epochs: int = -1, output_numpy: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Rows as tuples, for one epoch; call it again for the next."""
        names = list(self.columns) if columns is None else list(columns)
        for row in self.create_dict_iterator(num_epochs, output_numpy):
            yield tuple(row[name] for name in names)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self.create_tuple_iterator()


_USAGES: Mapping[str, tuple[str, ...]] = {"train": ("train",), "test": ("t10k",), "all": ("train", "t10k")}


class MnistDataset(Dataset):
    """MNIST's IDX files in a folder: "image" [28, 28, 1] uint8 and "label"; shuffled unless told otherwise.

    Args:
        dataset_dir: the folder with train-images-idx3-ubyte and so on.
        usage: "train", "test", "all"; None reads what is there.
        num_samples: the first so many only.
        shuffle: a new order every epoch; None does.

    Raises DataError for a folder without them, or a damaged file.
    """

    def __init__(
        self,
        dataset_dir: str | Path,
        usage: str | None = None,
        num_samples: int | None = None,
        num_parallel_workers: int | None = None,
        shuffle: bool | None = None,
    ) -> None:
        if usage is not None and usage not in _USAGES:
            raise ConfigError(f"usage must be one of {list(_USAGES)}, got {usage!r}")
        folder = Path(dataset_dir)
        parts = [p for p in _USAGES[usage or "all"] if usage or (folder / f"{p}-images-idx3-ubyte").is_file()]
        if not parts:
            raise DataError(f"no train-images-idx3-ubyte or t10k-images-idx3-ubyte in {folder}")
        images = torch.cat([read_idx(folder / f"{part}-images-idx3-ubyte") for part in parts])
        labels = torch.cat([read_idx(folder / f"{part}-labels-idx1-ubyte") for part in parts])
        columns = {"image": images[:num_samples, ..., None], "label": labels[:num_samples].to(torch.int32)}
        super().__init__(columns, shuffled=shuffle is None or shuffle)


class NumpySlicesDataset(Dataset):
    """Arrays in memory, as a dict by column name, or a tuple named by `column_names`."""

    def __init__(
        self, data: Any, column_names: Sequence[str] | None = None, shuffle: bool | None = None
    ) -> None:
        if not isinstance(data, Mapping):
            parts = data if isinstance(data, tuple) else (data,)
            names = column_names or [f"column_{i}" for i in range(len(parts))]
            data = dict(zip(names, parts, strict=True))
        columns = {name: torch.as_tensor(np.asarray(values)) for name, values in data.items()}
        super().__init__(columns, shuffled=shuffle is None or shuffle)


class Rescale:
    """x * rescale + shift, as float32."""

    whole_batches = True

    def __init__(self, rescale: float, shift: float) -> None:
        self.rescale, self.shift = float(rescale), float(shift)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Any shape and dtype."""
        return image.float() * self.rescale + self.shift


class Normalize:
    """(x - mean) / std by channel."""

    whole_batches = True

    def __init__(self, mean: Sequence[float], std: Sequence[float], is_hwc: bool = True) -> None:
        if len(mean) != len(std) or min(std) <= 0:
            raise ConfigError(f"Normalize takes as many means as positive stds, got mean={mean}, std={std}")
        shape = (-1,) if is_hwc else (-1, 1, 1)
        self.mean, self.std = (torch.tensor(v, dtype=torch.float32).reshape(shape) for v in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """[..., H, W, C], or [..., C, H, W] with `is_hwc=False`."""
        return (image.float() - self.mean.to(image.device)) / self.std.to(image.device)


class HWC2CHW:
    """[..., H, W, C] to [..., C, H, W]."""

    whole_batches = True

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Any dtype."""
        return image.movedim(-1, -3).contiguous()


class TypeCast:
    """Another dtype."""

    whole_batches = True

    def __init__(self, output_type: torch.dtype) -> None:
        self.output_type = output_type

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return x.to(self.output_type)


__getattr__ = absent("dataset")
