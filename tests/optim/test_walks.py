"""How many of our files a steady call enters: what a reader has to know to follow it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.optim import SGD, AdamW, Lion
from tests.walks import files_of


def steady(cls: Any, dtype: torch.dtype) -> Any:
    params = [nn.Parameter(torch.randn(4, 5).to(dtype)) for _ in range(3)]
    optimizer = cls(params)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_enters_ten_files(cls: Any, dtype: torch.dtype):
    entered = files_of(steady(cls, dtype).step)
    assert 1 <= len(entered) <= 10, sorted(entered)


@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_loading_a_state_enters_ten_files(cls: Any):
    optimizer = steady(cls, torch.bfloat16)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(state))
    entered = files_of(lambda: optimizer.load_state_dict(state))
    assert 1 <= len(entered) <= 10, sorted(entered)
