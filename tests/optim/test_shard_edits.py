"""What users do to an optimizer between steps: over shards it does what it does over whole tensors."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import halfstep as hs
from tests.ranks import run

SHAPES = [(1, 3), (5, 4), (6,)]  # on two ranks: a shard of nothing, uneven ones, even ones
STEPS, EDITED = 6, 3


def values(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def placed(value, mesh):
    return value.clone() if mesh is None else distribute_tensor(value, mesh, [Shard(0)])


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.detach().clone()


def clear(optimizer, params):
    optimizer.state.clear()


def pop_one(optimizer, params):
    optimizer.state.pop(params[1])


def replace(optimizer, params):
    for entry in optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"] * 0.5


def set_the_count(optimizer, params):
    for p in params:
        optimizer.state[p]["step"] = torch.tensor(50.0)


def give_plain_entries(optimizer, params):
    kept = {p: {**entry, "exp_avg": entry["exp_avg"] * 2} for p, entry in optimizer.state.items()}
    optimizer.state = kept


def name_one(optimizer, params):
    optimizer.state["of no parameter"] = {"told": 5}
    optimizer.state[params[1]]["mine"] = 7
    assert optimizer.state_dict()["state"][1]["mine"] == 7
    assert optimizer.state["of no parameter"] == {"told": 5}


def take_one_out(optimizer, params):
    del optimizer.param_groups[0]["params"][2]


def split(optimizer, params):
    group = optimizer.param_groups[0]
    optimizer.param_groups.append({**group, "params": [group["params"].pop()], "lr": 0.001})


def build_groups_anew(optimizer, params):
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": params[:2], "lr": 0.02})
    optimizer.add_param_group({"params": params[2:], "lr": 0.03})


def reverse(optimizer, params):
    optimizer.param_groups[0]["params"].reverse()


def take_other_formats(optimizer, params):
    optimizer.param_groups[0]["state_dtype"] = "bf16"


EDITS = [
    clear, pop_one, replace, set_the_count, give_plain_entries, name_one, take_one_out, split,
    build_groups_anew, reverse, take_other_formats,
]  # fmt: skip


def after(edit, mesh, dtype):
    """Weights, and the states that are seen, after steps between which the optimizer was edited."""
    params = [nn.Parameter(placed(value.to(dtype), mesh)) for value in values(0)]
    optimizer = hs.optim.AdamW(params, lr=0.1)
    for step in range(1, STEPS + 1):
        if step == EDITED:
            edit(optimizer, params)
        for p, value in zip(params, values(step)):
            p.grad = placed(value.to(dtype), mesh)
        optimizer.step()
        optimizer.zero_grad()
    states = [
        {k: whole(v) for k, v in optimizer.state[p].items() if torch.is_tensor(v) and v.is_floating_point()}
        for p in params
    ]
    return list(map(whole, [*params, *optimizer.masters().values()])), states


def edited(rank):
    mesh = init_device_mesh("cpu", (2,))
    return {
        (edit.__name__, dtype): (after(edit, mesh, dtype), after(edit, None, dtype))
        for edit in EDITS
        for dtype in (torch.float32, torch.bfloat16)
    }


def test_edits_between_steps_do_to_shards_what_they_do_to_whole_tensors():
    for found in run(edited, 2):
        for name, ((sharded, states), (plain, expected)) in found.items():
            assert all(map(torch.equal, sharded, plain)), name
            for mine, theirs in zip(states, expected, strict=True):
                assert mine.keys() == theirs.keys(), name
                assert all(torch.equal(mine[key], theirs[key]) for key in mine), name


def deep(params, optimizer):
    return copy.deepcopy((params, optimizer))


def shallow(params, optimizer):
    return params, copy.copy(optimizer)


def saved(params, optimizer):
    file = io.BytesIO()
    torch.save((params, optimizer), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def same(params, optimizer):
    return params, optimizer


def copied(rank):
    """Masters after steps of an optimizer that was copied between two of them."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for way in (same, deep, shallow, saved):
        params = [nn.Parameter(placed(value.bfloat16(), mesh)) for value in values(0)]
        optimizer = hs.optim.AdamW(params, lr=0.1)
        for step in range(1, STEPS + 1):
            if step == EDITED:
                params, optimizer = way(params, optimizer)
            for p, value in zip(params, values(step)):
                p.grad = placed(value.bfloat16(), mesh)
            optimizer.step()
        found[way.__name__] = [whole(master) for master in optimizer.masters().values()]
    return found


def test_copies_of_an_optimizer_over_shards_go_on_where_it_was():
    for found in run(copied, 2):
        for name in ("deep", "shallow", "saved"):
            assert all(map(torch.equal, found[name], found["same"])), name


class Scaled(nn.Module):
    """Its first parameter has fewer rows than there are ranks; its last is frozen for the first two steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.weight = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.randn(2, 4))
        self.shift = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return (x * self.scale.sum(0)) @ self.weight.t() + self.shift


def seen_by_all(rank, sharded):
    """The whole optimizer state as torch's functions gather it, and which parameters' states are seen."""
    model = Scaled()
    if sharded:
        hs.distributed.shard(model, [])
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        model.shift.requires_grad_(step > 1)
        model(torch.ones(2, 4) * (step + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    shown = [name for name, p in model.named_parameters() if optimizer.state.get(p)]
    numbers = list(optimizer.state_dict()["state"])
    told = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return shown, numbers, {name: entry["exp_avg"].clone() for name, entry in told["state"].items()}


def test_a_rank_without_rows_lists_states_in_the_order_of_the_others():
    expected_names, expected_numbers, expected = seen_by_all(0, False)
    found = run(seen_by_all, 2, True)
    assert all((names, numbers) == (expected_names, expected_numbers) for names, numbers, _ in found)
    gathered = found[0][2]
    assert gathered.keys() == expected.keys() == {"scale", "weight", "shift"}
    assert all(torch.equal(gathered[name], expected[name]) for name in expected)


def with_partial_sums(rank, clip_norm, bare):
    """Replicated weights whose gradients are parts of sums, beside a shard that is empty on one rank."""
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(distribute_tensor(torch.ones(size), mesh, [Replicate()])) for size in (4, 7)]
    params.insert(1, nn.Parameter(distribute_tensor(torch.ones(1), mesh, [Shard(0)])))
    optimizer = hs.optim.SGD(params, lr=0.1, momentum=0.9, clip_norm=clip_norm if bare else None)
    for step in range(5):
        for p in params:
            part = torch.full(p.shape, (rank + 1.0) * (step + 1))
            if p.placements == (Replicate(),):
                p.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
            else:
                p.grad = distribute_tensor(torch.ones(1), mesh, [Shard(0)])
        if step == 3:  # the sum that measuring made is of before
            optimizer.measure()
            params[0].grad._local_tensor.mul_(2)
        optimizer.step(clip_norm=None if bare else clip_norm)
        optimizer.zero_grad()
    return [whole(p) for p in params]


def in_one_process(clip_norm):
    params = [nn.Parameter(torch.ones(size)) for size in (4, 1, 7)]
    optimizer = hs.optim.SGD(params, lr=0.1, momentum=0.9)
    for step in range(5):
        for p in params:
            p.grad = torch.ones(1) if p.numel() == 1 else torch.full(p.shape, 3.0 * (step + 1))
        if step == 3:
            params[0].grad.mul_(2)
        optimizer.step(clip_norm=clip_norm)
    return [p.detach() for p in params]


@pytest.mark.parametrize(("clip_norm", "bare"), [(None, False), (0.5, False), (0.5, True)])
def test_partial_sums_are_added_up_as_often_on_a_rank_without_rows(clip_norm, bare):
    expected = in_one_process(clip_norm)
    for found in run(with_partial_sums, 2, clip_norm, bare, seconds=60.0):
        assert all(map(torch.equal, found, expected))


def skipped_by_all(rank):
    """What three bare steps did, the second on an inf in the rows of rank 1, and the weights then."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    optimizer = hs.optim.AdamW([p], lr=0.1, clip_norm=1.0, skip_nonfinite=True)
    taken = []
    for step in range(3):
        p.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        if step == 1 and rank == 1:
            p.grad._local_tensor[0, 0] = float("inf")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        taken.append(optimizer.outcome.taken)
    return taken, whole(p)


def test_all_ranks_skip_a_bare_step_on_what_one_of_them_found():
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = hs.optim.AdamW([p], lr=0.1, clip_norm=1.0)
    for _ in range(2):
        p.grad = torch.ones(4, 3)
        optimizer.step()
    for taken, found in run(skipped_by_all, 2, seconds=60.0):
        assert taken == [True, False, True]
        assert torch.equal(found, p.detach())
