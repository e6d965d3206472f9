"""MasterWeights around torch's own optimizers."""

import copy
import gc
import itertools
import math
import pickle
import weakref

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import CheckpointError, ConfigError, UnsupportedError
from halfstep.optim import MasterWeights, master_link
from halfstep.scaling.grad_scaler import GradScaler

torch.set_num_threads(1)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def small_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def backward(model: nn.Module, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(x).float().square().mean().backward()


def reference(model: nn.Module, make, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The definition, written out: fp32 copies, fp32 gradients, a plain optimizer, torch's cast back."""
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = make(masters)
    for step in range(steps):
        backward(model, step, dtype)
        for p, m in zip(model.parameters(), masters):
            m.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, m in zip(model.parameters(), masters):
                p.copy_(m.to(dtype))
    return masters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_the_written_out_definition_bit_for_bit(kind, dtype):
    model, twin = small_model(dtype), small_model(dtype)
    expected = reference(twin, OPTIMIZERS[kind], 5, dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    masters = MasterWeights(optimizer, model)
    for step in range(5):
        backward(model, step, dtype)
        optimizer.step()
        optimizer.zero_grad()
    for (weight, master), theirs in zip(masters.pairs(), expected):
        assert torch.equal(master, theirs)
        assert torch.equal(weight, theirs.to(dtype))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["before backward", "after step", "instead of step"])
def test_the_users_zero_grad_clears_the_models_gradients(set_to_none, when):
    def train(model, optimizer):
        for step in range(4):
            if when == "before backward":
                optimizer.zero_grad(set_to_none)
            backward(model, step)
            if when == "instead of step" and step == 1:
                optimizer.zero_grad(set_to_none)
                continue
            optimizer.step()
            if when != "before backward":
                optimizer.zero_grad(set_to_none)

    model, clean = small_model(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    masters = MasterWeights(optimizer, model)
    train(model, optimizer)
    other = torch.optim.SGD(clean.parameters(), lr=0.5)
    reference_masters = MasterWeights(other, clean)
    for step in range(4):
        if not (when == "instead of step" and step == 1):
            clean.zero_grad()
            backward(clean, step)
            other.step()
    for ours, theirs in zip(masters.params(), reference_masters.params()):
        assert torch.equal(ours, theirs)


def test_accumulation_without_zero_grad_behaves_as_in_torch():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    MasterWeights(optimizer, model)
    for _ in range(3):
        backward(model, 0)
        optimizer.step()
    total = next(model.parameters()).grad.clone()
    optimizer.zero_grad()
    backward(model, 0)
    assert torch.allclose(total, 3 * next(model.parameters()).grad.float(), rtol=1e-2)


def test_clipping_and_unscaling_on_either_side_act_on_the_same_gradient():
    model = small_model(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer, model)
    backward(model, 0, torch.float16)
    assert all(p.grad.dtype == torch.float16 for p in model.parameters())
    masters.copy_grads(inv_scale=0.5)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    again = nn.utils.clip_grad_norm_(masters.params(), 1e9)
    assert norm > 1e-3
    assert again == pytest.approx(1e-3, rel=1e-3)


def test_small_fp16_gradients_survive_unscaling():
    model = nn.Linear(1, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    masters = MasterWeights(optimizer, model)
    model.weight.grad = torch.tensor([[2.0**-20]], dtype=torch.float16)
    (grad,) = masters.copy_grads(inv_scale=torch.tensor(2.0**-16))
    assert grad.dtype == torch.float32
    assert grad.item() == 2.0**-36


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
def test_scalers_unscale_fp16_weights_in_fp32(kind):
    model = small_model(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer, model)
    scaler = kind("cpu", init_scale=2.0**16)
    x = torch.randn(4, 5).half()
    scaler.scale(model(x).float().mean() * 2.0**-20).backward()
    scaled = [p.grad.float() for p in model.parameters()]
    scaler.unscale_(optimizer)
    assert all(torch.equal(m.grad, g * 2.0**-16) for m, g in zip(masters.params(), scaled))
    expected = [m - 0.1 * g * 2.0**-16 for m, g in zip(masters.params(), scaled)]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.allclose(m, e, rtol=1e-6) for m, e in zip(masters.params(), expected))


def test_existing_state_is_rekeyed_and_widened():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backward(model, 0)
    optimizer.step()
    moment = optimizer.state[model[0].weight]["exp_avg"].clone()
    masters = MasterWeights(optimizer, model)
    (weight, master), *_ = masters.pairs()
    assert weight not in optimizer.state
    assert optimizer.state[master]["exp_avg"].dtype == torch.float32
    assert torch.equal(optimizer.state[master]["exp_avg"], moment.float())
    assert optimizer.state[master]["step"] == 1


def test_revert_leaves_nothing_behind():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backward(model, 0)
    optimizer.step()
    attributes, model_attributes = dict(vars(optimizer)), {k: copy.copy(v) for k, v in vars(model).items()}
    groups = [list(g["params"]) for g in optimizer.param_groups]
    masters = MasterWeights(optimizer, model)
    backward(model, 1)
    optimizer.step()
    optimizer.state_dict()
    masters.revert()
    masters.revert()
    assert vars(optimizer).keys() == attributes.keys()
    hooks = [k for k in vars(optimizer) if "hooks" in k]
    assert len(hooks) >= 6
    assert all(not vars(optimizer)[k] for k in hooks)
    assert {k: v for k, v in vars(model).items() if "hooks" in k} == {
        k: v for k, v in model_attributes.items() if "hooks" in k
    }
    for group, before in zip(optimizer.param_groups, groups):
        assert all(a is b for a, b in zip(group["params"], before, strict=True))
    for p in model.parameters():
        assert p.grad.dtype == optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
    optimizer.step()
    with pytest.raises(ConfigError, match="reverted"):
        masters.pairs()


def test_revert_gives_fp32_weights_the_exact_masters():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    masters = MasterWeights(optimizer, model)
    backward(model, 0)
    optimizer.step()
    expected = [m.clone() for m in masters.params()]
    for p in model.parameters():
        p.data = p.data.float()
    masters.revert()
    assert all(torch.equal(p, m) for p, m in zip(model.parameters(), expected))


def test_groups_added_later_are_adopted():
    model = small_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    masters = MasterWeights(optimizer, model)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
    backward(model, 0)
    optimizer.step()
    assert [name for name, _ in masters.named()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(m.dtype == torch.float32 for m in masters.params())


@pytest.mark.parametrize("kind", ["a model", "names", "neither", "hs.optim"])
def test_own_state_loads_right_after_a_group_was_added(kind):
    model = small_model()
    make = hs.optim.AdamW if kind == "hs.optim" else torch.optim.AdamW
    optimizer = make(model[0].parameters(), lr=0.01)
    about = {"a model": {"model": model}, "names": {"names": model.named_parameters()}, "neither": {}}
    if kind in about:
        MasterWeights(optimizer, **about[kind])
    backward(model, 0)
    optimizer.step()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))
    backward(model, 1)
    optimizer.step()
    assert all(not torch.equal(p, w) for p, w in zip(model.parameters(), weights))


def test_a_parameter_of_another_size_is_refused_with_the_way_out():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    MasterWeights(optimizer, model)
    model[0].weight.data = model[0].weight.data[:2].clone()
    with pytest.raises(UnsupportedError, match=r"shape \[2, .*revert\(\), change the model"):
        optimizer.step()


def test_frozen_and_fp32_parameters_are_left_alone():
    model = small_model()
    model[0].requires_grad_(False)
    model[2].bias.data = model[2].bias.data.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer, model)
    assert [name for name, _ in masters.named()] == ["2.weight"]
    model[0].requires_grad_(True)
    assert [name for name, _ in masters.named()] == ["2.weight", "0.weight", "0.bias"]
    assert optimizer.param_groups[0]["params"][3] is model[2].bias


def test_initial_values_are_exact():
    exact = torch.tensor([[1.0 + 2.0**-20]])
    model = nn.Linear(1, 1, bias=False)
    model.weight.data = exact.bfloat16()
    masters = MasterWeights(torch.optim.SGD(model.parameters()), model, initial={model.weight: exact})
    assert torch.equal(masters.params()[0], exact)


def test_a_closure_sees_fresh_gradients():
    model, twin = small_model(), small_model()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    masters, expected = MasterWeights(optimizer, model), MasterWeights(other, twin)

    def closure():
        optimizer.zero_grad()
        backward(model, 3)

    optimizer.step(closure)
    backward(twin, 3)
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(masters.params(), expected.params()))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(make):
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True).bfloat16()
    optimizer = make(table.parameters(), lr=0.5)
    masters = MasterWeights(optimizer, table)
    before = masters.params()[0].clone()
    table(torch.tensor([1, 1, 3])).float().sum().backward()
    assert table.weight.grad.is_sparse
    (grad,) = masters.copy_grads(inv_scale=0.5)
    assert grad.is_sparse
    assert grad.dtype == torch.float32
    optimizer.step()
    changed = (masters.params()[0] != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 3]


def test_an_exception_in_step_loses_nothing():
    class Fragile(torch.optim.SGD):
        fail = True

        def step(self, closure=None):
            if self.fail:
                raise RuntimeError("out of memory")
            return super().step(closure)

    model, twin = small_model(), small_model()
    optimizer, other = Fragile(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    masters, expected = MasterWeights(optimizer, model), MasterWeights(other, twin)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.fail = False
    for m, o in ((model, optimizer), (twin, other)):
        backward(m, 1)
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(masters.params(), expected.params()))
    assert all(torch.equal(w, m.bfloat16()) for w, m in masters.pairs())


def test_weights_changed_in_place_are_adopted_and_the_rest_keeps_its_bits():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    masters = MasterWeights(optimizer, model)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    (weight, master), *_ = masters.pairs()
    kept = master.clone()
    with torch.no_grad():
        weight[0, 0] = 5.0
    optimizer.step()
    assert master[0, 0] == 5.0
    assert torch.equal(master.flatten()[1:], kept.flatten()[1:])


def test_an_fp32_checkpoint_reaches_the_masters_unrounded():
    model = small_model()
    checkpoint = {k: torch.randn_like(v, dtype=torch.float32) for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer, model)
    model.load_state_dict(checkpoint)
    optimizer.step()
    for name, master in masters.named():
        assert torch.equal(master, checkpoint[name])
    masters.refresh({name: value + 1 for name, value in checkpoint.items()})
    assert torch.equal(masters.params()[0], checkpoint["0.weight"] + 1)
    assert torch.equal(model[0].weight, (checkpoint["0.weight"] + 1).bfloat16())


def with_masters(kind, model):
    """A 16-bit model's optimizer, and what holds its masters."""
    if kind == "hs.optim":
        optimizer = hs.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return optimizer, optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, MasterWeights(optimizer, model)


@pytest.mark.parametrize("kind", ["MasterWeights", "hs.optim"])
def test_masters_are_read_and_set_alike(kind):
    model = small_model()
    optimizer, holder = with_masters(kind, model)
    weights = list(model.parameters())
    exact = {w: torch.randn(w.shape) for w in weights}
    holder.seed_masters(exact | {nn.Parameter(torch.zeros(2)): torch.ones(2)})
    for w, value in holder.masters().items():
        assert torch.equal(value, exact[w])
        assert torch.equal(w, value.bfloat16())
    assert list(holder.masters()) == weights
    assert list(holder.masters({weights[1]})) == [weights[1]]
    holder.seed_masters({weights[0]: torch.zeros_like(exact[weights[0]])})
    assert weights[0].eq(0).all()
    assert torch.equal(holder.masters()[weights[1]], exact[weights[1]])
    backward(model, 0)
    optimizer.step()
    assert not any(torch.equal(value, exact[w]) for w, value in holder.masters().items())
    with torch.no_grad():
        weights[3].zero_()
    assert holder.masters()[weights[3]].abs().max() < 2**-133  # bits that an exact one lacks are below that


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["MasterWeights", "hs.optim"])
def test_loaded_values_reach_masters_alike(kind, dtype):
    model = small_model()
    optimizer, holder = with_masters(kind, model)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16") if kind == "hs.optim" else None
    exact = {w: torch.randn(w.shape) for w in model.parameters()}
    holder.seed_masters(exact)
    given = {name: value.to(dtype) for name, value in hs.optim.fp32_state_dict(model, optimizer).items()}
    given["2.bias"] = torch.full((3,), 1 / 3).to(dtype)
    model.load_state_dict(given)
    found = holder.masters()
    for name, w in model.named_parameters():
        if name == "2.bias":
            assert torch.equal(found[w], given[name].float())
        else:
            assert torch.equal(found[w], exact[w])
    assert amp is None or amp.level.masters


def test_data_written_behind_torchs_back_needs_refresh():
    model = small_model()
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model[0].weight.data.fill_(2.0)
    masters.refresh()
    assert masters.params()[0].eq(2.0).all()


LAYOUTS = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.permute(1, 0, 3, 2),
    "with gaps": lambda t: t[..., ::2],
    "without elements": lambda t: t[:0],
    "a number": lambda t: t[0, 0, 0, 0].clone(),
}


@pytest.mark.parametrize("with_numba", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_compared_by_value(layout, dtype, with_numba, monkeypatch):
    if not with_numba:
        monkeypatch.setattr(master_link, "kernels", lambda needed: None)
    torch.manual_seed(0)
    exact = [LAYOUTS[layout](torch.randn(2, 3, 3, 2)), torch.randn(7)]
    weights = [nn.Parameter(t.to(dtype)) for t in exact]
    masters = MasterWeights(torch.optim.SGD(weights, lr=0.1), initial=dict(zip(weights, exact)))
    wanted = [t.clone() for t in exact]
    for which, weight in enumerate(weights):
        for index in itertools.product(*map(range, weight.shape)):
            for value in (weight[index].item(), -0.0, math.nan, 1.0, weight[index].item() * (1 + 2**-7)):
                before = weight[index].detach().clone()
                weight.data[index] = value
                if before != weight[index]:  # a NaN is another value each time
                    wanted[which][index] = weight[index].detach()
                found = [master.detach() for _, master in masters.pairs()]
                assert all(map(torch.equal, map(torch.nan_to_num, found), map(torch.nan_to_num, wanted)))


def test_swap_evaluates_with_masters_and_restores():
    model = small_model()
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model)
    originals = list(model.parameters())
    masters.refresh({"0.weight": torch.full((7, 5), 1 + 2.0**-20)})
    with masters.swap():
        assert torch.equal(model[0].weight, masters.params()[0])
        assert model(torch.randn(2, 5)).dtype == torch.float32
        twin = copy.deepcopy(model)
    assert all(a is b for a, b in zip(model.parameters(), originals, strict=True))
    assert type(twin[0].weight) is nn.Parameter
    assert twin[0].weight[0, 0] == 1 + 2.0**-20
    with pytest.raises(ConfigError, match="model="):
        MasterWeights(torch.optim.SGD(small_model().parameters())).swap().__enter__()


def test_swap_reaches_recurrent_and_tied_weights():
    rnn = nn.LSTM(3, 4)
    tied = nn.Linear(3, 3)
    model = nn.ModuleDict({"rnn": rnn, "a": tied, "b": nn.Linear(3, 3)})
    model["b"].weight = tied.weight
    model.bfloat16()
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with masters.swap():
        assert model["a"].weight is model["b"].weight
        assert rnn(torch.randn(2, 1, 3))[0].dtype == torch.float32
    assert rnn(torch.randn(2, 1, 3).bfloat16())[0].dtype == torch.bfloat16
    assert all(a is b for a, b in zip(rnn._flat_weights, rnn.parameters(), strict=True))


def test_a_moving_average_of_the_masters():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    masters = MasterWeights(optimizer, model)
    with masters.swap():
        average = torch.optim.swa_utils.AveragedModel(model)
    sums = [torch.zeros_like(m) for m in masters.params()]
    for step in range(4):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        with masters.swap():
            average.update_parameters(model)
        sums = [s + m.detach() for s, m in zip(sums, masters.params())]
    for p, s in zip(average.parameters(), sums):
        assert p.dtype == torch.float32
        assert torch.allclose(p, s / 4, rtol=1e-6)


def test_copies_and_pickles():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    MasterWeights(optimizer, model)
    twin = copy.deepcopy(model)
    backward(twin, 0)
    assert all(p.grad.dtype == torch.bfloat16 for p in twin.parameters())
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="state_dict"):
            copier(optimizer)


@pytest.mark.parametrize(("given", "used"), [(None, True), (False, False), (True, True)])
def test_on_a_gpu_masters_are_stepped_in_lists_unless_told_otherwise(given, used, monkeypatch):
    """torch chooses so by itself where no parameter is of a class of its own; its lists are left alone."""
    model, seen = small_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=given)
    MasterWeights(optimizer, model)
    assert master_link.Master not in torch.utils._foreach_utils._foreach_supported_types
    monkeypatch.setattr(master_link.Master, "is_cuda", True)
    optimizer.register_step_pre_hook(lambda own, *about: seen.append(own.param_groups[0]["foreach"]))
    backward(model, 0)
    optimizer.step()
    assert seen == [used]
    assert optimizer.param_groups[0]["foreach"] is given


def test_freed_without_the_garbage_collector():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer, model)
    watch = weakref.ref(masters.link)
    backward(model, 0)
    optimizer.step()
    gc.disable()
    try:
        del masters, optimizer
        assert watch() is None
    finally:
        gc.enable()
    MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_the_hooks_live_as_long_as_the_optimizer():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    MasterWeights(optimizer, model)
    gc.collect()
    before = model[0].weight.clone()
    backward(model, 0)
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


class Lookahead(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.slow = [[p] for g in self.param_groups for p in g["params"]]


class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})


REFUSED = {
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "Lookahead": lambda p: Lookahead(p, 0.1),
    "Wrapper": lambda p: Wrapper(torch.optim.SGD(p, lr=0.1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_with_their_own_references_are_refused_by_name(name):
    model = small_model()
    optimizer = REFUSED[name](list(model.parameters()))
    with pytest.raises(UnsupportedError, match=name):
        MasterWeights(optimizer, model)
    assert all(type(p) is nn.Parameter for g in optimizer.param_groups for p in g["params"])


def test_other_refusals():
    model = small_model()
    with pytest.raises(ConfigError, match=r"torch\.optim\.Optimizer"):
        MasterWeights(model)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="not a parameter of the model"):
        MasterWeights(optimizer, small_model())
    MasterWeights(optimizer, model)
    with pytest.raises(ConfigError, match="already has"):
        MasterWeights(optimizer, model)
    with pytest.raises(ConfigError, match="another optimizer"):
        MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(UnsupportedError, match="meta"):
        MasterWeights(torch.optim.SGD(small_model().to("meta").parameters()))
    weight = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    with pytest.raises(UnsupportedError, match="float8"):
        MasterWeights(torch.optim.SGD([weight]))


def test_saved_masters_of_another_model_change_nothing():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    masters = MasterWeights(optimizer, model)
    state = optimizer.state_dict()
    before = masters.state_dict()
    renamed = {("x." + k if i == 0 else k): v for i, (k, v) in enumerate(state["masters"].items())}
    with pytest.raises(CheckpointError, match=r"missing \['0.weight'\]"):
        optimizer.load_state_dict({**state, "masters": renamed})
    with pytest.raises(CheckpointError, match="shape"):
        masters.load_state_dict({**before, "0.weight": torch.zeros(1)})
    assert all(torch.equal(a, b) for a, b in zip(before.values(), masters.state_dict().values()))


def test_a_compiled_or_wrapped_model_has_the_same_names():
    model = small_model()
    wrapped = nn.Module()
    wrapped.module = model
    masters = MasterWeights(torch.optim.SGD(model.parameters()), wrapped)
    assert list(masters.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    masters.revert()
    unnamed = MasterWeights(torch.optim.SGD(model.parameters()))
    assert list(unnamed.state_dict()) == ["0.0", "0.1", "0.2", "0.3"]
