"""Law 9, masters: training that saves, stops and resumes gives the weights of training that did not."""

import io

import pytest
import torch
from torch import nn

from halfstep.convert import convert
from halfstep.optim import MasterWeights

torch.set_num_threads(1)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
}


def start(make, low):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = make(model.parameters())
    conversion = convert(model, "O2", low)
    masters = MasterWeights(optimizer, model, initial=conversion.originals)
    conversion.forget_originals()
    return model, optimizer, masters


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("model_first", [True, False])
def test_resume_is_bit_identical(kind, low, model_first):
    model, optimizer, masters = start(OPTIMIZERS[kind], low)
    train(model, optimizer, range(12))
    first, first_optimizer, _ = start(OPTIMIZERS[kind], low)
    train(first, first_optimizer, range(5))
    saved = through_a_file({"model": first.state_dict(), "optimizer": first_optimizer.state_dict()})

    resumed, its_optimizer, its_masters = start(OPTIMIZERS[kind], low)
    loads = [
        lambda: resumed.load_state_dict(saved["model"]),
        lambda: its_optimizer.load_state_dict(saved["optimizer"]),
    ]
    for load in loads if model_first else loads[::-1]:
        load()
    train(resumed, its_optimizer, range(5, 12))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(masters.params(), its_masters.params(), strict=True))
    ours, theirs = optimizer.state_dict()["state"], its_optimizer.state_dict()["state"]
    for index, row in ours.items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(theirs[index][k])) for k, v in row.items())


def test_an_older_state_of_plain_fp32_training_loads_and_goes_on():
    torch.manual_seed(0)
    plain = nn.Linear(5, 3)
    before = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    train(plain, before, range(3))
    torch.manual_seed(1)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    conversion = convert(model, "O2", torch.bfloat16)
    masters = MasterWeights(optimizer, model, initial=conversion.originals)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(before.state_dict())
    for (_, master), theirs in zip(masters.named(), plain.parameters()):
        assert torch.equal(master, theirs)
        assert torch.equal(optimizer.state[master]["exp_avg"], before.state[theirs]["exp_avg"])
    train(model, optimizer, range(3, 5))


def test_o2_states_load_into_plain_fp32_training():
    model, optimizer, masters = start(OPTIMIZERS["adamw"], torch.bfloat16)
    train(model, optimizer, range(3))
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    plain_optimizer = OPTIMIZERS["adamw"](plain.parameters())
    state = optimizer.state_dict()
    plain.load_state_dict({**model.state_dict(), **state["masters"]})
    plain_optimizer.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), masters.params(), strict=True))
    train(plain, plain_optimizer, range(3, 5))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_masters_of_elements_that_were_not_changed_keep_every_bit_in_a_file(low):
    model, optimizer, masters = start(OPTIMIZERS["adamw"], low)
    train(model, optimizer, range(3))
    before = {name: value.clone() for name, value in masters.state_dict().items()}
    with torch.no_grad():
        model[0].weight[0] = 0.25
    after = optimizer.state_dict()["masters"]
    assert torch.equal(after["0.weight"][0], torch.full((5,), 0.25))
    assert torch.equal(after["0.weight"][1:], before["0.weight"][1:])
    assert torch.equal(after["3.bias"], before["3.bias"])
