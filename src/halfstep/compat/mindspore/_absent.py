"""What an attribute error says of a name that is MindSpore's and not here: what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

import torch

_HERE = "halfstep.compat.mindspore"
_PLACES = {"nn": (torch.nn,), "ops": (torch, torch.nn.functional, torch.Tensor), "mindspore": (torch,)}
_NAMED = {
    "communication": "start processes by torchrun and train natively (docs/many-ranks.md)",
    "Conv2dBnAct": "use nn.SequentialCell of Conv2d, BatchNorm2d and an activation",
    "DenseBnAct": "use nn.SequentialCell of Dense, BatchNorm1d and an activation",
    "COOTensor": "use torch.sparse_coo_tensor",
    "CSRTensor": "use torch.sparse_csr_tensor",
    "Profiler": "use torch.profiler, or halfstep doctor",
    "config": "mindspore.set_seed seeds data sets as well; no workers are started",
    "export": "use torch.export",
    "standard_normal": "use torch.randn",
}
_ELSEWHERE = {
    "amp": "what MindSpore 2.10's mindspore.amp has is here; for more see hs.prepare",
    "dataset": "use NumpySlicesDataset of its arrays, or GeneratorDataset of an object that gives samples",
    "train": "write a Callback or a Metric, or use halfstep.trainer.Trainer",
}


def _instead(room: str, name: str) -> str:
    if name in _NAMED:
        return _NAMED[name]
    for place in _PLACES.get(room, ()):
        for word in (name, name.lower()):
            if callable(getattr(place, word, None)):
                path = "torch.Tensor" if place is torch.Tensor else place.__name__
                return f"see {path}.{word}, whose arguments may differ; it works inside a Cell"
            if hasattr(place, word):
                return f"use {place.__name__}.{word}"
    if room == "nn" and name.endswith(("LR", "_lr")):
        return "write a LearningRateSchedule, or give the optimizer a list with one rate for each step"
    nothing = "nothing here stands for it; torch's modules and functions work, inside a Cell too"
    return _ELSEWHERE.get(room, nothing)


def _refuse(room: str, name: str) -> str:
    path = _HERE + ("" if room == "mindspore" else f".{room}")
    return f"{path} has no {name!r}: {_instead(room, name)} (docs/migrating-from-mindspore.md has the names)"


def absent(room: str) -> Callable[[str], Any]:
    """A module `__getattr__` for `mindspore`, `nn`, `ops`, `train`, `dataset` or `amp`."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module of {room} has no attribute {name!r}")
        raise AttributeError(_refuse(room, name))

    return __getattr__


class AbsentImports(MetaPathFinder):
    """Says of `from halfstep.compat.mindspore... import Name` what the attribute error says.

    Python asks a package's finders for a name that it has not as an attribute, and this one comes last.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Find nothing: ImportError with what to use, for names below this package alone."""
        parent, _, name = fullname.rpartition(".")
        if (parent == _HERE or parent.startswith(f"{_HERE}.")) and not name.startswith("_"):
            room = parent.removeprefix(_HERE).strip(".").partition(".")[0] or "mindspore"
            raise ModuleNotFoundError(_refuse(room, name))
