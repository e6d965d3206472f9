"""Two ranks whose gradients NCCL's place adds up train as one process does with both their batches."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests import ranks
from tests.falsecuda.install import TESTS_DEVICE


def trained(rank: int, world: int, way: str, level: str, dtype: str) -> list[Tensor]:
    """The weights after three steps of this rank's share of four batches of eight."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    if way == "FSDP2":
        fully_shard(net)
    optimizer = hs.optim.AdamW(net.parameters(), lr=1e-2)
    amp = hs.prepare(net, optimizer, level=level, dtype=dtype)
    run = DDP(net) if way == "DDP" else net
    share = slice(rank, None, world)
    for _ in range(3):
        with amp.autocast():
            loss = nn.functional.cross_entropy(run(x[share]), y[share])
        amp.backward(loss)
        assert amp.step(clip_norm=1.0).taken
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters())
    return [t.detach().float().cpu() for t in whole]


@pytest.mark.parametrize(("way", "level", "dtype"), [("DDP", "O2", "bf16"), ("FSDP2", "O1", "fp16")])
def test_ranks_train_as_one_process(monkeypatch: pytest.MonkeyPatch, way: str, level: str, dtype: str):
    monkeypatch.setenv(TESTS_DEVICE, "cuda")
    first, second = ranks.run(trained, 2, 2, way, level, dtype)
    torch.set_default_device("cuda")
    try:
        alone = trained(0, 1, "", level, dtype)
    finally:
        torch.set_default_device(None)
    for a, b, c in zip(first, second, alone, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=0.02, atol=2e-3)


def refused(rank: int) -> str:
    try:
        dist.all_reduce(torch.ones(2, device="cpu"))
    except RuntimeError as error:
        return str(error)
    return "summed"


def test_a_tensor_of_the_host_is_refused_as_nccl_refuses_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TESTS_DEVICE, "cuda")
    assert ranks.run(refused, 2) == ["No backend type associated with device type cpu"] * 2
