"""Odd uses of a session: each works or ends in one clear error that leaves weights and state alone."""

import math

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.cli import main
from halfstep.errors import (
    CheckpointError,
    ConfigError,
    HalfstepError,
    HalfstepWarning,
    ScalerStateError,
    UnsupportedError,
)
from halfstep.recipes.data import Batches


class Bag(nn.Module):
    """A sparse embedding and a linear layer; the batch repeats rows, so gradients have duplicates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rows(x).mean(1))


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def backward(amp: hs.Session) -> None:
    with amp.autocast():
        loss = amp.model(torch.ones(3, 4)).float().square().mean()
    amp.backward(loss)


@pytest.mark.parametrize(("level", "dtype"), [("O0", None), ("O1", "fp16"), ("O2", "bf16")])
def test_sparse_gradients_are_clipped_like_dense_ones(level, dtype):
    moved = []
    for sparse in (True, False):
        model = Bag()
        model.rows.sparse = sparse
        start = model.rows.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        amp = hs.prepare(model, optimizer, level=level, dtype=dtype, loss_scale=1024.0)
        with amp.autocast():
            loss = nn.functional.cross_entropy(
                model(torch.tensor([[1, 1, 2], [3, 1, 2]])), torch.tensor([0, 1])
            )
        amp.backward(loss)
        outcome = amp.step(clip_norm=0.01)
        assert outcome.grad_norm > 0.02
        amp.revert()
        moved.append(model.rows.weight.detach() - start)
    assert 0 < moved[0].norm() < 0.011
    torch.testing.assert_close(moved[0], moved[1], rtol=2e-2, atol=1e-6)


def test_a_loss_of_several_numbers_is_refused_before_anything_is_noted():
    model, optimizer = small()
    amp = hs.prepare(model, optimizer, dtype="fp16")
    with amp.autocast():
        output = model(torch.ones(3, 4))
    with pytest.raises(ConfigError, match=r"shape \(3, 2\).*one number"):
        amp.backward(output)
    with pytest.raises(hs.ScalerStateError, match="no gradients"):
        amp.step()
    amp.backward(output, gradient=torch.full((3, 2), 0.1))
    assert amp.step().taken


WRONG_STEPS = {
    "plateau": ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(small()[1])}, "wants a metric"),
    "an optimizer": ({"scheduler": small()[1]}, "expected a scheduler"),
    "no scheduler": ({"scheduler": 3}, r"scheduler=3\): expected a scheduler"),
    "negative clip": ({"clip_norm": -1.0}, "clip_norm=-1.0: expected"),
    "nan clip": ({"clip_norm": float("nan")}, "clip_norm=nan: expected"),
    "text clip": ({"clip_norm": "1"}, "clip_norm='1': expected"),
}


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_wrong_arguments_of_step_change_nothing(case):
    arguments, message = WRONG_STEPS[case]
    model, optimizer = small()
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    before = model.weight.detach().clone()
    backward(amp)
    with pytest.raises(ConfigError, match=message):
        amp.step(**arguments)
    assert torch.equal(before, model.weight)
    assert amp.steps == 0
    assert amp.step().taken  # the gradients are still there
    assert not torch.equal(before, model.weight)


def test_an_optimizer_that_needs_a_closure_steps_by_itself():
    model, _ = small()
    optimizer = torch.optim.LBFGS(model.parameters())
    amp = hs.prepare(model, optimizer, dtype="bf16")
    backward(amp)
    with pytest.raises(UnsupportedError, match="LBFGS needs a closure"):
        amp.step()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with amp.autocast():
            loss = model(torch.ones(3, 4)).float().square().mean()
        loss.backward()
        return loss.detach()

    first = float(optimizer.step(closure))
    assert float(closure()) < first


REFUSED = {
    "no model": (lambda m, o: hs.prepare(None, o), "got NoneType as a model"),
    "text model": (lambda m, o: hs.prepare("resnet"), "got str as a model"),
    "list with a hole": (lambda m, o: hs.prepare([m, None], o), "got NoneType as a model"),
    "number as policy": (lambda m, o: hs.prepare(m, o, policy=3), "a policy is a Policy or its text, got 3"),
    "no such plan": (lambda m, o: hs.prepare(m, o, plan="plan.toml"), "cannot read the plan plan.toml"),
    "number as plan": (lambda m, o: hs.prepare(m, o, plan=3), "got int as a plan"),
    "flag as scale": (lambda m, o: hs.prepare(m, o, loss_scale=True), "loss_scale=True: expected a number"),
    "twice": (lambda m, o: hs.prepare(m, [o, o]), "the same optimizer twice"),
    "policy at O0": (lambda m, o: hs.prepare(m, o, level="O0", policy="torch"), "O0 is fp32 throughout"),
    "dtype at O0": (lambda m, o: hs.prepare(m, o, level="O0", dtype="bf16"), "O0 is fp32 throughout"),
    "fp32 policy": (lambda m, o: hs.prepare(m, o, policy="p=f32,c=f32"), "O1 runs in fp16 or bf16"),
    "16-bit weights at O1": (lambda m, o: hs.prepare(m, o, policy="bf16"), "stores parameters in bf16"),
    "fp64 outputs": (lambda m, o: hs.prepare(m, o, policy="c=bf16,o=fp64"), "outputs in fp64: expected fp32"),
    "bf16 reductions": (lambda m, o: hs.prepare(m, o, policy="c=bf16,r=bf16"), "unknown key 'r' in policy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_prepare_cannot_do_it_refuses(case):
    call, message = REFUSED[case]
    model, optimizer = small()
    with pytest.raises(ConfigError, match=message):
        call(model, optimizer)
    assert model.weight.dtype == torch.float32
    assert hs.prepare(model, optimizer, level="O2", dtype="bf16").masters


@pytest.mark.parametrize("kind", [torch.optim.SGD, hs.optim.SGD])
def test_preparing_again_at_o1_hands_the_optimizer_to_the_later_session(kind):
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    first = hs.prepare(model, optimizer, level="O1", dtype="fp16", loss_scale=8.0)
    second = hs.prepare(model, optimizer, level="O1", dtype="fp16", loss_scale=4.0)
    x = torch.ones(3, 4)
    for turn in range(3):
        before = model.weight.detach().clone()
        with second.autocast():
            loss = model(x).float().sum()
        second.backward(loss)
        if not turn:
            with pytest.raises(ScalerStateError, match="not scaled"):
                first.step()
            continue
        second.step()
        torch.testing.assert_close(model.weight, before - (0.1 if turn > 1 else 0.2) * 3)


def test_preparing_twice_names_the_masters():
    model, optimizer = small()
    hs.prepare(model, optimizer, level="O2", dtype="bf16")
    with pytest.raises(ConfigError, match="already has master weights"):
        hs.prepare(model, optimizer, level="O2", dtype="bf16")


def test_a_dtype_beside_a_table_is_the_one_computed_in():
    model, optimizer = small()
    amp = hs.prepare(model, optimizer, dtype="fp16", policy="torch")
    assert isinstance(amp.loss_scale, hs.DynamicLossScale)
    with amp.autocast():
        assert model(torch.ones(3, 4)).dtype == torch.float16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_policys_output_dtype_is_the_models(level):
    model, optimizer = small()
    amp = hs.prepare(model, optimizer, level=level, policy="p=f32,c=bf16,o=f32")
    with amp.autocast():
        assert model(torch.ones(3, 4)).dtype == torch.float32
    backward(amp)
    assert amp.step().taken
    amp.revert()
    assert not model._forward_hooks


def test_a_state_of_another_policy_or_in_pieces_changes_nothing():
    model, optimizer = small()
    amp = hs.prepare(model, optimizer, dtype="fp16")
    other = hs.prepare(*small(), dtype="bf16")
    scale = amp.loss_scale
    with pytest.raises(CheckpointError, match="saved with policy p=fp32,c=bf16"):
        amp.load_state_dict(other.state_dict())
    state = amp.state_dict()
    for broken in (
        {k: v for k, v in state.items() if k != "skips"},
        {**state, "loss_scale": {"kind": "nothing"}},
        {**state, "loss_scale": None},
    ):
        with pytest.raises(CheckpointError, match="cannot be read"):
            amp.load_state_dict(broken)
    assert amp.loss_scale is scale


@pytest.mark.long
def test_the_doctor_watches_longer_than_the_data_lasts(monkeypatch, capsys):
    monkeypatch.setattr(Batches, "__len__", lambda self: 3)
    assert main(["doctor", "digits-mlp", "--level", "O0", "--steps", "8"]) == 0
    assert "8 steps" in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, hs.optim.AdamW])
def test_evaluating_within_evaluating_changes_nothing(optimizer):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    amp = hs.prepare(model, optimizer(model.parameters()), level="O2", dtype="bf16")
    backward(amp)
    amp.step()
    weight = model[0].weight
    with amp.evaluating():
        outer = model(torch.ones(3, 4))
        with amp.evaluating():
            inner = model(torch.ones(3, 4))
        after = model(torch.ones(3, 4))
    assert torch.equal(outer, inner)
    assert torch.equal(outer, after)
    assert model[0].weight is weight
    backward(amp)
    assert amp.step().taken


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, hs.optim.SGD])
def test_gradients_kept_after_a_step_are_added_to_at_their_own_size(optimizer):
    norms = []
    for scale in (None, hs.DynamicLossScale(init=1024.0, interval=1)):
        model, _ = small()
        amp = hs.prepare(model, optimizer(model.parameters(), lr=0.0), dtype="bf16", loss_scale=scale)
        backward(amp)
        amp.step(zero_grad=False)
        backward(amp)
        norms.append(amp.step().grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_16_bit_weights_at_o1_are_told():
    model, _ = small()
    model.bfloat16()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bf16")
    backward(amp)
    with pytest.warns(HalfstepWarning, match=r"2 parameters are bf16 .* prepare at O2"):
        amp.step()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2", dtype="bf16")
    backward(amp)
    amp.step()


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


def low_masters(**given: object) -> hs.MasterWeights:
    model = nn.Linear(4, 2).bfloat16()
    return hs.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), **{"model": model, **given})


def updated(scale: object) -> None:
    scaler = hs.GradScaler()
    scaler.scale(torch.ones(1))
    scaler.update(scale)


PIECES = {
    "scaler with a word": (lambda: hs.GradScaler(loss_scale="dynamic"), "must be a LossScale such as"),
    "headroom limit": (lambda: hs.HeadroomLossScale(limit=3), "limit must be a DynamicLossScale, got 3"),
    "to_float of a number": (lambda: hs.to_float(3, "bf16"), "takes a torch.nn.Module, not int"),
    "refresh by wrong names": (lambda: low_masters().refresh({"nope": torch.ones(2)}), "such as 'weight'"),
    "refresh by a wrong shape": (
        lambda: low_masters().refresh({"weight": torch.ones(3)}),
        r"shape \[3\] for 'weight', expected the weight's \[2, 4\]",
    ),
    "refresh by a number": (lambda: low_masters().refresh({"weight": 3.0}), "got float for 'weight'"),
    "frozen weights of a tensor": (
        lambda: hs.frozen_weights(torch.ones(2)).__enter__(),
        "takes a torch.nn.Module, got Tensor",
    ),
    "growth in words": (lambda: hs.DynamicLossScale(growth="a"), "growth must be a finite number of at"),
    "backoff in words": (
        lambda: hs.DynamicLossScale(backoff="a"),
        "backoff must be above 0 and at most 1",
    ),
    "bounds in words": (lambda: hs.DynamicLossScale(min="a"), "got min='a'"),
    "no loss scale state": (lambda: hs.LossScale.from_state(None), r"state_dict\(\) returns, got None"),
    "scaler set to NaN": (lambda: updated(torch.tensor(math.nan)), "a loss scale cannot be NaN"),
    "scaler set to NaN by hand": (lambda: updated(math.nan), "must be a number in"),
    "scaler set to two": (lambda: updated(torch.ones(2)), "1-element tensor"),
    "fp16 at O0": (
        lambda: hs.prepare(*small(), level="O0", dtype="fp16"),
        "level O0 is fp32 throughout, given fp16: leave dtype out, or choose O1 to O3",
    ),
    "a level by number": (lambda: hs.prepare(*small(), level=2), "did you mean 'O2'"),
    "a scale in two lists": (lambda: hs.prepare(*small(), loss_scale=[[2]]), r"loss_scale=\[2\]: expected"),
    "masters of a number": (lambda: low_masters(model=3), "got model=3, expected a torch.nn.Module"),
    "names of a number": (lambda: low_masters(names=3), "got names=3, expected \\(name, parameter\\) pairs"),
    "refresh by a list": (lambda: low_masters().refresh([1]), "mapping from names to tensors, got list"),
    "a plan of words": (lambda: hs.Plan(["a"]), "a plan is a list of PlanRule"),
    "a pattern of three": (lambda: hs.PlanRule(3, "bf16"), "cannot read plan pattern 3"),
    "a plan of nothing": (lambda: hs.Plan.from_toml(None), "read from TOML text, got NoneType"),
    "a plan for nothing": (lambda: hs.Plan.empty().resolve(None), "torch.nn.Module, got NoneType"),
    "rules of nothing": (lambda: hs.Policy().with_rules(full=None), "full=None: expected a list of ops"),
    "lr in words": (lambda: hs.optim.AdamW(nn.Linear(2, 2).parameters(), lr="1e-3"), "lr='1e-3': must be"),
    "betas": (lambda: hs.optim.AdamW(nn.Linear(2, 2).parameters(), betas=3), "betas=3: must be a pair"),
    "beta": (lambda: hs.optim.AdamW(nn.Linear(2, 2).parameters(), betas="ab"), "betas='ab'"),
    "a scale kind": (lambda: hs.LossScale.from_state({"kind": []}), r"unknown loss scale kind \[\]"),
    "a scale count": (
        lambda: hs.LossScale.from_state({"kind": "DynamicLossScale", "clean": "x"}),
        "clean must be a count, got 'x'",
    ),
    "a scale history": (
        lambda: hs.LossScale.from_state({"kind": "HeadroomLossScale", "history": ["a"]}),
        "history must be a tuple of numbers",
    ),
    "no level": (lambda: hs.prepare(*small(), level=None), "level=None: expected one of O0"),
    "plan text": (lambda: hs.convert(nn.Linear(2, 2), "O2", "bf16", plan="x"), "got str as a plan"),
}


@pytest.mark.parametrize("case", PIECES)
def test_the_pieces_refuse_what_they_cannot_use(case):
    call, message = PIECES[case]
    with pytest.raises(ConfigError, match=message):
        call()


NO_STATES = [None, [1], "state", 3, {"halfstep": 3}, {"halfstep": {"loss_scale": None}}]


@pytest.mark.parametrize("state", NO_STATES)
def test_what_is_no_state_is_refused(state):
    session = hs.prepare(*small(), dtype="fp16")
    masters, scaler = low_masters(), hs.GradScaler()
    for load in (session.load_state_dict, masters.load_state_dict, scaler.load_state_dict):
        with pytest.raises(HalfstepError):
            load(state)


def test_a_refused_refresh_changes_no_master():
    masters = low_masters()
    before = masters.state_dict()
    with pytest.raises(ConfigError):
        masters.refresh({"weight": torch.full((2, 4), 9.0), "bias": torch.ones(3)})
    assert all(torch.equal(value, before[name]) for name, value in masters.state_dict().items())


def test_o0_takes_its_own_dtype_by_name():
    assert hs.prepare(*small(), level="O0", dtype="fp32").policy.compute_dtype == torch.float32


def test_a_plan_on_top_of_a_plan_counts():
    model = Low()
    first = hs.Plan([hs.PlanRule("body", "bf16", reason="small")])
    second = hs.Plan([hs.PlanRule("head", "fp16", reason="smaller")])
    hs.convert(model, first, plan=second)
    assert (model.body.weight.dtype, model.head.weight.dtype) == (torch.bfloat16, torch.float16)


def test_an_unreadable_scaler_state_changes_nothing():
    scaler = hs.GradScaler()
    state = scaler.state_dict()
    with pytest.raises(CheckpointError, match="cannot be read"):
        scaler.load_state_dict({**state, "scale": "x"})
    with pytest.raises(CheckpointError, match=r"cannot be read: .*growth must be"):
        scaler.load_state_dict({**state, "growth_factor": 0.5})
    assert scaler.state_dict() == state
