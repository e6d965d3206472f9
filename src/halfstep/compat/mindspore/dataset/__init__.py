"""mindspore.dataset: MnistDataset and NumpySlicesDataset, with `vision` and `transforms`."""

from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore.dataset import transforms, vision
from halfstep.compat.mindspore.dataset._datasets import Dataset, MnistDataset, NumpySlicesDataset

__all__ = ["Dataset", "MnistDataset", "NumpySlicesDataset", "transforms", "vision"]

__getattr__ = absent("dataset")
