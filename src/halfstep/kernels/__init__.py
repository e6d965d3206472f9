"""Compiled loops over the bits of weights, states and gradients, and the codes they share."""
