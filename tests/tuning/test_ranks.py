"""Over ranks one choice is made: rank 0's times, the largest distance of any rank, a failure of any rank."""

import gc
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

import halfstep as hs
from halfstep.tuning.choices import LevelChoice, Trial
from halfstep.tuning.engine import together

O1 = LevelChoice("O1", "bf16")


def test_ranks_trials_become_one() -> None:
    mine, theirs = Trial(O1, (0.1,), 1e-3, 0.2), Trial(O1, (0.9,), 2e-3, 0.1)
    assert together([mine, theirs]) == Trial(O1, (0.1,), 2e-3, 0.2)
    assert together([mine, Trial(O1, failed="no memory")]).failed == "no memory"
    assert together([mine]) == mine


def test_a_distance_that_is_no_number_is_kept() -> None:
    errors = [Trial(O1, (0.1,), 0.0, e) for e in (math.nan, 0.1)]
    assert together(errors).too_far is not None
    assert together(errors[::-1]).too_far is not None


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 1, 8, 8), torch.arange(4) % 3

    def step(amp: hs.Session, x: Tensor, y: Tensor) -> Tensor:
        with amp.autocast():
            loss = F.cross_entropy(model(x * (rank + 1)), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    found = hs.tune(model, optimizer, step, x, y, seconds=2.0)
    torch.save((found.to_toml(), found.trials), f"{folder}/{rank}.pt")
    gc.collect()  # what holds the group goes first: its threads must not meet an interpreter that ends
    dist.destroy_process_group()


@pytest.mark.exhaustive
def test_two_ranks_choose_alike(tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert first == second
    assert len(first[1]) >= 3
