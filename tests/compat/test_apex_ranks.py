"""`apex.parallel` over two real processes on gloo, and several losses' scales; one spawn runs every check."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import halfstep as hs
from halfstep.compat.apex import amp, parallel


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 400), nn.Tanh(), nn.Linear(400, 1))


def batch(rank):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


def mean_gradients():
    """What both ranks' batches give on rank 0's weights, averaged."""
    model = net(0)
    (model(batch(0)).square().mean() / 2 + model(batch(1)).square().mean() / 2).backward()
    return [p.grad for p in model.parameters()]


def check_reducer(rank):
    """Weights become rank 0's; gradients are averaged by reduce() and not before."""
    model = net(rank)
    reducer = parallel.Reducer(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), net(0).parameters()))
    model(batch(rank)).square().mean().backward()
    alone = [p.grad.clone() for p in model.parameters()]
    reducer.reduce()
    wanted = mean_gradients()
    assert not any(torch.equal(a, w) for a, w in zip(alone, wanted))
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
    nest = {"x": torch.full((2,), float(rank))}, [torch.full((1,), 4.0 * rank)]
    parallel.Reducer([*nest[0].values(), nest[1]]).reduce()
    return nest[0]["x"].tolist(), nest[1][0].tolist()


def check_ddp(rank, delayed):
    """torch's DDP under Apex's name: averaged gradients, in one bucket where delay_allreduce asks for it."""
    model = parallel.DistributedDataParallel(net(rank), message_size=1, delay_allreduce=delayed)
    sent = []

    def count(group, bucket):
        sent.append(bucket.index())
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, count)
    for _ in range(3):  # torch forms its buckets anew after the first pass
        sent.clear()
        model.zero_grad()
        model(batch(rank)).square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], mean_gradients())
    return len(sent)


class Slope(nn.Module):
    """Its weight's gradient is what it is called with."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, gradient):
        return (self.weight * gradient).float().sum()


def check_sums(rank):
    """40000 and 30000 in fp16 have a mean of 35000, which a sum in fp16 does not reach."""
    found = []
    for options in (
        {},
        {"allreduce_always_fp32": True},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 0.5},
        {"gradient_average": False, "gradient_predivide_factor": 4.0},
    ):
        model = parallel.DistributedDataParallel(Slope(torch.float16), **options)
        model(40000.0 - 10000.0 * rank).backward()
        found.append(model.module.weight.grad.item())
    return found


def check_groups(rank):
    """Neighbouring ranks by group_size; 0 is all of them."""
    sizes = [
        None if group is None else dist.get_world_size(group)
        for group in map(parallel.create_syncbn_process_group, (0, 1, 2))
    ]
    with pytest.raises(ValueError, match="group_size"):
        parallel.create_syncbn_process_group(3)
    return sizes


def check_masters(rank):
    """Their tests/distributed/amp_master_params: masters equal over ranks, fp16 weights their rounding."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    wrapped = parallel.DistributedDataParallel(model)
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(wrapped(batch(rank)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    masters = [m.detach().clone() for m in amp.master_params(optimizer)]
    for p, m in zip(model.parameters(), masters):
        assert (p.dtype, m.dtype) == (torch.float16, torch.float32)
        assert torch.equal(p, m.half())
    total = float(sum(m.double().sum() for m in masters))
    amp.shutdown()
    return total


def check_losses(rank):
    """The second of two losses overflows on rank 1: both ranks skip, and its scale alone halves."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    amp_ = hs.prepare(
        weight, optimizer, level="O2", dtype="fp16", loss_scale=["dynamic", hs.DynamicLossScale(64.0)]
    )
    taken = []
    for bad in (True, False):
        amp_.backward(0.5 * weight.weight.float().sum(), loss_id=0)
        second = float("inf") if bad and rank == 1 else 1.0
        amp_.backward(second * weight.weight.float().sum(), loss_id=1)
        taken.append(bool(amp_.step()))
    return taken, [scale.read() for scale in amp_.loss_scales]


def worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found = {
        "reducer": check_reducer(rank),
        "buckets": [check_ddp(rank, delayed) for delayed in (False, True)],
        "sums": check_sums(rank),
        "groups": check_groups(rank),
        "masters": check_masters(rank),
        "losses": check_losses(rank),
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(once, tmp_path_factory):
    def both():
        folder = tmp_path_factory.mktemp("ranks")
        mp.spawn(worker, (str(folder),), nprocs=2)
        return [torch.load(folder / f"{rank}.pt") for rank in range(2)]

    return once("apex-ranks", both)


def test_reducer_averages_when_asked(ranks):
    assert [found["reducer"] for found in ranks] == [([0.5, 0.5], [2.0])] * 2


def test_sums_are_made_as_asked(ranks):
    own, fp32, halves, doubled, quarters = ranks[0]["sums"]
    assert (own, fp32, halves, doubled, quarters) == tuple(ranks[1]["sums"])
    assert own == fp32 == halves == 35008.0  # fp16's neighbour of 35000
    assert doubled == float("inf")
    assert quarters == 17504.0


def test_delay_allreduce_sends_one_bucket(ranks):
    for found in ranks:
        by_size, delayed = found["buckets"]
        assert by_size > 1
        assert delayed == 1


def test_syncbn_groups(ranks):
    assert [found["groups"] for found in ranks] == [[None, 1, 2]] * 2


def test_amp_master_params(ranks):
    assert ranks[0]["masters"] == ranks[1]["masters"]


def test_an_overflow_of_one_loss_on_one_rank_skips_both_and_halves_its_scale(ranks):
    assert [found["losses"] for found in ranks] == [([False, True], [2.0**16, 32.0])] * 2
