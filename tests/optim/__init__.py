"""Tests of halfstep.optim."""
