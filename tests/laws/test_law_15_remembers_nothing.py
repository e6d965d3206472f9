"""Law 15: an optimizer remembers nothing: its step is that of a fresh one with the same groups and state."""

import collections
import contextlib
import copy
import os
import random
import warnings

import pytest
import torch
from torch import nn

import halfstep as hs
from tests.optim import edits

SEEDS = int(os.environ.get("HALFSTEP_LAW_15", "10000"))
OWN = ("param_groups", "state", "outcome")
"""What a step changes; of these it reads the first two."""


def released(side, rng):
    """Another set of gradients, in other memory."""
    for p in side.params:
        if p.grad is not None:
            p.grad = side.draw(p.shape).to(p.grad.dtype)


def zeroed(side, rng):
    with torch.no_grad():
        side.pick(rng).zero_()


def filled(side, rng):
    with torch.no_grad():
        side.pick(rng).fill_(0.3)


def set_through_data(side, rng):
    p = side.pick(rng)
    p.data.copy_(side.draw(p.shape).to(p.dtype))


def cast(side, rng):
    p = side.pick(rng)
    p.grad = None
    p.data = p.data.to(rng.choice([torch.bfloat16, torch.float16, torch.float32]))
    p.grad = side.draw(p.shape).to(p.dtype)


def looked_at(side, rng):
    """Reading changes nothing that a step uses."""
    rng.choice([side.optimizer.masters, side.optimizer.measure, side.optimizer.state_dict])()


def stepped_with_more(side, rng):
    side.optimizer.step(**rng.choice([{"clip_norm": 1.0}, {"measures": True}, {"found_inf": True}]))


def asked(side, rng):
    """Clipping and skipping, as a loop that calls a bare step asks for them."""
    group = rng.choice(side.optimizer.param_groups)
    group["clip_norm"] = rng.choice([None, 0.1, 1.0])
    group["skip_nonfinite"] = rng.choice([True, False])


def spoiled(side, rng):
    p = side.pick(rng)
    if p.grad is not None and p.grad.numel() and p.grad.layout is torch.strided:
        p.grad = p.grad * rng.choice([float("inf"), float("nan")])


EDITS = [*edits.EDITS, released, zeroed, filled, set_through_data, cast, looked_at, stepped_with_more]
EDITS += [asked, spoiled]


def fresh(optimizer):
    """An optimizer of the same kind, given what the user sees of another: its groups and its state."""
    start, kind = [nn.Parameter(torch.zeros(1))], getattr(optimizer, "compacts", None)
    if kind is None:
        made = type(optimizer)(start, seed=optimizer.seed, backend=optimizer.backend)
    else:
        made = hs.optim.compact(kind, start, seed=optimizer.seed)
    made.param_groups = optimizer.param_groups
    made.state = optimizer.state
    return made


def copied(optimizer):
    """Groups, state and gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, object] = {}
    groups = copy.deepcopy(optimizer.param_groups, memo)
    state = collections.defaultdict(dict, copy.deepcopy(dict(optimizer.state), memo))
    for p in params:
        twin = memo[id(p)]
        twin.data, twin.grad_dtype = copy.deepcopy(p.detach()), None  # with its strides
        grad = copy.deepcopy(p.grad)
        if grad is not None and grad.shape != twin.shape:  # which only `.data` allows
            twin.grad = torch.zeros_like(twin, dtype=grad.dtype, layout=grad.layout)
            twin.grad.data = grad
        else:
            twin.grad = grad
    twin = fresh(optimizer)
    twin.param_groups, twin.state = groups, state
    return twin, [memo[id(p)] for p in params]


def bits(t):
    return t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


RAISED = ArithmeticError, LookupError, RuntimeError, TypeError, ValueError


def attempt(optimizer):
    try:
        optimizer.step()
    except hs.HalfstepError as error:
        return str(error)
    except RAISED as error:
        if not hasattr(optimizer, "compacts"):  # whose own step may raise what it likes
            raise
        return repr(error)
    return ""


def same_state(ours, theirs):
    if ours.keys() != theirs.keys():
        return False
    pairs = [(ours[key], theirs[key]) for key in ours if isinstance(ours[key], torch.Tensor)]
    return all(a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in pairs)


def check(seed, kinds):
    """Random edits and steps; the step after each edit beside that of a fresh optimizer."""
    rng = random.Random(seed)
    side = edits.sides(seed, rng, kinds)[0]
    for _ in range(rng.randrange(3, 7)):
        for p in side.params:
            if p.grad is None or p.grad.shape != p.shape:
                p.grad = None
                p.grad = side.draw(p.shape, p.dtype)
        names = []
        for edit in rng.choices(EDITS, k=rng.choice([0, 1, 1, 2, 3])):
            names.append(edit.__name__)
            with contextlib.suppress(hs.HalfstepError, *RAISED):  # what it left behind counts
                edit(side, rng)
        twin, params = copied(side.optimizer)
        before = dict(vars(side.optimizer))
        said = attempt(side.optimizer), attempt(twin)
        assert said[0] == said[1], (seed, names)
        after = vars(side.optimizer)
        assert after.keys() == before.keys()
        assert all(after[key] is before[key] for key in before if key not in OWN), (seed, names)
        own = [p for group in side.optimizer.param_groups for p in group["params"]]
        assert all(torch.equal(bits(p), bits(q)) for p, q in zip(own, params)), (seed, names)
        states = [(side.optimizer.state.get(p, {}), twin.state.get(q, {})) for p, q in zip(own, params)]
        assert all(same_state(*pair) for pair in states), (seed, names)
        if said[0]:
            return


def run(seeds, kinds=edits.KINDS):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            check(seed, kinds)


def test_a_step_after_any_edit_is_that_of_a_fresh_optimizer():
    run(range(24))


def test_so_is_one_of_any_other_optimizer():
    run(range(40), edits.COMPACTED)


@pytest.mark.exhaustive
def test_so_are_a_thousand_of_these():
    run(range(40, 1040), edits.COMPACTED)


@pytest.mark.long
def test_so_is_one_of_seventy_more():
    run(range(24, 100))


@pytest.mark.exhaustive
def test_so_is_one_of_ten_thousand():
    run(range(100, 100 + SEEDS))


@pytest.mark.parametrize("kept", ["exact", "fp32", "stochastic", None])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"release_gradients": True}], ids=str)
def test_an_optimizer_holds_nothing_of_a_step_but_groups_and_state(kept, options):
    """A fresh optimizer at every step is one optimizer."""
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 3)).bfloat16()
        optimizer = hs.optim.AdamW(model.parameters(), lr=1e-2, master=kept, **options)
        for step in range(4):
            model(
                torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
            ).sum().backward()
            before = dict(vars(optimizer))
            optimizer.step()
            assert all(vars(optimizer)[key] is value for key, value in before.items() if key not in OWN)
            optimizer.zero_grad()
            if again and optimizer.release is None:
                optimizer = fresh(optimizer)
            elif again:
                next_one = hs.optim.AdamW(model.parameters(), lr=1e-2, master=kept, **options)
                next_one.state, optimizer = optimizer.state, next_one
        results.append([*model.parameters(), *optimizer.masters().values()])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results))
