"""Two processes under DDP: each watches its own share, and the worst rank is reported."""

import gc

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from halfstep.numerics.replayable import Replayable
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
    worst, headrooms = seen.worst_over_ranks(), seen.headrooms()
    x = torch.full((2, 4), 1e30 if rank else 1.0)
    bad = trace_step(step, x, session=amp).bad
    assert len(seen.notes) == 2
    replay = Replayable(amp, warn=False)
    for value in (1.0, 1e30 if rank else 1.0, 1.0):
        replay.run(step, torch.full((2, 4), value))
    found = [(number, t.bad.phase, t.bad.op, t.bad.cause.kind) for number, t in replay.traces]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    verdict = bad and (bad.phase, bad.module, bad.op)
    told = (headrooms, worst, verdict, found, replay._replays, weights, len(amp.history))
    torch.save(told, f"{folder}/rank{rank}")
    seen.close()
    gc.collect()  # what holds the group goes first: its threads must not meet an interpreter that ends
    dist.destroy_process_group()


def test_the_worst_rank_is_reported_and_all_ranks_trace_together(tmp_path):
    mp.start_processes(work, args=(str(tmp_path),), nprocs=2, start_method="fork")
    (mine, worst, first, *rest), (theirs, other, second, *others) = (
        torch.load(tmp_path / f"rank{rank}", weights_only=False) for rank in range(2)
    )
    assert worst == other
    key = ("activation", "0")
    assert theirs[key] < mine[key]
    assert worst[key] == (theirs[key], 1)
    assert set(worst) == set(mine) | set(theirs)
    assert second == ("forward", "0", "cast")
    assert first == ("backward", "", "all_reduce")
    assert rest[0] == [(2, "backward", "all_reduce", "rank")]
    assert others[0] == [(2, "forward", "cast", "range")]
    assert rest[1] == others[1] == 1
    assert torch.equal(rest[2], others[2])
    assert rest[3] == others[3] == 5
