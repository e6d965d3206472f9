"""The bench that choices are tried on: first steps that compile count neither as slow nor as measuring."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.tuning.choices import Choice
from halfstep.tuning.engine import Bench


def bench(waits: list[float], seconds: float = 60.0) -> Bench:
    """A bench whose first steps also wait, as steps that compile do."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 4), torch.zeros(2, dtype=torch.long)

    def step(amp: hs.Session, x: Tensor, y: Tensor) -> Tensor:
        until = time.perf_counter() + (waits.pop(0) if waits else 0.0)
        while time.perf_counter() < until:
            pass
        with amp.autocast():
            loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    def make(choice: Choice) -> Any:
        return hs.prepare(model, optimizer, level=choice.level, dtype=choice.dtype)

    return Bench([model], [optimizer], step, (x, y), make, seconds)


def test_a_second_step_that_compiles_is_not_the_time_of_fp32() -> None:
    assert bench([0.5, 0.5]).first(Choice("O0")).time < 0.4


def test_nor_of_a_level_that_would_seem_hopeless() -> None:
    tried = bench([0.0, 0.0, 0.0, 0.5, 0.5])
    tried.first(Choice("O0"))
    assert tried.first(Choice("O1", "bf16")).time < 0.4


def test_the_budget_begins_after_fp32s_first_steps() -> None:
    tried = bench([0.3, 0.3], seconds=0.5)
    tried.first(Choice("O0"))
    assert tried.left() > 0.4


def test_what_takes_longer_than_is_left_is_measured_no_further() -> None:
    tried = bench([0.0, 0.0, 0.0, 1.2], seconds=0.01)
    tried.first(Choice("O0"))
    time.sleep(0.02)
    found = tried.first(Choice("O1", "bf16"))
    assert found.failed == "one step takes longer than what is left to measure"
