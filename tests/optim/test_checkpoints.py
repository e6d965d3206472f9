"""Checkpoints: self-describing, convertible between formats, bit-identical on resume."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.compat.apex.optimizers import FusedAdam
from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim import SGD, Adam, AdamW, Lion, fp32_state_dict, rounding
from halfstep.session import prepare

BF16, FP16 = torch.bfloat16, torch.float16
FORMATS = list(itertools.product(("exact", "fp32", None), ("fp32", "bf16", "8bit")))


def net(dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 4)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=g).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()


def moment(entry: Any, key: str) -> torch.Tensor:
    """A state in fp32."""
    held = entry[key] if key in entry else entry[key + "_codes"]
    if held.dtype != torch.uint8:
        return held.float()
    width = held[0].numel()
    values = rounding.decode(held.view(-1), entry[key + "_exponents"], signed=key == "exp_avg", width=width)
    return values.view_as(held)


def saved(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    ("master", "state_dtype"), [("exact", "fp32"), ("exact", "8bit"), ("stochastic", "bf16")]
)
def test_resume_is_bit_identical(master: str, state_dtype: str):
    options = {"lr": 1e-2, "master": master, "state_dtype": state_dtype}
    model, whole = net(), net()
    optimizer, never_stopped = AdamW(model.parameters(), **options), AdamW(whole.parameters(), **options)
    train(model, optimizer, 5)
    train(whole, never_stopped, 5)
    weights, state = saved(model, optimizer)
    resumed = net()
    again = AdamW(resumed.parameters(), **options)
    again.load_state_dict(state)  # before the model, in the same format: nothing needs the weights
    resumed.load_state_dict(weights)
    train(resumed, again, 5, seed=1)
    train(whole, never_stopped, 5, seed=1)
    for p, q in zip(resumed.parameters(), whole.parameters()):
        assert torch.equal(p, q)
        assert torch.equal(again.master_of(p), never_stopped.master_of(q))


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_any_format_loads_into_any_other(source: tuple[Any, str], target: tuple[Any, str]):
    model = net()
    optimizer = AdamW(
        model.parameters(), lr=1e-2, master=source[0], state_dtype=source[1], backend="reference"
    )
    train(model, optimizer, 3)
    weights, state = saved(model, optimizer)
    other = net()
    other.load_state_dict(weights)
    into = AdamW(other.parameters(), master=target[0], state_dtype=target[1], backend="reference")
    into.load_state_dict(state)
    assert into.param_groups[0]["lr"] == 1e-2
    assert into.param_groups[0]["master"] == target[0]
    for p, q in zip(model.parameters(), other.parameters()):
        assert int(into.state[q]["step"]) == 3
        exact = torch.equal(optimizer.master_of(p), into.master_of(q))
        assert exact or target[0] is None
        if target[1] == "fp32" or target[1] == source[1]:
            for key in ("exp_avg", "exp_avg_sq"):
                ours, theirs = (moment(one.state[w], key) for one, w in ((optimizer, p), (into, q)))
                assert torch.equal(ours, theirs)
    train(other, into, 1)


def test_into_fp32_parameters_and_back():
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 3)
    weights, state = saved(model, optimizer)
    wide = net(torch.float32)
    wide.load_state_dict(weights)
    into = AdamW(wide.parameters())
    into.load_state_dict(state)
    for p, q in zip(model.parameters(), wide.parameters()):
        assert torch.equal(optimizer.master_of(p), q)


def test_torch_s_own_checkpoint_loads():
    model = net(torch.float32)
    theirs = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, theirs, 3)
    low = copy.deepcopy(model).to(BF16)
    ours = AdamW(low.parameters(), state_dtype="bf16")
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 3e-3
    for p, q in zip(model.parameters(), low.parameters()):
        assert torch.equal(ours.state[q]["exp_avg"], theirs.state[p]["exp_avg"].to(BF16))
        assert float(ours.state[q]["step"]) == 3


def test_lacking_bits_of_other_weights_are_refused():
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 3)
    state = optimizer.state_dict()
    into = AdamW(net().parameters(), master="fp32")
    with pytest.raises(CheckpointError, match="load the model's weights before"):
        into.load_state_dict(state)


def test_what_does_not_fit_is_named():
    model = net()
    optimizer = SGD(model.parameters(), momentum=0.9)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match="groups of"):
        SGD(list(model.parameters())[:2], momentum=0.9).load_state_dict(state)
    swapped = list(net().parameters())[::-1]
    with pytest.raises(CheckpointError, match="shape"):
        SGD(swapped, momentum=0.9).load_state_dict(state)


def test_names_win_over_positions():
    model = net()
    named = list(model.named_parameters())
    optimizer = SGD(named, momentum=0.9)
    train(model, optimizer, 2)
    other = net()
    other.load_state_dict(model.state_dict())
    into = SGD(list(other.named_parameters())[::-1], momentum=0.9)
    into.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], into.state[q]["momentum_buffer"])
    with pytest.raises(CheckpointError, match="no state for other"):
        SGD([("other", p) for _, p in named[:1]] + named[1:]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fp32_state_dict_is_exact(dtype: torch.dtype):
    values = {p: p.detach().clone() for p in net(torch.float32).parameters()}
    model = net(torch.float32)
    originals = dict(zip(model.parameters(), values.values()))
    model.register_buffer("table", torch.ones(3, dtype=dtype))
    model.register_buffer("count", torch.tensor(7))
    optimizer = AdamW(list(model.parameters())[:-1])
    model.to(dtype)
    optimizer.seed_masters(originals)
    state = fp32_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        expected = originals[p] if name != names[-1] else p.detach().float()
        # fp16's exact range starts at 2^-16; below, the error is bounded.
        assert torch.allclose(state[name], expected, rtol=0, atol=0 if dtype == BF16 else 2.0**-41)
    assert state["table"].dtype == torch.float32
    assert state["count"].dtype == torch.int64
    net(torch.float32).load_state_dict({k: v for k, v in state.items() if k not in ("table", "count")})
    with pytest.raises(ConfigError, match="optimizer"):
        fp32_state_dict(model, [model])  # pyright: ignore[reportArgumentType]


# ---- torch's checkpoints, and through torch's optimizers --------------------------------------------------


def steps_of(params: list[nn.Parameter], optimizer: Any, count: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        optimizer.step()


def wide(count: int = 2) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(6, 20, generator=g)) for _ in range(count)]


def test_momentum_of_torch_s_sgd_goes_on():
    ours, theirs = wide(), wide()
    peer = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, dampening=0.1)
    steps_of(theirs, peer, 3, 0)
    optimizer = SGD(ours, lr=0.1, momentum=0.9, dampening=0.1)
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    for p, q in zip(ours, theirs):
        p.data.copy_(q.detach())
    steps_of(theirs, peer, 3, 1)
    steps_of(ours, optimizer, 3, 1)
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(ours, theirs))


@pytest.mark.parametrize("master", ["exact", "fp32"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_ours_goes_through_torch_s_and_comes_back(dtype: torch.dtype, state_dtype: str, master: str):
    params = [nn.Parameter(p.detach().to(dtype)) for p in wide()]
    optimizer = AdamW(params, lr=1e-2, state_dtype=state_dtype, master=master)
    steps_of(params, optimizer, 3, 0)
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert theirs.param_groups[0]["lr"] == 1e-2
    steps_of(params, theirs, 2, 1)
    back, trained = AdamW(params, state_dtype=state_dtype, master=master), copy.deepcopy(params)
    back.load_state_dict(theirs.state_dict())
    for p, last in zip(params, trained):
        assert float(back.state[p]["step"]) == 5
        assert torch.equal(back.master_of(p), last.detach().float())  # torch kept no bits beside the weight
    steps_of(params, back, 1, 2)


@pytest.mark.parametrize("master", ["exact", "fp32"])
def test_masters_that_torch_s_left_behind_are_not_those_of_weights_loaded_before(master: str):
    model = nn.Linear(8, 4)
    optimizer = AdamW(model.parameters(), master=master)
    prepare(model, optimizer, level="O2", dtype="bf16")
    optimizer.init_states()
    plain = nn.Linear(8, 4)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    theirs.load_state_dict(optimizer.state_dict())
    plain(torch.ones(8)).sum().backward()
    theirs.step()
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(optimizer.masters().values(), plain.parameters()))


def test_lacking_bits_know_their_fp16_weight_where_that_of_bf16_has_the_same_sum():
    model, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1 + 2**-10 + 2**-20, 1 + 7 * 2**-10]]))  # rounds down, and up
    optimizers = [AdamW(m.parameters()) for m in (model, other)]
    for m, optimizer, dtype in zip((model, other), optimizers, ("fp16", "bf16")):
        prepare(m, optimizer, level="O2", dtype=dtype)
    optimizers[0].init_states()
    other.load_state_dict(model.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    (ours,), (theirs,) = (optimizer.masters().values() for optimizer in optimizers)
    assert torch.equal(ours, theirs)


def test_8_bit_codes_are_not_taken_for_moments_by_torch_s():
    params = wide()
    optimizer = AdamW(params, state_dtype="8bit")
    steps_of(params, optimizer, 2, 0)
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(KeyError, match="exp_avg"):
        theirs.step()
    with pytest.raises(CheckpointError, match="expected uint8"):
        AdamW(params).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
def test_live_states_have_the_names_of_saved_ones(state_dtype):
    params = wide()
    optimizer = AdamW(params, state_dtype=state_dtype)
    steps_of(params, optimizer, 2, 0)
    for p, saved in zip(params, optimizer.state_dict()["state"].values(), strict=True):
        held = {k: v.dtype for k, v in optimizer.state[p].items()}
        assert held == {k: v.dtype for k, v in saved.items() if k != "weight"}
    # 8-bit codes may still lie where a pickle of an earlier version has them, and numbers may be put there
    results = []
    for edit in ("none", "old names"):
        ours = [nn.Parameter(p.detach().clone()) for p in params]
        twin = AdamW(ours, state_dtype=state_dtype)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for entry in twin.state.values() if edit == "old names" else ():
            for key in [key for key in entry if key.endswith("_codes")]:
                entry[key.removesuffix("_codes")] = entry.pop(key)
        steps_of(ours, twin, 2, 2)
        results.append([*twin.masters().values()])
        assert all(entry.keys() == optimizer.state[p].keys() for entry, p in zip(twin.state.values(), params))
    assert all(map(torch.equal, *results))


def test_numbers_put_in_the_place_of_codes_are_used():
    results = []
    for edit in (False, True):
        params = wide()
        optimizer = AdamW(params, state_dtype="8bit")
        steps_of(params, optimizer, 2, 0)
        for p in params if edit else ():
            optimizer.state[p]["exp_avg"] = torch.full_like(p, 3.0, dtype=torch.float32)
        steps_of(params, optimizer, 1, 2)
        assert "exp_avg_codes" in optimizer.state[params[0]]
        results.append(moment(optimizer.state[params[0]], "exp_avg"))
    assert (results[1] - results[0]).mean() > 1.0


def test_amsgrad_comes_along():
    ours, theirs = wide(), wide()
    peer = torch.optim.AdamW(theirs, lr=0.1, amsgrad=True)
    steps_of(theirs, peer, 3, 0)
    optimizer = AdamW(ours)
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    for p, q in zip(ours, theirs):
        p.data.copy_(q.detach())
    steps_of(theirs, peer, 3, 1)
    steps_of(ours, optimizer, 3, 1)
    assert optimizer.param_groups[0]["amsgrad"] is True
    assert all(torch.allclose(p, q, rtol=1e-4, atol=1e-5) for p, q in zip(ours, theirs))


KINDS: dict[str, Any] = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD, "Lion": Lion}
OTHERS: dict[str, Any] = {
    **KINDS,
    **{
        f"torch {n}": getattr(torch.optim, n)
        for n in ("AdamW", "Adam", "SGD", "RAdam", "NAdam", "RMSprop", "Adagrad")
    },
}


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", OTHERS)
def test_states_of_other_names_are_refused(source: str, target: str):
    """As torch does, those of the same names are read: Adam's as AdamW's."""
    params = wide()
    first, second = OTHERS[source](params, lr=0.1), KINDS[target](params, lr=0.1)
    steps_of(params, first, 2, 0)
    state = copy.deepcopy(first.state_dict())
    given = {
        key for entry in state["state"].values() for key, value in entry.items() if torch.is_tensor(value)
    }
    given -= {"step", "lacking"}
    if not given:
        return  # plain SGD
    if given == set(second.algorithm(second.param_groups[0]).states):
        second.load_state_dict(state)
        return
    with pytest.raises(CheckpointError, match=r"does not keep|has no"):
        second.load_state_dict(state)
    assert not second.state
    assert second.param_groups[0]["lr"] == 0.1


def test_a_parameter_that_left_its_group_leaves_the_file_too():
    params = wide()
    optimizer = AdamW(params)
    steps_of(params, optimizer, 2, 0)
    optimizer.param_groups[0]["params"].pop()
    assert optimizer.state_dict()["state"].keys() == {0}
    assert len(optimizer.state) == 2


def test_the_algorithm_in_an_earlier_file_is_not_read():
    optimizer = AdamW(wide())
    state = optimizer.state_dict()
    state["param_groups"][0]["algorithm"] = "AdamW"
    optimizer.load_state_dict(state)
    assert "algorithm" not in optimizer.param_groups[0]


def test_a_named_checkpoint_names_an_optimizer_without_names():
    """Names key the random rounding, so both round alike from then on."""
    params, others = ([nn.Parameter(p.detach().bfloat16()) for p in wide()] for _ in range(2))
    named = AdamW([("first", params[0]), ("second", params[1])], master="stochastic")
    steps_of(params, named, 2, 0)
    other = AdamW(others, master="stochastic")
    other.load_state_dict(copy.deepcopy(named.state_dict()))
    assert other.param_groups[0]["param_names"] == ["first", "second"]
    with torch.no_grad():
        for p, q in zip(params, others):
            q.copy_(p)
    steps_of(params, named, 2, 1)
    steps_of(others, other, 2, 1)
    assert all(torch.equal(p, q) for p, q in zip(params, others))


@pytest.mark.parametrize("source", [("exact", "fp32"), ("fp32", "8bit")])
def test_a_file_that_is_refused_in_part_changes_nothing(source: tuple[Any, str]):
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.5, master=source[0], state_dtype=source[1])
    train(model, optimizer, 2)
    weights, state = saved(model, optimizer)
    other = net()
    ours = AdamW(other.parameters(), lr=0.25, master="exact" if source[0] == "fp32" else "fp32")
    train(other, ours, 3, seed=1)
    other.load_state_dict(weights)
    before = (
        [p.detach().clone() for p in other.parameters()],
        ours.masters(),
        copy.deepcopy(ours.state_dict()),
    )
    with torch.no_grad():
        master = state["state"][0].get("master", torch.zeros(()))
        master.copy_(torch.nextafter(master, torch.tensor(torch.inf)))
    state["state"][3]["exp_avg" if source[1] == "fp32" else "exp_avg_codes"] = torch.ones(
        2, dtype=torch.uint8
    )
    with pytest.raises(CheckpointError, match="parameter 3"):
        ours.load_state_dict(state)
    assert ours.param_groups[0]["lr"] == 0.25
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), before[0]))
    assert all(torch.equal(ours.master_of(p), q) for p, q in before[1].items())
    assert str(ours.state_dict()) == str(before[2])


def test_8_bit_sgd_whose_momentum_was_set_to_0_saves_what_loads():
    model, other = (nn.Linear(20, 32).bfloat16() for _ in range(2))
    ours, theirs = (SGD(m.parameters(), lr=0.1, momentum=0.9, state_dtype="8bit") for m in (model, other))
    for momentum in (0.9, 0.0):
        ours.param_groups[0]["momentum"] = momentum
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        ours.step()
    other.load_state_dict(model.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert theirs.param_groups[0]["momentum"] == 0
    assert all(map(torch.equal, ours.masters().values(), theirs.masters().values()))


@pytest.mark.parametrize("saves", [torch.optim.Adam, Adam], ids=["torch's", "ours"])
@pytest.mark.parametrize("loads", [Adam, AdamW, FusedAdam])
def test_the_state_of_an_adam_makes_no_adam_of_an_adamw_as_in_torch(loads: Any, saves: Any):
    """Only the numbers change: the next step is that of torch's class with the same state."""
    weights = []
    for kind in (loads, torch.optim.Adam if loads is Adam else torch.optim.AdamW):
        p = nn.Parameter(torch.linspace(1.0, 2.0, 32))
        earlier, later = saves([p], lr=0.01, weight_decay=0.5), kind([p], lr=0.1)
        p.grad = torch.linspace(-1e-3, 1e-3, 32)
        earlier.step()
        later.load_state_dict(earlier.state_dict())
        later.step()
        weights.append(p.detach())
    torch.testing.assert_close(*weights)
