"""Optimizers and master weights: what updates a model whose weights are 16 bits wide."""

from halfstep.optim.masters import MasterWeights

__all__ = ["MasterWeights"]
