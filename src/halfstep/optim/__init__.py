"""Optimizers and master weights: what updates a model whose weights are 16 bits wide."""

from halfstep.optim.masters import MasterWeights
from halfstep.optim.optimizers import SGD, Adam, AdamW, Lion

__all__ = ["SGD", "Adam", "AdamW", "Lion", "MasterWeights"]
