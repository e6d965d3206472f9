"""How many of our files a call enters, and how often: what a reader has to know and to follow."""

import copy
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from tests.walks import files_of, visits_of


def made(cls: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    return model, cls(model.parameters(), lr=1e-3)


def steady(cls: Any, level: str, dtype: str) -> hs.Session:
    """A session after four steps, with gradients for the next."""
    model, optimizer = made(cls)
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype, kernels="native")
    for i in range(5):
        with amp.autocast():
            loss = model(torch.randn(4, 8)).float().square().mean()
        amp.backward(loss)
        if i < 4:
            amp.step(clip_norm=1.0)
    return amp


@pytest.mark.parametrize("cls", [torch.optim.AdamW, hs.optim.AdamW])
@pytest.mark.parametrize(("level", "dtype"), [("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16")])
def test_a_checked_step_enters_few_files(cls: Any, level: str, dtype: str):
    amp = steady(cls, level, dtype)
    entered = files_of(lambda: amp.step(clip_norm=1.0))
    assert 1 <= len(entered) <= 23, sorted(entered)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, hs.optim.AdamW])
def test_ten_files_ask_for_the_level(cls: Any):
    def asks(frame: FrameType, value: Any) -> bool:
        held = frame.f_locals
        levels = isinstance(held.get("level"), str) or isinstance(value, hs.Level)
        return levels or any(isinstance(one, hs.Level) for one in held.values())

    model, optimizer = made(cls)
    asked = files_of(lambda: hs.prepare(model, optimizer, level="O2", dtype="fp16"), asks)
    assert 1 <= len(asked) <= 10, sorted(asked)


def test_a_walk_through_the_files_is_no_longer_than_twice_what_it_was():
    """In visits, when this was written: 123, 158, 227 and 595."""
    ours = steady(hs.optim.AdamW, "O2", "bf16")
    assert visits_of(lambda: ours.step(clip_norm=1.0)) <= 2 * 123
    theirs = steady(torch.optim.AdamW, "O2", "fp16")
    assert visits_of(lambda: theirs.step(clip_norm=1.0)) <= 2 * 158
    optimizer = ours.optimizers[0]
    state = copy.deepcopy(optimizer.state_dict())
    assert visits_of(lambda: optimizer.load_state_dict(state)) <= 2 * 227
    model, new = made(hs.optim.AdamW)
    assert visits_of(lambda: hs.prepare(model, new, level="O2", dtype="fp16", kernels="native")) <= 2 * 595
