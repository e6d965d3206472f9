"""How many of our files a steady call enters: what a reader has to know to follow it."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep.optim import SGD, AdamW, Lion

PACKAGE = str(Path(halfstep.__file__).parent)


def files_of(call: Callable[[], Any]) -> set[str]:
    """The files of halfstep that a call enters."""
    entered: set[str] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            entered.add(frame.f_code.co_filename[len(PACKAGE) + 1 :])

    before = sys.gettrace()
    sys.settrace(see)
    try:
        call()
    finally:
        sys.settrace(before)
    return entered


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
