"""Law 11, the scaler's part: no state by id(), nothing left on the user's optimizer."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

from halfstep.scaling.grad_scaler import GradScaler

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def backward(kind):
    net = nn.Linear(2, 2)
    optimizer, scaler = OPTIMIZERS[kind](net.parameters()), GradScaler()
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    return net, optimizer, scaler


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nothing_is_bound_onto_the_optimizer(kind):
    _, optimizer, scaler = backward(kind)
    before = dict(vars(optimizer))
    scaler.step(optimizer)
    scaler.update()
    assert vars(optimizer).keys() == before.keys()
    assert all(vars(optimizer)[name] is value for name, value in before.items())


def test_nor_after_a_step_that_failed():
    class Failing(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            raise ArithmeticError

    net, _, scaler = backward("fused")
    optimizer = Failing(net.parameters(), fused=True)
    before = set(vars(optimizer))
    with pytest.raises(ArithmeticError):
        scaler.step(optimizer)
    assert set(vars(optimizer)) == before


def test_a_users_own_attribute_of_that_name_survives():
    _, optimizer, scaler = backward("fused")
    optimizer.found_inf = "mine"
    scaler.step(optimizer)
    assert optimizer.found_inf == "mine"


def test_a_new_optimizer_is_no_deleted_one():
    """torch's table by id() would call an optimizer unscaled already that got a deleted one's address."""
    net, optimizer, scaler = backward("sgd")
    for _ in range(20):
        scaler.unscale_(optimizer)
        del optimizer
        optimizer = OPTIMIZERS["sgd"](net.parameters())
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer)
    kept = weakref.ref(optimizer)
    del optimizer
    scaler.update()
    assert kept() is None


def test_copies_in_the_middle_of_an_iteration():
    _, optimizer, scaler = backward("sgd")
    scaler.unscale_(optimizer)
    twin_optimizer, twin = copy.deepcopy([optimizer, scaler])
    assert twin.step(twin_optimizer)
    assert scaler.step(optimizer)


def test_pickled_state_has_no_identity():
    _, optimizer, scaler = backward("sgd")
    scaler.step(optimizer)
    scaler.update()
    assert str(id(optimizer)).encode() not in pickle.dumps(scaler, protocol=0)
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()
