"""Two processes under DDP: each watches its own share, and the worst rank is reported."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from halfstep.numerics.trace import trace_step
from halfstep.numerics.watch import watch
from halfstep.session import prepare


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    amp = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="fp16")
    wrapped = DDP(model)
    seen = watch(wrapped, amp, every=1, exact=True)

    def step(x):
        with amp.autocast():
            loss = wrapped(x).float().square().mean()
        amp.backward(loss)
        return amp.step()

    for _ in range(2):
        step(torch.full((2, 4), 1.0 + 99.0 * rank))
    worst = seen.worst_over_ranks()
    x = torch.full((2, 4), 1e30 if rank else 1.0)
    bad = trace_step(step, x, session=amp).bad
    assert len(seen.notes) == 2
    torch.save((seen.headrooms(), worst, bad and (bad.phase, bad.module, bad.op)), f"{folder}/rank{rank}")
    seen.close()
    dist.destroy_process_group()


def test_the_worst_rank_is_reported_and_all_ranks_trace_together(tmp_path):
    mp.start_processes(work, args=(str(tmp_path),), nprocs=2, start_method="fork")
    (mine, worst, first), (theirs, other, second) = (
        torch.load(tmp_path / f"rank{rank}", weights_only=False) for rank in range(2)
    )
    assert worst == other
    key = ("activation", "0")
    assert theirs[key] < mine[key]
    assert worst[key] == (theirs[key], 1)
    assert set(worst) == set(mine) | set(theirs)
    assert second == ("forward", "0", "cast")
    assert first == ("backward", "", "all_reduce")
