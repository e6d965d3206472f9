"""Optimizers and master weights: what updates a model whose weights are 16 bits wide."""

from halfstep.optim.compacted import compact
from halfstep.optim.masters import MasterWeights, fp32_state_dict
from halfstep.optim.muon import Muon, muon_groups
from halfstep.optim.optimizers import SGD, Adam, AdamW, Lion
from halfstep.optim.resolution import lost_updates, resolution

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "MasterWeights",
    "Muon",
    "compact",
    "fp32_state_dict",
    "lost_updates",
    "muon_groups",
    "resolution",
]


def __dir__() -> list[str]:
    return __all__
