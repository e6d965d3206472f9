"""A step over shards sees what became of their gradients since the last one."""

import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import halfstep as hs
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


def moved_on_one(params, mesh, step):
    """One rank's shard lies elsewhere: both must ask the other the same."""
    (moved if mesh.get_rank() == 0 else usual)(params, mesh, step)


CHANGES = [usual, replaced, changed_within, partly_summed, missing, dropped, moved, moved_on_one]


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.detach().clone()


def after(change, clip_norm):
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
            optimizer.step(clip_norm=clip_norm)
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert all(p.grad is None for p in [*sharded, *plain])
    return [whole(p) for p in sharded], [p.detach() for p in plain]


def everything(rank):
    return {(change.__name__, norm): after(change, norm) for change in CHANGES for norm in (None, 0.5)}


def test_a_changed_gradient_or_shard_is_seen_in_the_very_step():
    for found in run(everything, 2):
        for name, (sharded, plain) in found.items():
            assert all(map(torch.equal, sharded, plain)), name


def clipped(rank, turned):
    """Norms that a session tells of clipped steps; in the fifth, one rank's gradient may lie otherwise."""
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    hs.distributed.shard(model, blocks=[])
    amp = hs.prepare(model, hs.optim.AdamW(model.parameters(), lr=0.1), level="O2", dtype="bf16")
    norms = []
    for step in range(8):
        with amp.autocast():
            loss = model(values(step)[0].sum() * torch.ones(2, 4)).square().mean()
        amp.backward(loss)
        if step == 4 and turned and rank == 0:
            grad = model.weight.grad
            grad._local_tensor = grad._local_tensor.t().contiguous().t()
        norms.append(amp.step(clip_norm=0.5).grad_norm)
    return norms, whole(model.weight)


def clipped_both(rank):
    return clipped(rank, False), clipped(rank, True)


def test_ranks_of_which_one_has_a_gradient_laid_out_otherwise_clip_by_the_same_norm():
    found = [one for both in run(clipped_both, 2) for one in both]
    assert all(norms == found[0][0] and torch.equal(weight, found[0][1]) for norms, weight in found)


def with_other_options(rank):
    """Weights over ranks and whole ones after steps between which options change; a group comes later."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for sharded in (True, False):
        params = [nn.Parameter(placed(value, mesh, Shard(0)) if sharded else value) for value in values(0)]
        optimizer = hs.optim.SGD(params[:2], lr=0.1, momentum=0.5)
        for step in range(1, 8):
            if step == 3:
                optimizer.param_groups[0]["lr"] = 0.01
            if step == 4:
                optimizer.add_param_group({"params": params[2:]})
            if step == 6:
                optimizer.param_groups[1]["lr"] = 0.02
                optimizer.param_groups[1]["momentum"] = 0.9
            for p, value in zip(params, values(step)):
                p.grad = placed(value, mesh, Shard(0)) if sharded else value
            optimizer.step()
        found.append([whole(p.detach()) for p in params])
    return found


def test_options_that_change_between_steps_hold_for_shards():
    for sharded, plain in run(with_other_options, 2):
        assert all(map(torch.equal, sharded, plain))


def cleared(rank):
    """Gradients that are left after zero_grad, and what a gradient that somebody holds is worth then."""
    mesh = init_device_mesh("cpu", (1,))
    params = [nn.Parameter(placed(value, mesh, place)) for value, place in zip(values(0), PLACES)]
    later = nn.Parameter(placed(values(0)[0], mesh, Shard(0)))
    optimizer = hs.optim.AdamW(params[:2])
    left = []
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": [params[2], later]})
        usual(params, mesh, step)
        later.grad = placed(values(step)[0], mesh, Shard(0))
        if step in (1, 4):
            params[0].grad = None
        held = params[1].grad
        if step != 3:  # a group just added: its gradients go too, before any step
            optimizer.step()
        optimizer.zero_grad()
        known = params[:2] if step < 3 else [*params, later]
        left += [p for p in known if p.grad is not None]
        left += [] if torch.equal(held.full_tensor(), values(step)[1]) else [held]
    return len(left), sys.getrefcount(held), held.grad is None


def test_all_gradients_are_dropped_and_one_that_is_held_stays_whole():
    found = run(cleared, 1)
    assert found == [(0, 2, True)]
