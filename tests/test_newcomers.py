"""What a newcomer does by habit: it gives the right numbers, or says at once what to do instead."""

import pytest
import torch
from torch import nn

import halfstep as hs

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def small(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, width))


def backward(amp: hs.Session, model: nn.Module, *named: torch.optim.Optimizer) -> None:
    with amp.autocast():
        loss = (model(X).float() - 1).square().mean()
    amp.backward(loss, *named)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fp32_state_dict_has_the_masters_of_a_torch_optimizer(dtype):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = hs.prepare(model, optimizer, level="O2", dtype=dtype)
    for _ in range(3):
        backward(amp, model)
        amp.step()
    with torch.no_grad():
        model[0].bias.fill_(0.1)  # adopted by the master, as by a step
    state = hs.optim.fp32_state_dict(model, optimizer)
    assert torch.equal(state["0.bias"], model[0].bias.float())
    amp.revert()
    for key, value in model.state_dict().items():
        assert state[key].dtype == torch.float32
        torch.testing.assert_close(state[key], value, rtol=0, atol=0)
    assert not torch.equal(state["0.weight"], state["0.weight"].to(hs.formats.parse_dtype(dtype)).float())
