"""What halfstep does on CUDA alone, where no other test comes by."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfstep as hs
from halfstep.compat import mindspore, torch_amp
from halfstep.distributed.reduce import joined

CUDA = torch.device("cuda")


def test_the_ranks_that_torchrun_started_meet_by_nccl(monkeypatch: pytest.MonkeyPatch):
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("halfstep.distributed.reduce.started_by_torchrun", lambda: 2)
    with joined(CUDA):
        assert dist.get_backend() == "nccl"
        total = torch.ones(2, device=CUDA)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
    assert not dist.is_initialized()


def test_mindspore_programs_may_name_the_gpu():
    with pytest.warns(hs.HalfstepWarning, match="moves nothing here"):
        mindspore.set_device("GPU")
    mindspore.set_device("CPU")


def test_torchs_region_for_cuda_casts_there_and_says_nothing():
    net, x = nn.Linear(3, 2).to(CUDA), torch.ones(1, 3, device=CUDA)
    with warnings.catch_warnings(), torch_amp.autocast("cuda"):
        warnings.simplefilter("error")
        assert net(x).dtype == torch.float16
    scaler = torch_amp.GradScaler()
    assert scaler.scale(x.sum()).is_cuda
