"""mindspore.dataset: MNIST, arrays or a source of one's own, mapped, shuffled and batched by new data sets.

Whole batches are gathered from memory and transformed at once; what a GeneratorDataset reads is transformed
sample by sample up to `batch`, and one batch of it is held. `vision` and `transforms` hold operations on
images of [H, W, C] or [N, H, W, C].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore._tensor import Tensor, as_tensor, check_whole
from halfstep.errors import ConfigError, DataError
from halfstep.idx import read_idx

Operation = Callable[[Any], Any]


Map = tuple[str, Operation]
"""A column, and what is done to it."""


def _apply(operation: Operation, values: torch.Tensor) -> torch.Tensor:
    """To one sample, or to whole batches; a user's own operation gets numpy arrays."""
    if getattr(operation, "whole_batches", False):
        return operation(values)
    return torch.as_tensor(np.asarray(operation(values.numpy())))


@dataclass(frozen=True)
class _Arrays:
    """Columns of equal length in memory, samples first."""

    columns: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if not lengths or len(set(lengths.values())) != 1:
            raise DataError(f"the columns of a data set must have one length, got {lengths}")

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def count(self) -> int:
        return len(next(iter(self.columns.values())))

    def epoch(self, size: int, shuffled: int, maps: Sequence[Map]) -> Iterator[dict[str, torch.Tensor]]:
        """Samples, `size` at a time, the last of them maybe fewer."""
        order = torch.randperm(self.count()) if shuffled else torch.arange(self.count())
        for chosen in order.split(size):
            row = {name: column[chosen] for name, column in self.columns.items()}
            for name, operation in maps:
                whole = getattr(operation, "whole_batches", False)
                values = row[name]
                row[name] = (
                    operation(values) if whole else torch.stack([_apply(operation, v) for v in values])
                )
            yield row


@dataclass(frozen=True)
class _Rows:
    """Samples that a source gives: by index where it has `__getitem__` and `__len__`, else in turn."""

    source: Any
    names: list[str]
    limit: int | None

    @property
    def indexed(self) -> bool:
        return hasattr(self.source, "__getitem__") and hasattr(self.source, "__len__")

    def count(self) -> int:
        if hasattr(self.source, "__len__"):
            return len(self.source) if self.limit is None else min(len(self.source), self.limit)
        return sum(1 for _ in self._samples(False))

    def _samples(self, shuffled: bool) -> Iterator[Any]:
        if self.indexed:
            order = torch.randperm(len(self.source)) if shuffled else torch.arange(len(self.source))
            return (self.source[i] for i in order.tolist()[: self.limit])
        samples: Any = self.source() if callable(self.source) else iter(self.source)
        return islice(samples, self.limit)

    def _row(self, sample: Any, maps: Sequence[Map]) -> dict[str, torch.Tensor]:
        values = sample if isinstance(sample, tuple | list) else (sample,)
        if len(values) != len(self.names):
            raise DataError(
                f"the source of a GeneratorDataset gave {len(values)} values for the columns "
                f"{', '.join(self.names)}: it must give one for each"
            )
        row = {name: torch.as_tensor(np.asarray(value)) for name, value in zip(self.names, values)}
        for name, operation in maps:
            row[name] = _apply(operation, row[name])
        return row

    def epoch(self, size: int, shuffled: int, maps: Sequence[Map]) -> Iterator[dict[str, torch.Tensor]]:
        """Samples, `size` at a time; those that come in their own order are shuffled within a buffer."""
        samples = self._samples(bool(shuffled))
        if shuffled and not self.indexed:
            samples = _shuffle_within(shuffled, samples)
        while chosen := [self._row(sample, maps) for sample in islice(samples, size)]:
            yield {name: torch.stack([row[name] for row in chosen]) for name in self.names}


def _shuffle_within(size: int, samples: Iterator[Any]) -> Iterator[Any]:
    """Each time one of the next `size` samples."""
    buffer = list(islice(samples, size))
    while buffer:
        at = int(torch.randint(len(buffer), ()))
        buffer[at], sample = buffer[-1], buffer[at]
        buffer.pop()
        buffer.extend(islice(samples, 1))
        yield sample


@dataclass
class Dataset:
    """Samples in order or shuffled anew each epoch, one by one or in batches.

    `shuffled` is the size of the buffer, 0 for none. Shuffling draws from torch's generator (`set_seed`).
    """

    source: _Arrays | _Rows
    shuffled: int = 0
    batch_size: int | None = None
    drop_remainder: bool = False
    maps: tuple[Map, ...] = ()
    batch_maps: tuple[Map, ...] = ()
    repeats: int = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"a data set has no {name!r} here, but map, batch, shuffle and repeat: choose samples and "
            "columns in the arrays, or in the source of a GeneratorDataset"
        )

    def _with(self, **changes: Any) -> Self:
        changed = copy.copy(self)
        for name, value in changes.items():
            setattr(changed, name, value)
        return changed

    def map(
        self,
        operations: Any,
        input_columns: str | Sequence[str] | None = None,
        num_parallel_workers: int | None = None,
        python_multiprocessing: bool = False,
    ) -> Self:
        """Apply one operation, or several in turn, to a column (the first, where none is named).

        Those of `vision` and `transforms` take whole batches; others get numpy arrays: one sample before
        `batch`, a batch after it. Workers are taken, and none is started.
        """
        listed = tuple(operations) if isinstance(operations, list | tuple) else (operations,)
        own = self.source.names
        named = own[:1] if input_columns is None else input_columns
        names = [named] if isinstance(named, str) else list(named)
        for name in names:
            if name not in own:
                raise ConfigError(f"this data set has no column {name!r}, but {', '.join(own)}")
        added = tuple((name, operation) for name in names for operation in listed)
        if self.batch_size is None:
            return self._with(maps=(*self.maps, *added))
        return self._with(batch_maps=(*self.batch_maps, *added))

    def batch(
        self, batch_size: int, drop_remainder: bool = False, num_parallel_workers: int | None = None
    ) -> Self:
        """Join that many samples; the last batch may be smaller, or is dropped."""
        check_whole("batch", "batch_size", batch_size)
        if self.batch_size is not None:
            raise ConfigError("this data set is in batches already: call batch() once")
        return self._with(batch_size=batch_size, drop_remainder=drop_remainder)

    def shuffle(self, buffer_size: int) -> Self:
        """Shuffle every epoch anew, all samples; those that cannot be indexed within the buffer."""
        check_whole("shuffle", "buffer_size", buffer_size, 2)
        return self._with(shuffled=buffer_size)

    def repeat(self, count: int) -> Self:
        """Run through the data that many times in one epoch."""
        return self._with(repeats=self.repeats * count)

    def get_dataset_size(self) -> int:
        """Batches (samples, before `batch`) in an epoch; a source without a length is read to be counted."""
        size, count = self.batch_size or 1, self.source.count()
        full = count // size if self.drop_remainder else -(-count // size)
        return full * self.repeats

    def get_batch_size(self) -> int:
        """Samples in a batch."""
        return self.batch_size or 1

    def get_col_names(self) -> list[str]:
        """The names of the columns."""
        return self.source.names

    def _epoch(self) -> Iterator[dict[str, Tensor]]:
        size, single = self.batch_size or 1, self.batch_size is None
        home = torch.get_default_device()
        for _ in range(self.repeats):
            for row in self.source.epoch(size, self.shuffled, self.maps):
                if self.drop_remainder and len(next(iter(row.values()))) < size:
                    continue
                for name, operation in self.batch_maps:
                    row[name] = _apply(operation, row[name])
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
        names = self.source.names if columns is None else list(columns)
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
        super().__init__(_Arrays(columns), shuffled=int(shuffle is None or shuffle))


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
        super().__init__(_Arrays(columns), shuffled=int(shuffle is None or shuffle))


class GeneratorDataset(Dataset):
    """What a source of one's own gives, read anew in each epoch.

    Args:
        source: an object with `__getitem__` and `__len__`; a function that gives an iterator; or an iterable.
            A sample is a value, or a tuple with one for each column: arrays, numbers or tensors.
        column_names: a name, or several.
        num_samples: the first so many only.
        shuffle: a new order every epoch; None does so where `source` has indices.
        num_parallel_workers, python_multiprocessing, max_rowsize: taken; no process is started.

    Raises:
        ValueError: no names; a generator, which gives one epoch only; `shuffle=True` without indices; what
            would choose or check samples otherwise (`sampler`, `num_shards`, `schema` ...).
        DataError: a sample that has not one value for each column.
    """

    def __init__(
        self,
        source: Any,
        column_names: str | Sequence[str] | None = None,
        num_samples: int | None = None,
        num_parallel_workers: int = 1,
        shuffle: bool | None = None,
        python_multiprocessing: bool = True,
        max_rowsize: int | None = None,
        **more: Any,
    ) -> None:
        if asked := [name for name, value in more.items() if value is not None]:
            raise ConfigError(
                f"GeneratorDataset takes no {asked[0]!r} here: let `source` choose samples and their dtypes"
            )
        if not column_names:
            raise ConfigError("GeneratorDataset needs 'column_names': a name for each value of a sample")
        if isinstance(source, Generator):
            raise ConfigError(
                "GeneratorDataset got a generator, which can be run through once: give the function that "
                "makes it, as in GeneratorDataset(lambda: samples(), ...)"
            )
        names = [column_names] if isinstance(column_names, str) else list(column_names)
        rows = _Rows(source, names, num_samples)
        if shuffle and not rows.indexed:
            raise ConfigError(
                "GeneratorDataset(shuffle=True) needs a source with __getitem__ and __len__: use "
                ".shuffle(buffer_size) for one that is read in its own order"
            )
        super().__init__(rows, shuffled=int(rows.indexed and shuffle is not False))


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
