"""Reductions over ranks with two real processes on gloo; one spawn runs every check."""

import gc
import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.distributed import (
    all_ranks,
    compress_hook,
    joined,
    ordered_hook,
    shard_groups,
    sums_over,
    watchdog,
    world_size,
)
from halfstep.distributed.hooks import OrderedReduceScatter
from halfstep.errors import ConfigError, RankError
from halfstep.gradients.stats import measure, measure_shards
from halfstep.scaling.grad_scaler import GradScaler


def check_flags(rank):
    """OR, in the flag's own dtype: 1 or 2 ranks with an inf give the same answer (never a count)."""
    found = {}
    for dtype in (torch.bool, torch.float32, torch.int32):
        flags = [
            all_ranks(torch.tensor(on, dtype=dtype)) for on in ([0, 0][rank], [0, 1][rank], [1, 1][rank])
        ]
        assert {f.dtype for f in flags} == {dtype}
        found[str(dtype)] = [float(f) for f in flags]
    return found


def check_norms(rank):
    one = torch.tensor

    def norm(value):
        squares, amax = sums_over([None], one(value, dtype=torch.float64).square(), one(value).abs())
        return float(squares.sqrt()), float(amax)

    return {
        "norm": norm([3.0, 4.0][rank]),
        "huge": norm([3e30, 4e30][rank]),
        "zero": norm(0.0),
        "nan": math.isnan(norm([math.nan, 1.0][rank])[1]),
        "inf": norm([math.inf, 1.0][rank]),
    }


def check_sharded(rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    whole, copied = torch.arange(8.0), torch.tensor([20.0])
    grads = [
        distribute_tensor(whole, mesh, [Shard(0)]),
        distribute_tensor(copied, mesh, [Replicate()]),
        copied,
    ]
    assert [len(shard_groups(g)) for g in grads] == [1, 0, 0]
    over, alone = measure_shards(grads, 0.5), measure([whole, copied, copied], 0.5)
    assert torch.allclose(over.norm, alone.norm)
    assert over.amax == alone.amax
    return bool(all_ranks(~measure([torch.tensor([math.inf if rank else 1.0])]).finite))


def check_hook(rank, dtype):
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    hook = compress_hook(dtype)
    ddp.register_comm_hook(None, hook)
    ddp(torch.full((1, 64), [1.0, 3.0][rank])).sum().backward()
    ordinary = ddp.module.weight.grad[0, 0].item()
    ddp.zero_grad()
    top = torch.finfo(dtype).max * 0.75  # the sum over ranks would overflow without the division
    (ddp(torch.ones(1, 64)) * top).sum().backward()
    large = ddp.module.weight.grad[0, 0].item() / top
    ddp.zero_grad()
    (ddp(torch.ones(1, 64)) * (3e38 if rank else 1.0) * (10.0 if rank else 1.0)).sum().backward()
    return {
        "mean": ordinary,
        "large": large,
        "dtype": str(ddp.module.weight.grad.dtype),
        "inf seen": not bool(measure([ddp.module.weight.grad]).finite),
        "share": hook.traffic.share,
        "bytes": hook.traffic.sent_bytes,
    }


def check_scaler(rank):
    """An inf on one rank skips the step on both; `across_ranks=False` leaves each to itself."""
    taken = []
    for across in (True, False):
        net = nn.Linear(2, 2)
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), GradScaler(across_ranks=across)
        for bad in (False, True):
            scaler.scale(net(torch.ones(1, 2)).sum()).backward()
            if bad and rank == 1:
                net.bias.grad[0] = math.inf
            taken.append(bool(scaler.step(optimizer)))
            scaler.update()
        taken.append(scaler.get_scale())
    net.zero_grad()  # nothing to check on this rank: it must not leave the other one waiting
    scaler = GradScaler()
    scaler.scale(torch.ones(()))
    if rank == 1:
        net.bias.grad = torch.full((2,), math.inf)
    taken.append(bool(scaler.step(optimizer)))
    return taken


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {"world": world_size(), "flags": check_flags(rank), "norms": check_norms(rank)}
    found["sharded"] = check_sharded(rank)
    found["scaler"] = check_scaler(rank)
    for dtype in (torch.bfloat16, torch.float16):
        found[dtype] = check_hook(rank, dtype)
    torch.save(found, f"{folder}/{rank}.pt")
    gc.collect()  # what holds the group goes first: its threads must not meet an interpreter that ends
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(once, tmp_path_factory):
    def both():
        folder = tmp_path_factory.mktemp("ranks")
        mp.spawn(worker, (str(folder),), nprocs=2)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]

    return once("distributed", both)


def test_flags_are_an_or(ranks):
    for found in ranks:
        assert found["world"] == 2
        assert list(found["flags"].values()) == [[0.0, 1.0, 1.0]] * 3


def test_norms_over_shards(ranks):
    for found in ranks:
        norms = found["norms"]
        assert norms["norm"] == pytest.approx((5.0, 4.0))
        assert norms["huge"] == pytest.approx((5e30, 4e30))
        assert (norms["zero"], norms["inf"]) == ((0.0, 0.0), (math.inf, math.inf))
        assert norms["nan"]


def test_sharded_gradients_and_a_bad_rank(ranks):
    assert [found["sharded"] for found in ranks] == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hook_averages_in_half_the_bytes(ranks, dtype):
    for found in ranks:
        hook = found[dtype]
        assert hook["mean"] == 2.0
        assert hook["large"] == pytest.approx(1.0, rel=0.01)
        assert hook["dtype"] == "torch.float32"
        assert hook["inf seen"]
        assert hook["share"] == 0.5
        assert hook["bytes"] == 3 * (64 * 64 + 64) * 2


def test_all_ranks_take_or_skip_the_same_step(ranks):
    shared = [found["scaler"][:3] for found in ranks]
    assert shared == [[True, False, 2.0**15]] * 2
    assert [found["scaler"][3:6] for found in ranks] == [[True, True, 2.0**16], [True, False, 2.0**15]]
    assert [found["scaler"][6] for found in ranks] == [False, False]


def test_without_a_process_group_nothing_happens():
    flag = torch.tensor(True)
    assert all_ranks(flag) is flag
    assert world_size() == 1


def test_hook_wants_16_bits():
    with pytest.raises(ConfigError, match="fp32"):
        compress_hook("fp32")


class CountingStore(dist.Store):
    """A store that counts what it is asked."""

    def __init__(self):
        super().__init__()
        self._kept, self.calls = dist.HashStore(), Counter()

    def _ask(self, what, *args):
        self.calls[what] += 1
        return getattr(self._kept, what)(*args)

    def set(self, key, value):
        return self._ask("set", key, value)

    def get(self, key):
        return self._ask("get", key)

    def add(self, key, amount):
        return self._ask("add", key, amount)

    def check(self, keys):
        return self._ask("check", keys)


@pytest.fixture
def many_ranks():
    """This process is rank 0 of 300 that do not exist; gives their store."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    store = CountingStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=300)
    store.calls.clear()
    yield store
    dist.destroy_process_group()


def test_a_rank_asks_the_store_how_many_spoke_and_not_each_of_them_again_and_again(many_ranks):
    """Each of R ranks used to ask for R keys, twenty times a second."""
    with pytest.raises(RankError, match="did not answer: it was killed"), watchdog(lambda: 3):
        raise RuntimeError("gloo: connection closed by peer")
    assert many_ranks.calls.total() < 3 * 300


@pytest.mark.usefixtures("many_ranks")
def test_shards_are_measured_all_at_once():
    """A loop over DTensors took five ops for each."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (300,))
    grads = [DTensor.from_local(torch.full((2, 3), 1.0), mesh, [Shard(0)]) for _ in range(100)]
    ops = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        measure_shards(grads)
    assert ops.total() < 150, ops.most_common(5)


@pytest.mark.parametrize(
    ("device", "wanted"), [("cuda", [1, "nccl"]), ("cuda:0", ["nccl"]), ("cpu", ["gloo"])]
)
def test_torchrun_s_ranks_choose_their_device_before_they_meet(monkeypatch, device, wanted):
    """All ranks used to compute on the first one."""
    done = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    monkeypatch.setattr(dist, "init_process_group", done.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with joined(torch.device(device)):
        assert done == wanted


@pytest.mark.usefixtures("many_ranks")
def test_an_ordered_reduction_gives_something_to_wait_for_where_it_is_asked_to():
    out, parts = torch.empty(2), torch.ones(600)
    reduce = OrderedReduceScatter()
    assert reduce(out, parts, dist.group.WORLD, None) is None
    assert reduce(out, parts, dist.group.WORLD, None, async_op=True).wait() is out


def test_what_ddp_is_given_to_wait_for_knows_the_device(monkeypatch):
    """Without `devices=` a future does not wait for what a device still computes."""
    given = []

    class Future:
        def __init__(self, *, devices):
            given.append(devices)

        def set_result(self, value):
            pass

    class Bucket:
        def __init__(self, device):
            self.device = device

        def buffer(self):
            return torch.ones(4, device=self.device)

    monkeypatch.setattr(torch.futures, "Future", Future)
    for device in ("cpu", "meta"):
        ordered_hook()(None, Bucket(device))
    assert given == [[], [torch.device("meta")]]
