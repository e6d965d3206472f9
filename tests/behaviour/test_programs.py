"""Sixty small real programs: equal to plain torch at O0, near it at O1 and O2."""

import functools
import warnings

import pytest
import torch

import halfstep as hs
from tests.behaviour.programs import PROGRAMS, Kit

# How far a loss may be from fp32's, of the larger of that loss and 1: 8 bits of significand over a few steps.
BOUND = 0.03
# Losses that are differences, penalties on gradients, or follow a discrete choice move further.
WIDER = {
    "wasserstein_gan_with_gradient_penalty": 0.06,
    "energy_model_with_langevin_samples": 0.06,
    "smooth_gradients": 0.06,
}


@functools.cache
def losses(name, level):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return PROGRAMS[name](Kit(level))


def test_there_are_sixty():
    assert len(PROGRAMS) >= 60


@pytest.mark.parametrize("name", PROGRAMS)
def test_at_o0_a_program_has_torchs_losses_bit_for_bit(name):
    assert losses(name, "O0") == losses(name, None)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_at_o1_and_o2_a_program_stays_near_fp32(name, level):
    expected, got = losses(name, None), losses(name, level)
    assert len(got) == len(expected)
    bound = WIDER.get(name, BOUND)
    for step, (a, b) in enumerate(zip(got, expected)):
        assert abs(a - b) <= bound * max(abs(b), 1.0), (step, a, b)
    assert hs.active_policy() is None
