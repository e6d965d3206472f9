"""Optimizers and master weights: what updates a model whose weights are 16 bits wide."""

from halfstep.optim.masters import MasterWeights
from halfstep.optim.optimizers import SGD, Adam, AdamW, Lion
from halfstep.optim.resolution import lost_updates, resolution
from halfstep.optim.weights import fp32_state_dict

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "MasterWeights",
    "fp32_state_dict",
    "lost_updates",
    "resolution",
]
