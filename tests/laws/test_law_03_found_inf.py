"""Law 3: found-inf is an OR over tensors, devices, optimizers of the same loss and ranks. Never a sum."""

import gc
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from halfstep.distributed import all_ranks
from halfstep.gradients.stats import measure
from halfstep.gradients.unscale import any_of, unscale_
from halfstep.scaling.grad_scaler import GradScaler
from halfstep.trees import all_finite

bads = st.lists(st.sampled_from([0.0, 1.0, math.inf, -math.inf, math.nan]), min_size=1, max_size=8)


@example([math.inf, 0.0], torch.float16)
@example([0.0, math.nan], torch.float16)
@given(bads, st.sampled_from([torch.float32, torch.float16]))
def test_or_over_tensors(values, dtype):
    """inf and -inf, or inf twice, neither cancel nor count."""
    grads = [torch.tensor([1.0, v]).to(dtype if i % 2 else torch.float32) for i, v in enumerate(values)]
    finite = all(map(math.isfinite, values))
    assert bool(all_finite(grads)) is finite
    assert bool(measure(grads).finite) is finite
    found = unscale_(grads, torch.tensor(0.5))
    assert found.dtype == torch.bool
    assert bool(found) is not finite


@given(st.lists(st.booleans(), max_size=4))
def test_or_over_flags(flags):
    """256 flags of one byte must not wrap to zero, and the answer is a flag."""
    found = any_of([torch.tensor(f) for f in flags * 256])
    assert found.dtype == torch.bool
    assert bool(found) is any(flags)


def test_flags_that_cancel_as_numbers():
    assert bool(any_of([torch.tensor(1.0), torch.tensor(-1.0)]))


@pytest.mark.parametrize("where", range(3))
def test_or_over_the_optimizers_of_a_loss(where):
    nets = [nn.Linear(2, 2) for _ in range(3)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    scaler = GradScaler(init_scale=64.0)
    scaler.scale(sum(net(torch.ones(1, 2)).sum() for net in nets)).backward()
    nets[where].bias.grad[0] = math.inf
    taken = [bool(scaler.step(optimizer)) for optimizer in optimizers]
    scaler.update()
    assert taken == [i != where for i in range(3)]
    assert scaler.get_scale() == 32.0  # backed off once, although two of three were finite


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    answers = [float(all_ranks(torch.tensor(on))) for on in ([0.0, 0.0][rank], [0.0, 1.0][rank], 1.0)]
    assert answers == [0.0, 1.0, 1.0]
    net = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), GradScaler(init_scale=64.0)
    for step in range(3):
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        if step == 1 and rank == 1:
            net.bias.grad[0] = math.nan
        assert bool(scaler.step(optimizer)) is (step != 1)
        scaler.update()
        net.zero_grad()
    assert scaler.get_scale() == 32.0
    (Path(folder) / f"rank{rank}").write_text(str(scaler.get_scale()))
    gc.collect()  # what holds the group goes first: its threads must not meet an interpreter that ends
    dist.destroy_process_group()


def test_or_over_ranks(tmp_path):
    mp.spawn(worker, (str(tmp_path),), nprocs=2)  # raises what a worker raised
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["32.0", "32.0"]
