"""The one look at shards' gradients sees in the very step what became of them."""

import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import halfstep as hs
from halfstep.optim.shard_facts import Locals, gradients_of_shards
from tests.ranks import run

SHAPES = [(4, 3), (5,), (6,)]
PLACES = [Shard(0), Replicate(), None]


def values(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def placed(value, mesh, place):
    return value.clone() if place is None else distribute_tensor(value, mesh, [place])


def usual(params, mesh, step):
    for p, value, place in zip(params, values(step), PLACES):
        p.grad = placed(value, mesh, place)


def replaced(params, mesh, step):
    usual(params, mesh, step + 100)
    usual(params, mesh, step)


def changed_within(params, mesh, step):
    usual(params, mesh, step)
    params[0].grad._local_tensor = params[0].grad._local_tensor.clone()


def partly_summed(params, mesh, step):
    """The local tensors have the shape they had: only the spec tells that they are not the gradient yet."""
    usual(params, mesh, step)
    part = values(step)[1] / 2
    params[1].grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)


def missing(params, mesh, step):
    usual(params, mesh, step)
    params[1].grad = None


def moved(params, mesh, step):
    usual(params, mesh, step)
    params[0]._local_tensor = params[0]._local_tensor.clone()


def dropped(params, mesh, step):
    usual(params, mesh, step)
    params[2].grad = None


CHANGES = [usual, replaced, changed_within, partly_summed, missing, dropped, moved]


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.detach().clone()


def after(change, rank):
    """Weights of tensors over ranks and of whole ones after the same steps, the fourth one changed."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = [nn.Parameter(placed(value, mesh, place)) for value, place in zip(values(0), PLACES)]
    plain = [nn.Parameter(value) for value in values(0)]
    optimizers = [hs.optim.AdamW(params, lr=0.1) for params in (sharded, plain)]
    for step in range(1, 7):
        (change if step == 4 else usual)(sharded, mesh, step)
        for p, q, value in zip(sharded, plain, values(step)):
            q.grad = None if p.grad is None else value
        for optimizer in optimizers:
            optimizer.step()
    return [whole(p) for p in sharded], [p.detach() for p in plain]


def everything(rank):
    return {change.__name__: after(change, rank) for change in CHANGES}


def test_a_changed_gradient_or_shard_is_seen_in_the_very_step():
    for found in run(everything, 2):
        for name, (sharded, plain) in found.items():
            assert all(map(torch.equal, sharded, plain)), name


class Listing:
    """Gives gradients one by one, and counts how often it was asked."""

    def __init__(self, params):
        self.params, self.asked = params, 0

    def of_all(self, params):
        self.asked += 1
        return [p.grad._local_tensor if isinstance(p, DTensor) else p.grad for p in self.params]


def looks(rank):
    """How often Python listed the gradients of ten steps like the first, and one object's references."""
    mesh = init_device_mesh("cpu", (1,))
    params = [nn.Parameter(placed(value, mesh, place)) for value, place in zip(values(0), PLACES)]
    usual(params, mesh, 1)
    grads = [placed(value, mesh, place) for value, place in zip(values(2), PLACES)]
    for p, grad in zip(params, grads):
        if isinstance(grad, DTensor):
            grad._spec = p.grad._spec
    listing = Listing(params)
    watched = gradients_of_shards(listing, params, params)
    for p, grad in zip(params, grads):
        p.grad = grad
    before = [sys.getrefcount(one) for grad in grads for one in (grad, getattr(grad, "_local_tensor", 0))]
    alike = all(watched.alike() for _ in range(10))
    later = [sys.getrefcount(one) for grad in grads for one in (grad, getattr(grad, "_local_tensor", 0))]
    places = [getattr(grad, "_local_tensor", grad).data_ptr() for grad in grads]
    locals_ = Locals(params[:2])
    held = [locals_.hold()]
    params[1]._local_tensor = params[1]._local_tensor.clone()
    held.append(locals_.hold())
    return alike, listing.asked, before == later, watched.addresses.tolist() == places, held


def test_gradients_as_they_were_are_found_without_python_and_keep_their_references():
    assert run(looks, 1) == [(True, 1, True, True, [True, False])]
