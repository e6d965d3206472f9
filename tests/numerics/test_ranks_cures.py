"""Two processes under DDP name each other's bad ops, and try other loss scales together."""

import gc
import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from halfstep.numerics.replayable import Replayable
from halfstep.numerics.trace import trace_step
from halfstep.scaling import StaticLossScale
from halfstep.session import prepare

pytestmark = pytest.mark.long
X = torch.linspace(0.5, 2.0, 8).reshape(2, 4)


class Squares(nn.Module):
    """Squares its input in 16 bits; `between` runs on what comes out."""

    def __init__(self, between=lambda y: y, norm=nn.BatchNorm1d):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), norm(4), nn.Linear(4, 1)
        self.between = between

    def forward(self, x):
        h = self.first(x)
        return self.last(self.norm(self.between(h * h)))


def make(between=lambda y: y, after=lambda loss: None, norm=nn.BatchNorm1d, forward_last=False, **ddp):
    torch.manual_seed(0)
    model = Squares(between, norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = prepare(model, optimizer, dtype="fp16", loss_scale=StaticLossScale(8.0))
    wrapped = DDP(model, **ddp)

    def step(x, factor=1.0):
        with amp.autocast():
            loss = wrapped(x).float().square().mean() * factor
        amp.backward(loss)
        after(loss)
        amp.step()
        if forward_last:
            wrapped(X)

    return model, amp, step


def told(bad):
    return bad and (bad.op, bad.cause.kind, {c.kind: c.status for c in bad.cures}, bad.cause.words)


def weights(model):
    return torch.cat([v.detach().double().flatten() for v in model.state_dict().values()])


def traced(rank, *how, factor=1.0, big=1e3, **ddp):
    """The verdict on a step that is bad on rank 1, and the weights that the run reaches afterwards."""
    model, amp, step = make(*how, **ddp)
    x = X * big if rank else X
    step(X)
    bad = trace_step(step, x, factor if rank else 1.0, session=amp).bad
    for _ in range(3):
        step(X * (1.0 + rank))
    return told(bad), weights(model)


def untraced(rank, *how, **ddp):
    model, _, step = make(*how, **ddp)
    step(X)
    for _ in range(3):
        step(X * (1.0 + rank))
    return weights(model)


def gathers(loss):
    dist.all_gather([torch.empty(()) for _ in range(2)], loss.detach())


def several_causes(rank):
    """A run whose second step is bad on one rank, and whose fourth on the other."""
    model, amp, step = make(norm=nn.LayerNorm)  # statistics over batches would stay spoiled
    replay = Replayable(amp, warn=False)
    for number in range(5):
        big = 1e3 if number == (3 if rank else 1) else 1.0
        replay.run(step, X * big)
    return [told(t.bad) for _, t in replay.traces], weights(model)


def receives(rank):
    """Both ranks' own values are finite and their sum is not."""
    model = nn.Linear(4, 4)

    def step(x):
        top = model(x).detach().abs().max() * 0 + 2e38
        dist.all_reduce(top)
        (model(x).mean() * top).backward()

    return told(trace_step(step, X, model=model).bad)


def on_its_own(rank):
    """A step without collectives, traced by one rank only."""
    if rank:
        return None
    model = Squares()

    def step(x):
        with torch.autocast("cpu", torch.float16):
            model(x).float().square().mean().backward()

    return told(trace_step(step, X * 1e3, model=model).bad)


def work(rank, folder):
    torch.set_num_threads(1)
    wait = timedelta(seconds=20)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=wait)
    found = {
        "forward": traced(rank),
        "untraced": untraced(rank),
        "scale": traced(rank, big=1.0, factor=1e6),
        "gathers": traced(rank, lambda y: y, gathers),
        "gathers, scale": traced(rank, lambda y: y, gathers, big=1.0, factor=1e6),
        "unused": traced(rank, find_unused_parameters=True),
        "static": traced(rank, static_graph=True),
        "forward last": traced(rank, norm=nn.LayerNorm, forward_last=True),
        "forward last, untraced": untraced(rank, norm=nn.LayerNorm, forward_last=True),
        "received": receives(rank),
        "own": on_its_own(rank),
        "several": several_causes(rank),
    }
    torch.save(found, f"{folder}/rank{rank}")
    gc.collect()  # what holds the group goes first: its threads must not meet an interpreter that ends
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(once, tmp_path_factory):
    def both():
        folder = tmp_path_factory.mktemp("ranks")
        mp.start_processes(work, args=(str(folder),), nprocs=2, start_method="fork")
        return [torch.load(os.path.join(folder, f"rank{rank}"), weights_only=False) for rank in range(2)]

    return once("ranks-cures", both)


UNTRIED = dict.fromkeys(("full", "scale", "bf16"), "untried")
TRIED = {
    "forward": ("mul", UNTRIED),
    "scale": ("cast", {"loss": "works", "loss_scale": "works", "bf16": "untried"}),
    "gathers": ("mul", UNTRIED),
    "gathers, scale": ("cast", {"loss": "works", "loss_scale": "works", "bf16": "untried"}),
    "unused": ("mul", UNTRIED),
    "static": ("mul", UNTRIED),
}


@pytest.mark.parametrize("case", TRIED)
def test_every_rank_tells_which_cures_all_have_tried(found, case):
    op, cures = TRIED[case]
    (elsewhere, kind, theirs, cause), (here, own_kind, own, _) = (one[case][0] for one in found)
    assert (here, own_kind, own) == (op, "range", cures)
    assert (elsewhere, kind, theirs) == ("all_reduce", "rank", cures)
    assert re.search(f": {op} (in the root module|outside any module)", cause)
    assert cause.startswith("rank 1 found the first bad op")


@pytest.mark.parametrize("case", TRIED)
def test_the_run_goes_on_as_if_nothing_had_been_traced(found, case):
    for one in found:
        assert torch.equal(one[case][1], one["untraced"])


def test_a_forward_of_ddp_that_comes_last_is_left_as_it_is(found):
    for one in found:
        told, after = one["forward last"]
        assert told[2] == UNTRIED
        assert torch.equal(after, one["forward last, untraced"])


def test_what_other_ranks_sent_is_not_taken_for_this_rank_s_op(found):
    assert [one["received"][1] for one in found] == ["unknown", "unknown"]
    assert "the reduction over ranks" in found[0]["received"][3]


def test_a_step_without_collectives_is_traced_by_one_rank_alone(found):
    _, kind, cures, _ = found[0]["own"]
    assert kind == "range"
    assert cures["full"] == "works"


def test_a_run_names_what_went_wrong_on_either_rank(found):
    mine, theirs = found[0]["several"][0], found[1]["several"][0]
    assert [kind for _, kind, _, _ in mine] == ["range", "rank"]
    assert [kind for _, kind, _, _ in theirs] == ["rank", "range"]
    assert all(told[2]["full"] == "untried" for told in (*mine, *theirs))
    assert torch.equal(found[0]["several"][1], found[1]["several"][1])
