"""Weights that came after a conversion, and copies that no record knows."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import halfstep as hs

OPTIMIZERS = {"torch": torch.optim.AdamW, "halfstep": hs.optim.AdamW}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_weight_that_lost_its_parametrization_is_fp32_after_revert(kind):
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    amp = hs.prepare(model, OPTIMIZERS[kind](model.parameters()), level="O2", dtype="bf16")
    parametrize.remove_parametrizations(model[0], "weight")
    model.append(nn.Linear(2, 2, dtype=torch.bfloat16))
    low = model[0].weight.detach().clone()
    assert low.dtype == torch.bfloat16
    with pytest.warns(hs.HalfstepWarning, match=r"^0\.weight came after the conversion"):
        amp.revert()
    assert torch.equal(model[0].weight, low.float())
    assert model[2].weight.dtype == torch.bfloat16
    assert model[:2](torch.ones(1, 8)).dtype == torch.float32


def test_weights_that_were_16_bit_before_stay_so():
    model = nn.Sequential(nn.Linear(8, 4).bfloat16(), nn.Linear(4, 2))
    hs.prepare(model, level="O2", dtype="bf16").revert()
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
