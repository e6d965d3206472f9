"""Weights that were 16-bit before a conversion."""

import torch
from torch import nn

import halfstep as hs


def test_weights_that_were_16_bit_before_stay_so():
    model = nn.Sequential(nn.Linear(8, 4).bfloat16(), nn.Linear(4, 2))
    hs.prepare(model, level="O2", dtype="bf16").revert()
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
