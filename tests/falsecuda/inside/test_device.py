"""What the false CUDA device keeps of a GPU's rules: the faults that it exists for are planted and seen."""

import gc

import pytest
import torch
from torch import nn

from tests import falsecuda

CUDA = torch.device("cuda")
pytestmark = pytest.mark.usefixtures("_waiting_arrival")


@pytest.fixture
def _waiting_arrival():
    with falsecuda.arrival("when waited for"):
        yield


def test_tensors_of_two_devices_do_not_mix():
    there, here = torch.ones(3, device=CUDA), torch.ones(3)
    for mixed in (lambda: there + here, lambda: torch.cat([there, here]), lambda: nn.Linear(3, 2)(there)):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert (there + torch.tensor(2.0)).tolist() == [3.0] * 3  # a number of the host is taken along
    with pytest.raises(TypeError, match="cuda:0 device type tensor to numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.randn(3, device=CUDA, generator=torch.Generator())


def test_a_copy_read_too_early_is_garbage():
    t = torch.arange(4.0, device=CUDA)
    copy, event = t.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()
    assert copy.is_pinned()
    assert not torch.equal(copy, torch.arange(4.0))
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert torch.equal(copy, torch.arange(4.0))


def test_an_event_brings_what_is_before_it_and_no_more():
    t = torch.ones(2, device=CUDA)
    first, event = t.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()
    second = (t + 1).to("cpu", non_blocking=True)
    event.synchronize()
    assert first.tolist() == [1.0, 1.0]
    assert second.tolist() != [2.0, 2.0]
    torch.cuda.synchronize()
    assert second.tolist() == [2.0, 2.0]


def test_late_copies_arrive_some_ops_later():
    t = torch.ones(1, device=CUDA)
    with falsecuda.arrival("late", lag=3):
        copy, event = t.to("cpu", non_blocking=True), torch.cuda.Event()
        event.record()
        seen = []
        for _ in range(4):
            seen.append((event.query(), copy.item() == 1))
            t = t + 0
    assert seen == [(False, False)] * 3 + [(True, True)]


def test_at_once_nothing_is_late():
    with falsecuda.arrival("at once"):
        copy = torch.ones(2, device=CUDA).to("cpu", non_blocking=True)
        assert torch.cuda.current_stream().query()
        assert copy.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("speed", ["late", "when waited for"])
def test_pinned_memory_written_while_its_copy_is_under_way_is_an_error(speed: str):
    table = torch.arange(8).pin_memory()
    with falsecuda.arrival(speed):
        there = table.to(CUDA, non_blocking=True)
        table[0] = 9
        with pytest.raises(RuntimeError, match="written while a copy from it to the device was under way"):
            torch.cuda.synchronize()
    assert len(falsecuda.take("faults")) == 1
    assert there.tolist() == list(range(8))
    table[0] = 10  # nothing is under way
    torch.cuda.synchronize()


def test_a_copy_there_and_back_is_in_order():
    t = torch.arange(5, device=CUDA)
    assert t.to("cpu", non_blocking=True).to(CUDA, non_blocking=True).tolist() == list(range(5))


def test_numpy_into_pinned_memory_is_refused_as_torch_refuses_it():
    with pytest.raises(RuntimeError, match="Can't pin tensor constructed from numpy"):
        torch.tensor(torch.arange(4).numpy(), pin_memory=True)


def test_hidden_waits_are_counted_by_name_and_can_be_an_error():
    t = torch.ones(4, device=CUDA)
    with falsecuda.counted_waits(events=True) as waits:
        t.sum().item()
        t.nonzero()
        t[t > 0]
        t.cpu()
        torch.ones(2).to(CUDA)
        t[t > 0] = torch.ones(4, device=CUDA)
        t[torch.tensor([1])]
        torch.cuda.synchronize()
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    assert waits.names == [
        "_local_scalar_dense (.item(), bool(), float())",
        "aten::nonzero",
        "aten::index by a mask",
        "copy from the device to the host",
        "copy from the host to the device",
        "aten::_index_put_impl_ by a mask",
        "aten::index by an index on the host",
        "torch.cuda.synchronize",
        "0 ops since it was recorded, arrived",
    ]
    with pytest.warns(UserWarning, match="prototype"):
        torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            bool(t[0])
        t.sum()
        t[t > 0] = 0.0  # fills where a mask says, without counting
    finally:
        with pytest.warns(UserWarning, match="prototype"):
            torch.cuda.set_sync_debug_mode("default")


def test_bytes_and_blocks_are_counted():
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    bytes_before, blocks_before = torch.cuda.memory_allocated(), falsecuda.blocks_alive()
    kept = torch.empty(1000, device=CUDA)
    more = torch.empty(1 << 20, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_allocated() - bytes_before == 4096 + (1 << 20)
    del more
    assert torch.cuda.memory_allocated() - bytes_before == 4096
    assert torch.cuda.max_memory_allocated() - bytes_before == 4096 + (1 << 20)
    assert falsecuda.blocks_alive() - blocks_before == 1
    assert torch.cuda.memory_stats()["allocation.all.current"] - blocks_before == 1
    flags = [kept.sum() > 0 for _ in range(5)]  # five flags that leak are five blocks
    assert falsecuda.blocks_alive() - blocks_before == 1 + len(flags)


def test_the_device_has_random_numbers_of_its_own():
    torch.manual_seed(3)
    here = torch.rand(2)
    torch.manual_seed(3)
    torch.rand(2, device=CUDA)
    nn.functional.dropout(torch.ones(100, device=CUDA), 0.5)
    assert torch.equal(torch.rand(2), here)
    state = torch.cuda.get_rng_state()
    first = nn.functional.dropout(torch.ones(100, device=CUDA), 0.5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(100, device=CUDA), 0.5), first)


def test_while_a_graph_is_captured_nothing_waits():
    event = torch.cuda.Event()
    event.record()
    with falsecuda.capturing():
        assert torch.cuda.is_current_stream_capturing()
        t = torch.ones(2, device=CUDA) + 1
        for waits in (event.query, event.synchronize, t.tolist, torch.cuda.synchronize):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                waits()
    assert not torch.cuda.is_current_stream_capturing()
    assert t.tolist() == [2.0, 2.0]


def test_storages_are_copied_saved_and_loaded(tmp_path):
    net = nn.Linear(3, 2, device=CUDA)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    loaded = torch.load(tmp_path / "net.pt")
    assert loaded["weight"].is_cuda
    assert torch.equal(loaded["weight"], net.weight)
    assert not torch.load(tmp_path / "net.pt", map_location="cpu")["weight"].is_cuda
    t = torch.ones(4, device=CUDA)
    t.untyped_storage().resize_(0)
    assert t.untyped_storage().nbytes() == 0
