"""A step asked for by compiled code is the plain one: same numbers, and its state is where the user looks."""

from typing import Any

import pytest
import torch
from torch import nn

from halfstep.optim import SGD, AdamW


@pytest.mark.parametrize(("make", "options"), [(AdamW, {}), (SGD, {"momentum": 0.9})])
def test_a_compiled_step_fills_the_state(make: Any, options: dict[str, Any]):
    params = [nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2)]
    compiled, plain = (make([p], lr=0.1, **options) for p in params)

    @torch.compile(backend="eager")
    def step() -> None:
        compiled.step(inv_scale=0.5)

    for count in range(1, 4):
        for p in params:
            p.grad = torch.full_like(p, count)
        step()
        plain.step(inv_scale=0.5)
    assert torch.equal(*params)
    assert {k: v.tolist() for k, v in compiled.state[params[0]].items()} == {
        k: v.tolist() for k, v in plain.state[params[1]].items()
    }
    assert compiled.state_dict()["state"][0].keys() == plain.state_dict()["state"][0].keys()
