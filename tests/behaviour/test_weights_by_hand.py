"""Weights that users set by hand while fp32 masters of a torch optimizer stand behind them."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import halfstep as hs


def build(shift=0.0, kind="torch"):
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.add_(shift)
    if kind == "torch":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        optimizer = hs.optim.SGD(model.parameters(), lr=1e-3, master=kind)
    return model, optimizer, hs.prepare(model, optimizer, level="O2", dtype="bf16")


def train(model, amp, steps=1):
    for _ in range(steps):
        with amp.autocast():
            loss = model(torch.ones(2, 64)).square().mean()
        amp.backward(loss)
        amp.step()


def all_are(weight, value):
    return torch.equal(weight.detach().float(), torch.full_like(weight, value, dtype=torch.float32))


SET = {
    "in place": lambda weight: nn.init.constant_(weight, 0.5),
    ".data": lambda weight: weight.data.fill_(0.5),
}
SEEN = {
    "evaluating": lambda model, optimizer, amp: evaluated(model, amp),
    "revert": lambda model, optimizer, amp: amp.revert() or model.weight,
    "state_dict": lambda model, optimizer, amp: optimizer.state_dict()["masters"]["weight"],
    "MasterWeights": lambda model, optimizer, amp: amp.masters[0].state_dict()["weight"],
    "fp32_state_dict": lambda model, optimizer, amp: hs.optim.fp32_state_dict(model, optimizer)["weight"],
    "deepcopy": lambda model, optimizer, amp: copy.deepcopy(model).weight,
}


def evaluated(model, amp):
    with amp.evaluating():
        return model.weight.detach().clone()


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("way", SET)
def test_what_was_set_is_what_is_evaluated_saved_copied_and_given_back(way, seen):
    model, optimizer, amp = build()
    train(model, amp, 2)
    SET[way](model.weight)
    assert all_are(SEEN[seen](model, optimizer, amp), 0.5)


def test_a_session_saves_what_was_set(tmp_path):
    model, _, amp = build()
    train(model, amp)
    model.weight.data.fill_(0.5)
    amp.save(tmp_path / "saved")
    other, _, beside = build(1.0)
    beside.load(tmp_path / "saved")
    assert all_are(other.weight, 0.5)


def test_a_row_set_through_data_late_in_training_stays():
    model, optimizer, amp = build()
    train(model, amp, 25)
    optimizer.param_groups[0]["lr"] = 0.0
    model.weight.data[1] = 0.5
    train(model, amp)
    assert all_are(model.weight[1], 0.5)


GROUPS = {
    "clamp": lambda p: p.clamp_(-0.01, 0.01),
    "decay": lambda p: p.mul_(0.5),
    "through .data": lambda p: p.data.mul_(0.5),
    "of .data": lambda p: setattr(p, "data", p.data * 0.5),
    "one row": lambda p: p.view(-1)[:64].fill_(0.25),
}


@pytest.mark.parametrize("way", GROUPS)
def test_what_is_set_through_the_groups_is_what_runs_next(way):
    model, optimizer, amp = build()
    train(model, amp)
    (master, *_) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        GROUPS[way](master)
    wanted = master.detach().clone()
    with amp.autocast():
        found = model(torch.eye(64)) - model.bias
    assert torch.equal(model.weight.detach(), wanted.bfloat16())
    assert torch.allclose(found.detach().T, wanted, atol=0.02)
    assert torch.equal(evaluated(model, amp), wanted)
    assert torch.equal(model.state_dict()["weight"], wanted.bfloat16())


class Lookahead:
    """As it is usually written: a second set of weights, through the groups of another's optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.slow = [p.data.clone() for p in optimizer.param_groups[0]["params"]]

    def update(self):
        for slow, fast in zip(self.slow, self.optimizer.param_groups[0]["params"]):
            slow.add_(0.5 * (fast.data - slow))
            fast.data.copy_(slow)


def test_lookahead_trains_what_it_trains_without_masters():
    model, optimizer, amp = build()
    plain = nn.Linear(64, 64)
    plain.load_state_dict(hs.optim.fp32_state_dict(model, optimizer))
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-3)
    ahead, beside = Lookahead(optimizer), Lookahead(theirs)
    for _ in range(10):
        train(model, amp)
        ahead.update()
        theirs.zero_grad()
        low = copy.deepcopy(plain).bfloat16()
        with amp.autocast():
            loss = low(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        for p, q in zip(plain.parameters(), low.parameters()):
            p.grad = q.grad.float()
        theirs.step()
        beside.update()
    found = hs.optim.fp32_state_dict(model, optimizer)["weight"]
    assert torch.allclose(found, plain.weight, atol=1e-6)


@pytest.mark.parametrize(("look", "value"), [("pairs", 0.25), ("refresh", 0.5)])
def test_of_a_weight_set_on_both_sides_the_optimizers_counts_unless_refreshed(look, value):
    model, optimizer, amp = build()
    (own, *_) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        model.weight.fill_(0.5)
        own.fill_(0.25)
    getattr(amp.masters[0], look)()
    (weight, master), *_ = amp.masters[0].pairs()
    assert all_are(master, value)
    assert all_are(weight, value)
    assert weight is model.weight


def test_both_sides_may_be_set_to_the_same():
    model, optimizer, amp = build()
    with torch.no_grad():
        for weight, master in zip(model.parameters(), optimizer.param_groups[0]["params"]):
            weight.fill_(0.3)
            master.copy_(weight)
    (_, master), *_ = amp.masters[0].pairs()
    assert torch.equal(master, model.weight.float())


def test_a_loaded_checkpoint_can_be_changed_through_the_groups():
    model, optimizer, amp = build()
    saved = copy.deepcopy(model.state_dict())
    train(model, amp)
    model.load_state_dict(saved)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(0.5)
    assert torch.allclose(evaluated(model, amp), saved["weight"].float() * 0.5, rtol=2**-8)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["torch", "exact", "fp32"])
def test_a_partial_load_by_torchs_checkpoints_keeps_the_weights_that_came(kind, tmp_path):
    model, _, amp = build(kind=kind)
    train(model, amp)
    saved = {"model": {name: value.float() for name, value in model.state_dict().items()}}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    other, theirs, beside = build(1.0, kind)
    with beside.masters[0].checkpointing() if kind == "torch" else torch.no_grad():
        weights, states = get_state_dict(other, theirs)
        whole = {"model": weights, "optimizer": states}
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(whole, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
        set_state_dict(other, theirs, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
    assert torch.equal(other.weight, model.weight)
    found = hs.optim.fp32_state_dict(other, theirs)["weight"]
    assert torch.allclose(found, saved["model"]["weight"], rtol=2**-8)
