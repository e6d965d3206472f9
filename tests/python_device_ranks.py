"""One rank of a run by two processes on the Python device; `compat/test_device_module.py` starts it twice."""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.distributed import compress_hook
from tests.python_device import NAME


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hs.prepare(model, optimizer, level="O1", dtype="fp16")
    ddp = DistributedDataParallel(model)
    hook = compress_hook("bf16")
    ddp.register_comm_hook(None, hook)
    torch.manual_seed(rank)
    taken = []
    for step in range(4):
        with session.autocast():
            loss = ddp(torch.randn(16, 8, device=NAME)).square().mean()
        session.backward(loss)
        if step == 1 and rank == 1:
            next(model.parameters()).grad[0, 0] = float("inf")
        taken.append(bool(session.step().taken))
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    line = f"rank {rank} {taken} {weights.sum().item():.6f} {hook.traffic.share:.2f}\n"
    os.write(1, line.encode())  # in one piece: the ranks share a pipe
    gc.collect()  # what holds the group goes first: its threads must not meet an interpreter that ends
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
