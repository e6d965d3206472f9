"""Two processes whose machines measure differently compute by the kernels of rank 0."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import halfstep as hs
from halfstep.casting import kernel_choice
from halfstep.casting.kernel_choice import KernelTable, install_measured


def measures(rank: int) -> KernelTable:
    """Rank 0's machine is fast by rounding, rank 1's by torch's own kernels."""
    times = {"native": 9.0, "rounded": 1.0} if rank == 0 else {"native": 1.0, "rounded": 9.0}
    return KernelTable((), lambda cls, direction: times, name="measured")


def trained(rank: int) -> tuple[list[torch.Tensor], str]:
    """Weights after two steps, and the digest of the choices."""
    install_measured(measures(rank))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Flatten(), torch.nn.Linear(576, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O1", dtype="bf16", kernels="measured")
    forward = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    for _ in range(2):
        with amp.autocast():
            loss = forward(torch.randn(16, 3, 8, 8)).float().square().mean()
        amp.backward(loss)
        amp.step()
    return [p.detach() for p in model.parameters()], amp.kernels.digest


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(trained(rank), f"{folder}/{rank}.pt")
    gc.collect()  # what holds the group goes first: its threads must not meet an interpreter that ends
    dist.destroy_process_group()


@pytest.mark.exhaustive
def test_rank_0_measures_for_all(tmp_path: Path, monkeypatch) -> None:
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    (first, choices), (second, same) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert choices == same
    assert all(map(torch.equal, first, second))
    monkeypatch.setattr(kernel_choice, "_tables", dict(kernel_choice._tables))
    alone, _ = trained(0)
    assert all(map(torch.equal, first, alone))
