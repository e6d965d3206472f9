"""What an attribute error says of a name that is MindSpore's and not here: what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PLACES = {"nn": (torch.nn,), "ops": (torch, torch.nn.functional, torch.Tensor), "mindspore": (torch,)}
_NAMED = {
    "communication": "start processes by torchrun and train natively (docs/many-ranks.md)",
    "Conv2dBnAct": "use nn.SequentialCell of Conv2d, BatchNorm2d and an activation",
    "DenseBnAct": "use nn.SequentialCell of Dense, BatchNorm1d and an activation",
    "GeneratorDataset": "use NumpySlicesDataset of the arrays, or torch.utils.data with a loop of your own",
    "Profiler": "use torch.profiler, or halfstep doctor",
    "export": "use torch.export",
    "standard_normal": "use torch.randn",
}
_ELSEWHERE = {
    "amp": "what MindSpore 2.10's mindspore.amp has is here; for more see hs.prepare",
    "dataset": "use NumpySlicesDataset of its arrays, or torch.utils.data",
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
        return "give the optimizer a list with one rate a step, as cosine_decay_lr and the others make it"
    nothing = "nothing here stands for it; torch's modules and functions work, inside a Cell too"
    return _ELSEWHERE.get(room, nothing)


def absent(room: str) -> Callable[[str], Any]:
    """A module `__getattr__` for `mindspore`, `nn`, `ops`, `train`, `dataset` or `amp`."""

    def __getattr__(name: str) -> Any:
        path = "halfstep.compat.mindspore" + ("" if room == "mindspore" else f".{room}")
        if name.startswith("__"):
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        raise AttributeError(
            f"{path} has no {name!r}: {_instead(room, name)} (docs/migrating-from-mindspore.md has the names)"
        )

    return __getattr__
